"""Folders, sockets and files prepared by another user: the broker and its clients refuse them and leave them untouched.

Needs root: the other user is real.
"""

import os
import pwd
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from fractional_gpu.broker.process.app import run_broker
from fractional_gpu.broker.process.driver_start import simulated_folder
from fractional_gpu.broker.process.restarting import BrokerOptions
from fractional_gpu.client.discovery import ensure_broker, runtime_dir
from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.errors import BrokerUnavailableError
from tests.broker.live import BECOME_NOBODY
from tests.support.world import World, new_world

pytestmark = pytest.mark.promise("prepared-places", "state-folder")

NOBODY = pwd.getpwnam("nobody").pw_uid


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of ours that others may enter."""
    with tempfile.TemporaryDirectory(prefix="jfg-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as made:
        yield made


def as_nobody(code: str, *arguments: str) -> str:
    """Run a program as another user and return its output."""
    argv = [sys.executable, "-S", "-c", "import os, socket, sys\n" + BECOME_NOBODY + code, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True, cwd="/").stdout


def owned_by_another(place: Path) -> None:
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def open_to_all_and_sticky(place: Path) -> None:
    place.mkdir()
    place.chmod(0o1777)


def link_to_anothers(place: Path) -> None:
    owned_by_another(place.with_name("theirs"))
    place.symlink_to("theirs")


def link_of_another_to_ours(place: Path) -> None:
    place.with_name("ours").mkdir(mode=0o700)
    place.symlink_to("ours")
    os.chown(place, NOBODY, NOBODY, follow_symlinks=False)


PLACES: list[Callable[[Path], None]] = [
    owned_by_another,
    open_to_all,
    open_to_all_and_sticky,
    link_to_anothers,
    link_of_another_to_ours,
]


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("prepare", PLACES, ids=lambda prepare: prepare.__name__)
def test_a_broker_does_not_serve_where_others_could_have_put_something(
    folder: Path, prepare: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(folder / "place")
    before = everything(folder)
    for detach in (False, True):
        options = BrokerOptions(socket=str(folder / "place" / "b.sock"), simulate="1x1GiB", detach=detach)
        assert run_broker(options) == 1
        said = capsys.readouterr().err
        assert "belongs to another user" in said or "other users can write to the folder" in said
        assert "set JUPYTER_GPU_SOCKET" in said
    assert everything(folder) == before


@pytest.mark.parametrize("prepare", PLACES, ids=lambda prepare: prepare.__name__)
def test_a_client_does_not_speak_to_what_others_could_have_put_there(
    folder: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(folder / "place")
    listen = (
        "import socket, sys; line = socket.socket(socket.AF_UNIX); line.bind(sys.argv[1]); line.listen(); print('up')"
    )
    if prepare is not link_of_another_to_ours:
        assert as_nobody(listen, str(folder / "place" / "b.sock")) == "up\n", "the attack itself works"
    with pytest.raises(BrokerUnavailableError, match=r"belongs to another user|other users can write"):
        ensure_broker(str(folder / "place" / "b.sock"))


def test_a_user_cannot_put_anything_into_a_brokers_folder(world: World) -> None:
    world.start_broker()
    run, state = Path(world.socket).parent, world.state
    for above in (world.folder, run, *(one for one in (state, *state.parents) if one.is_relative_to(world.folder))):
        above.chmod(stat.S_IMODE(above.stat().st_mode) | 0o011)  # even if others may pass through
    attack = """
for name in ("broker.json", "ledger-simulated.sqlite", "ledger-simulated.sqlite.lock", "broker.log", "broker.sock.lock", "broker.sock"):
    for act in (lambda path: open(path).read(), lambda path: open(path, "a"), os.unlink, lambda path: os.symlink("/", path + ".x"),
                lambda path: os.link("/etc/passwd", path + ".y")):
        try:
            act(os.path.join(sys.argv[1], name))
        except (PermissionError, FileNotFoundError, OSError) as error:
            assert error.errno in (1, 2, 13, 6, 18), error
        else:
            print(name)
"""
    for place in (run, state):
        before = everything(place)
        assert as_nobody(attack, str(place)) == ""
        assert everything(place) == before


REFUSED = """
import os, sys
from fractional_gpu.broker.process.app import run_broker
from fractional_gpu.broker.process.restarting import BrokerOptions
for socket in sys.argv[1:]:
    os.environ["XDG_STATE_HOME"] = os.path.join(os.path.dirname(socket), "state")
    assert run_broker(BrokerOptions(socket=socket)) == 1
    sys.stderr.write("\\0")
"""


def refused_starts(world: World, folders: list[Path]) -> list[str]:
    """What a broker that cannot start prints for a socket in each folder. It leaves no simulated host that it created."""
    sockets = [str(folder / "broker.sock") for folder in folders]
    argv = [sys.executable, "-P", "-c", REFUSED, *sockets]
    done = subprocess.run(argv, env=world.environment, capture_output=True, text=True, check=True, timeout=60)
    assert "Traceback" not in done.stderr
    *said, end = done.stderr.split("\0")
    assert (len(said), end) == (len(folders), "")
    assert not [socket for socket in sockets if simulated_folder(socket).exists()]
    return said


def ledger_in(folder: Path) -> Path:
    """Return where the ledger of a broker with its socket in this folder will lie."""
    with patch.dict(os.environ, {"XDG_STATE_HOME": str(folder / "state")}):
        return make_state_folder(str(folder / "broker.sock")) / "ledger-simulated.sqlite"


def refused_in_the_background(world: World) -> str:
    """What the command prints if its broker does not start."""
    argv = [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--socket", world.socket, "--detach"]
    done = subprocess.run(argv, env=world.environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_is_in_the_sockets_place_is_named_and_left(world: World) -> None:
    precious = world.folder / "precious"
    precious.write_text("keep")
    folders = [world.folder / what for what in ("fifo", "dangling", "link")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    fifo, dangling, link = paths = [folder / "broker.sock" for folder in folders]
    os.mkfifo(fifo)
    dangling.symlink_to(world.folder / "nowhere")
    link.symlink_to(precious)
    before = [path.lstat() for path in paths]
    for path, stood, said in zip(paths, before, refused_starts(world, folders), strict=True):
        assert str(path) in said
        assert "--socket" in said
        assert (path.lstat().st_ino, path.lstat().st_mode) == (stood.st_ino, stood.st_mode)
    assert precious.read_text() == "keep"
    assert not (world.folder / "nowhere").exists()


def test_a_link_in_a_files_place_is_not_followed(world: World) -> None:
    precious = world.folder / "precious"
    precious.write_text("keep")
    names = ["broker.sock.lock", "broker.sock.worker"]
    folders = [world.folder / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        folder.mkdir(mode=0o700)
        (folder / name).symlink_to(precious)
    folders.append(world.folder / "ledger")
    folders[-1].mkdir(mode=0o700)
    ledger_in(folders[-1]).symlink_to(precious)
    names.append("ledger-simulated.sqlite")
    for name, said in zip(names, refused_starts(world, folders), strict=True):
        assert name in said.replace(str(world.folder / name), "")
        assert precious.read_text() == "keep"


def test_a_rewrite_replaces_a_link_and_not_its_target(world: World) -> None:
    precious = world.folder / "precious"
    precious.write_text("keep")
    restart = Path(world.socket).with_name("broker.json")
    restart.symlink_to(precious)
    world.start_broker()
    assert precious.read_text() == "keep"
    assert not restart.is_symlink()
    assert stat.S_IMODE(restart.stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["fifo", "of another", "another's hard link"])
def test_a_ledger_that_another_prepared_is_refused(folder: Path, what: str) -> None:
    path = folder / "state" / "ledger.sqlite"
    Ledger.open(path).close()
    content = path.read_bytes()
    path.unlink()
    theirs = folder / "theirs"
    theirs.write_bytes(content)
    theirs.chmod(0o600)
    os.chown(theirs, NOBODY, NOBODY)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "of another":
        theirs.rename(path)
    else:
        os.link(theirs, path)
    with pytest.raises(LedgerError, match=r"is not a regular file|belongs to another user"):
        Ledger.open(path)


IN_THE_FOREGROUND = ["broker.sock.lock", "broker.sock.worker"]
OF_THE_LEDGER = ["ledger-simulated.sqlite", "ledger-simulated.sqlite-wal", "ledger-simulated.sqlite.lock"]


def linked(place: Path, precious: Path) -> Callable[[str], None]:
    """Give this file a second name, `precious`; return the check of what a refused broker said."""
    if place.exists():
        place.rename(precious)
    else:
        precious.write_text("keep")
    precious.chmod(0o644)
    before = precious.read_bytes()
    os.link(precious, place)

    def check(said: str) -> None:
        assert place.name in said
        assert "2 hard links" in said
        assert precious.read_bytes() == before
        assert stat.S_IMODE(precious.stat().st_mode) == 0o644

    return check


def test_files_with_another_name_are_refused_before_they_are_touched(world: World) -> None:
    folders: list[Path] = []
    checks = []
    for name in IN_THE_FOREGROUND + OF_THE_LEDGER:
        folders.append(world.folder / f"of-{len(folders)}")
        folders[-1].mkdir(mode=0o700)
        place = folders[-1] / name
        if name in OF_THE_LEDGER:
            ledger = ledger_in(folders[-1])
            Ledger.open(ledger).close()
            place = ledger.with_name(name)
        checks.append(linked(place, world.folder / f"precious-{len(folders)}"))
    for said, check in zip(refused_starts(world, folders), checks, strict=True):
        check(said)


@pytest.mark.parametrize("name", ["broker.err", "broker.log"])
def test_a_log_with_another_name_is_refused_before_it_is_touched(world: World, name: str) -> None:
    check = linked(Path(world.socket).with_name(name), world.folder / "precious")
    check(refused_in_the_background(world))


@pytest.mark.parametrize("there", [False, True])
def test_a_socket_below_anothers_folder_is_refused_before_anything_is_made(
    folder: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    owned_by_another(folder / "theirs")
    ours = folder / "theirs" / "ours" / "place"
    if there:
        ours.mkdir(mode=0o700, parents=True)
    before = everything(folder)
    for detach in (False, True):
        assert run_broker(BrokerOptions(socket=str(ours / "b.sock"), simulate="1x1GiB", detach=detach)) == 1
        said = capsys.readouterr().err
        assert f"is inside {folder / 'theirs'}, which belongs to another user (uid {NOBODY})" in said
        assert "set JUPYTER_GPU_SOCKET" in said
    assert everything(folder) == before
    if there:
        with pytest.raises(BrokerUnavailableError, match="is inside"):
            ensure_broker(str(ours / "b.sock"))


def test_a_runtime_folder_below_anothers_is_left_for_a_private_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned_by_another(folder / "theirs")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "theirs" / "runtime"))
    monkeypatch.delenv("JUPYTER_GPU_SOCKET", raising=False)
    monkeypatch.setenv("TMPDIR", str(folder))
    assert runtime_dir().parent == folder
    assert stat.S_IMODE(runtime_dir().stat().st_mode) == 0o700
    assert list((folder / "theirs").iterdir()) == []


IN_ANOTHERS_HOME = """
import contextlib, io, os, sys
from fractional_gpu.client.discovery import socket_path
from fractional_gpu.commands.doctor import setup as jupyter
from fractional_gpu.commands.main import main
theirs, temporary, own = sys.argv[1:]
for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_GPU_SOCKET", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
    os.environ.pop(name, None)
os.environ["TMPDIR"] = temporary

def try_all(home):
    os.environ["HOME"] = home
    print(os.path.dirname(os.path.dirname(socket_path())))
    for words in (["status"], ["kernels", "list"], ["uninstall", "--dry-run"]):
        print(main(words))
    list(jupyter.check_cullers(environment={}))

with contextlib.redirect_stdout(io.StringIO()):
    try_all(own)  # loads what is imported late: the interpreter may lie where no other user reaches it
os.setgroups([]); os.setgid(4242); os.setuid(4242)
try_all(theirs)
"""


def test_commands_work_in_a_closed_home_of_another_user(folder: Path) -> None:
    """As `sudo -E` and `su --preserve-environment` do."""
    theirs, temporary, own = folder / "theirs", folder / "tmp", folder / "own"
    owned_by_another(theirs)
    theirs.chmod(0o700)
    own.mkdir()
    temporary.mkdir()
    temporary.chmod(0o1777)
    argv = [sys.executable, "-P", "-c", IN_ANOTHERS_HOME, *map(str, (theirs, temporary, own))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == str(temporary), "the socket is in a folder of this user's"
    assert [line for line in said if line.isdecimal()] == ["0", "0", "0"]
    assert everything(theirs) == set()
