"""The broker is found where it should be, started if none serves, and trusted only if no other user could have put it there."""

import errno
import fcntl
import json
import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.client import discovery, state_folder
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker, runtime_dir, socket_path, unstarted_broker
from fractional_gpu.client.http import claim_holder, is_service_socket
from fractional_gpu.protocol.errors import BrokerUnavailableError, ForbiddenError
from tests.support.fake_broker import FakeBroker
from tests.support.full_disks import no_temporary_files

pytestmark = pytest.mark.promise("state-folder", "shared-home", "system-service", "start-together")

SOMEBODY = 54321


@pytest.fixture(autouse=True)
def home(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(short_path / "rt"))
    monkeypatch.delenv("JUPYTER_GPU_SOCKET", raising=False)
    monkeypatch.setattr(discovery, "SYSTEM_SOCKET", str(short_path / "no-system.sock"))
    monkeypatch.setattr(discovery, "SYSTEM_UNIT", str(short_path / "no-system.service"))
    return short_path


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the path to another user; without root, pretend to be another user."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def write_settings(folder: Path, code: str, *arguments: str) -> None:
    """Let the broker of this folder be started by a little Python."""
    (folder / "broker.json").write_text(
        json.dumps({"argv": [sys.executable, "-c", code, *arguments], "env": {"A": "1"}})
    )
    (folder / "broker.json").chmod(0o600)


@contextmanager
def started_on_demand(folder: Path) -> Iterator[tuple[FakeBroker, list[int]]]:
    """A broker that comes up when the start command runs; yields it and the list of the starts."""
    broker, starts, path = FakeBroker(str(folder / "b.sock")), list[int](), str(folder / "control")
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); assert s.recv(1) == b'k'"
    write_settings(folder, code, path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve_starts() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)
                    if int.from_bytes(peer, sys.byteorder) == os.getpid():
                        return  # the test is over
                    if not starts:
                        broker.start()
                    starts.append(1)
                    connection.sendall(b"k")

        thread = threading.Thread(target=serve_starts)
        thread.start()
        try:
            yield broker, starts
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(path)
            thread.join()
            broker.stop()


def test_the_environment_names_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", "/somewhere/b.sock")
    assert socket_path() == "/somewhere/b.sock"
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", "/" + "x" * 120)
    with pytest.raises(BrokerUnavailableError, match="longer than 100 bytes"):
        socket_path()


def test_a_relative_path_means_the_same_in_every_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", "run/b.sock")
    assert socket_path() == str(home / "run" / "b.sock")
    monkeypatch.delenv("JUPYTER_GPU_SOCKET")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", "rt")
    assert socket_path() == str(home / "rt" / "gpu" / "broker.sock")


def test_a_system_service_comes_before_a_users_own(home: Path) -> None:
    (home / "no-system.sock").touch()
    assert socket_path() == str(home / "no-system.sock")


def test_while_a_service_restarts_no_broker_of_a_user_takes_its_place(home: Path) -> None:
    (home / "no-system.sock.lock").touch()  # stays after its socket has gone
    assert socket_path() == str(home / "no-system.sock")


def test_a_users_own_socket_is_in_a_private_folder(home: Path) -> None:
    assert socket_path() == str(home / "rt" / "gpu" / "broker.sock")
    assert (home / "rt" / "gpu").stat().st_mode & 0o777 == 0o700
    (home / "rt" / "gpu").chmod(0o755)
    assert runtime_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("umask", [0, 0o022])
def test_jupyters_runtime_folder_is_private_where_we_are_the_first_to_need_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    # A server writes a page with its token there, which any user may read who may enter the folder.
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(home / ".local" / "share" / "jupyter" / "runtime"))
    before = os.umask(umask)
    try:
        runtime_dir()
    finally:
        os.umask(before)
    made = [home / ".local", *(home / ".local").rglob("*")]
    names = (".local", "share", "jupyter", "runtime", "gpu")
    assert {one.name: stat.S_IMODE(one.stat().st_mode) for one in made} == dict.fromkeys(names, 0o700)


def test_in_a_home_that_hosts_share_each_host_has_a_separate_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_folder, "_MOUNTS", home / "mountinfo")
    (home / "mountinfo").write_text(f"1 0 8:1 / / rw - ext4 d rw\n2 1 0:5 / {home} rw - nfs server:/home rw\n")
    (home / "machine-id").write_text("0123\n")
    monkeypatch.setattr(state_folder, "_MACHINE_ID", home / "machine-id")
    found = set()
    for host in ("node-a", "node-b"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert socket_path() == socket_path()
        found.add(socket_path())
        assert runtime_dir().parent == home / "rt"
        assert runtime_dir().stat().st_mode & 0o777 == 0o700
    assert len(found) == 2
    (home / "mountinfo").write_text("1 0 8:1 / / rw - ext4 d rw\n")
    assert socket_path() == str(home / "rt" / "gpu" / "broker.sock")


def test_a_service_whose_folder_this_user_may_not_enter_is_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: str | Path, **options: Any) -> os.stat_result:  # noqa: ANN401 - as the system's
        if str(path) == discovery.SYSTEM_SOCKET:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert socket_path() == discovery.SYSTEM_SOCKET


def test_a_service_that_has_never_run_is_the_broker_and_no_other_starts(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (home / "no-system.service").touch()
    assert socket_path() == discovery.SYSTEM_SOCKET
    monkeypatch.setattr(discovery, "_is_service", lambda path: path == discovery.SYSTEM_SOCKET)
    monkeypatch.setattr(discovery, "_RESTART_S", 0.0)
    with pytest.raises(BrokerUnavailableError, match="sudo systemctl enable --now jupyter-gpu"):
        ensure_broker()


def test_a_path_too_long_for_a_socket_gets_a_short_private_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(home / ("x" * 100)))
    path = Path(socket_path())
    assert path.parent.parent == home
    assert len(str(path)) <= 100
    assert path.parent.stat().st_mode & 0o777 == 0o700
    no_temporary_files(monkeypatch)
    assert socket_path() == str(path), "the broker's, also where the disk is full"
    path.parent.rmdir()
    path.parent.symlink_to(home)
    with pytest.raises(BrokerUnavailableError, match="is a symbolic link or not a folder"):
        socket_path()


def test_a_runtime_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_foreign(runtime_dir(), monkeypatch)
    with pytest.raises(BrokerUnavailableError, match="belongs to another user"):
        runtime_dir()


def test_a_socket_folder_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "theirs"
    folder.mkdir()
    make_foreign(folder, monkeypatch)
    with pytest.raises(BrokerUnavailableError, match="belongs to another user"):
        ensure_broker(str(folder / "b.sock"))


def test_a_socket_folder_that_others_may_write_to_is_refused(home: Path) -> None:
    home.chmod(0o777)
    with pytest.raises(BrokerUnavailableError, match="other users can write"):
        ensure_broker(str(home / "b.sock"))


def test_a_broker_that_serves_is_used(home: Path) -> None:
    with FakeBroker(str(home / "b.sock")) as broker, ensure_broker(broker.path) as client:
        assert client.ping().pid == os.getpid()


def test_a_broker_is_started_if_none_serves(home: Path) -> None:
    with started_on_demand(home) as (broker, starts):
        with ensure_broker(broker.path, token="t") as client:  # noqa: S106 - any
            assert client.ping().simulated
        with ensure_broker(broker.path):
            assert starts == [1]


def test_starters_at_the_same_time_start_one_broker_and_all_get_it(home: Path) -> None:
    with started_on_demand(home) as (broker, starts):
        pids = list[int]()

        def start() -> None:
            with ensure_broker(broker.path) as client:
                pids.append(client.ping().pid)

        threads = [threading.Thread(target=start) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pids == [os.getpid()] * 5
        assert starts == [1], "the others waited for it"


def test_a_starter_waits_for_another_one_no_longer_than_it_was_told_to(home: Path) -> None:
    with started_on_demand(home) as (broker, starts):
        other = os.open(home, os.O_RDONLY | os.O_DIRECTORY)  # a starter that is stopped
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            with ensure_broker(broker.path, timeout_s=2) as client:
                assert client.ping().pid == os.getpid()
        finally:
            os.close(other)
        assert starts == [1]


def test_a_child_that_was_forked_in_a_start_keeps_no_starter_waiting(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(home, "raise SystemExit('no GPU')")
    real, copies = fcntl.flock, list[int]()

    def copying(descriptor: int, kind: int) -> None:
        copies.append(os.dup(descriptor))  # what a child has
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", copying)
    try:
        with pytest.raises(BrokerUnavailableError, match="no GPU"):
            ensure_broker(str(home / "b.sock"))
        copies.append(os.open(home, os.O_RDONLY | os.O_DIRECTORY))
        real(copies[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is still locked
    finally:
        for copy in copies:
            os.close(copy)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import sys; print('noise', file=sys.stderr); sys.exit('no GPU was found; use --simulate')",
            "^no GPU was found",
        ),
        ("raise SystemExit(3)", "could not be started .exit code 3."),
        ("pass", "no GPU broker is running"),
    ],
    ids=["sentence", "silent", "lies"],
)
def test_a_start_that_fails_says_why(home: Path, code: str, says: str) -> None:
    write_settings(home, code)
    with pytest.raises(BrokerUnavailableError, match=says):
        ensure_broker(str(home / "b.sock"))


def test_in_a_job_no_message_says_to_start_a_broker(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job, advice in (("", "start one with `jupyter gpu broker`"), ("12", "an administrator must start the node's")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        with BrokerClient(str(home / "b.sock")) as client, pytest.raises(BrokerUnavailableError, match=advice):
            client.ping()


def test_a_start_that_fails_says_why_where_no_temporary_file_can_be_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home / "full"))
    write_settings(home, "import sys; sys.exit('the disk is full')")
    with pytest.raises(BrokerUnavailableError, match="the disk is full"):
        ensure_broker(str(home / "b.sock"))


def test_a_start_that_takes_too_long_is_ended(home: Path) -> None:
    write_settings(home, "import sys; sys.stdin.close(); import signal; signal.pause()")
    with pytest.raises(BrokerUnavailableError, match=r"within 0\.2 s"):
        ensure_broker(str(home / "b.sock"), timeout_s=0.2)


def test_a_broker_that_keeps_stderr_open_does_not_hold_the_start_up(home: Path) -> None:
    code = "import os, sys\nif os.fork() == 0: open(sys.argv[1]).read(); os._exit(0)\nsys.exit('said')"
    os.mkfifo(home / "fifo")
    write_settings(home, code, str(home / "fifo"))
    with pytest.raises(BrokerUnavailableError, match=r"^said$"):
        ensure_broker(str(home / "b.sock"))
    (home / "fifo").open("w").close()  # lets the child go


def test_an_interpreter_that_was_removed_is_named(home: Path) -> None:
    (home / "broker.json").write_text('{"argv": ["/nowhere/python"]}')
    (home / "broker.json").chmod(0o600)
    with pytest.raises(BrokerUnavailableError, match=r"/nowhere/python: No such file.*broker\.json"):
        ensure_broker(str(home / "b.sock"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.chmod(0o622), "another user could have written it"),
        (lambda path: path.with_name("other").hardlink_to(path), "another user could have written it"),
        (lambda path: (path.rename(f"{path}.real"), path.symlink_to(f"{path}.real")), "cannot be read"),
        (lambda path: (path.unlink(), path.mkdir()), "another user could have written it"),
        (lambda path: path.write_text("{"), "is not of the form"),
        (lambda path: path.write_text("[]"), "is not of the form"),
        (lambda path: path.write_text('{"argv": []}'), "is not of the form"),
        (lambda path: path.write_text('{"argv": ["a", 1]}'), "is not of the form"),
        (lambda path: path.write_text('{"argv": ["a"], "env": {"A": 1}}'), "is not of the form"),
        (lambda path: path.write_text('{"argv": ["a"], "env": []}'), "is not of the form"),
    ],
    ids=["writable", "hard link", "symlink", "folder", "cut", "list", "empty", "number", "env-number", "env-list"],
)
def test_a_start_command_that_is_not_to_be_trusted_is_not_run(
    home: Path, make: Callable[[Path], object], says: str
) -> None:
    write_settings(home, "raise SystemExit(0)")
    make(home / "broker.json")
    with pytest.raises(BrokerUnavailableError, match=says):
        ensure_broker(str(home / "b.sock"))


def test_a_socket_in_an_open_folder_is_not_spoken_to_either_where_none_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(home / "b.sock"))
    with unstarted_broker(token="t") as client, pytest.raises(BrokerUnavailableError, match="no GPU broker is running"):  # noqa: S106
        client.ping()
    home.chmod(0o777)
    with pytest.raises(BrokerUnavailableError, match="other users can write"):
        unstarted_broker()


def test_a_start_command_of_another_user_is_not_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_settings(home, "raise SystemExit(0)")
    make_foreign(home / "broker.json", monkeypatch)
    monkeypatch.setattr(discovery, "check_folder", str)
    with pytest.raises(BrokerUnavailableError, match="another user could have written it"):
        ensure_broker(str(home / "b.sock"))


def test_without_settings_this_interpreter_starts_it(home: Path) -> None:
    argv, environment = discovery._start_command(str(home / "b.sock"))
    assert argv[0] == sys.executable
    assert argv[1:5] == ["-P", "-m", "fractional_gpu.broker", "--detach"]
    assert [json.loads(options) for options in argv[5:]] == [{"socket": str(home / "b.sock")}]
    assert environment == {}


def test_a_service_that_restarts_is_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`systemctl restart`: for a moment no broker runs."""
    monkeypatch.setattr(discovery, "_is_service", lambda _: True)
    looked = threading.Event()

    def look(path: str) -> int | None:
        looked.set()
        return claim_holder(path)

    monkeypatch.setattr(discovery, "claim_holder", look)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(ensure_broker, str(home / "b.sock"))
        assert looked.wait(30)
        with FakeBroker(str(home / "b.sock")), start.result(30) as client:
            assert client.ping()


def test_a_system_service_is_never_started_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_RESTART_S", 0.1)
    with pytest.raises(BrokerUnavailableError, match="system service"):
        ensure_broker("/run/jupyter-gpu-nowhere/b.sock")
    assert not is_service_socket("/run/user/1000/b.sock")


def test_a_broker_of_another_protocol_is_not_spoken_to(home: Path) -> None:
    with FakeBroker(str(home / "b.sock")) as broker:
        broker.protocol = 9
        with pytest.raises(
            BrokerUnavailableError,
            match=r"'0; protocol=9' and its client .*; protocol=1', .*: install the same version",
        ):
            ensure_broker(broker.path)


def test_a_broker_that_refuses_us_is_not_replaced(home: Path) -> None:
    write_settings(home, "raise SystemExit('started')")
    with FakeBroker(str(home / "b.sock")) as broker:
        broker.fail["ping"] = ForbiddenError("not for you")
        with pytest.raises(ForbiddenError, match="not for you"):
            ensure_broker(broker.path)
