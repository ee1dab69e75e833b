"""`jupyter gpu setup-machine` sets up the files of a machine for several users, and leaves no trace when undone.

All in folders (`--root`); tests/e2e/test_workstation.py sets up a whole machine, with commands.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu import __version__
from fractional_gpu.commands import setup_machine
from fractional_gpu.commands.main import main
from fractional_gpu.commands.setup_machine import propose_shares
from fractional_gpu.config import load
from fractional_gpu.config.service import CONFIG, KERNELS, PROFILE, PROGRAM, RECORD, UNIT
from fractional_gpu.core.units import format_fraction
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.jupyter.kernelspecs import list_installed
from tests.support.paths import failing

pytestmark = pytest.mark.promise("workstation")

Tree = dict[str, tuple[int, int, int, bytes]]


def tree_of(root: Path) -> Tree:
    """Return every path below the folder, with its mode, owners and content."""
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_uid, status.st_gid, content)
    return found


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with files of its own, and without a GPU."""

    def open_monitor(_backend: str) -> object:
        raise GPUError(GPUErrorCode.NOT_SUPPORTED, "no driver")

    monkeypatch.setattr(setup_machine, "open_monitor", open_monitor)
    root = tmp_path / "machine"
    for name, text, mode in (
        ("etc/hosts", "127.0.0.1 localhost\n", 0o644),
        ("etc/profile.d/site.sh", "umask 027\n", 0o600),
        ("usr/local/share/jupyter/kernels/site/kernel.json", "{}", 0o640),
    ):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
    os.chown(root / "etc/profile.d/site.sh", 3, 4)
    return root


def set_up(root: Path, *words: str) -> int:
    return main(["setup-machine", "--root", str(root), *words])


def at(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def test_all_users_get_the_service_the_kernels_and_a_word_about_them(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_up(root, "--share", "1/4", "--share", "1", "--admins", "operators") == 0
    settings = load(at(root, CONFIG))
    assert settings.admin_group == "operators"
    assert [format_fraction(one) for one in settings.first_pool.fractions] == ["1/4", "1"]
    assert settings.first_pool.exclusive
    specs = list_installed(str(at(root, KERNELS)))
    assert [(one.fraction_milli, one.gated, one.argv[0]) for one in specs] == [
        (250, True, "/opt/jupyter-fractional-gpu/bin/python"),
        (1000, True, "/opt/jupyter-fractional-gpu/bin/python"),
    ]
    assert os.access(at(root, PROGRAM), os.X_OK)
    for path in (CONFIG, PROGRAM, PROFILE, UNIT, *(KERNELS / one.name / "kernel.json" for one in specs)):
        status = at(root, path).stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o022, status.st_mode & 0o444) == (0, 0, 0, 0o444), path
    said = capsys.readouterr().out
    assert "not run here: groupadd --system operators" in said
    assert "not run here: systemctl enable jupyter-gpu.service" in said
    assert "-m pip install" in said


@pytest.mark.parametrize(("session", "told"), [("SSH_CONNECTION=1", True), ("X=1", False)])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_profile_tells_people_who_come_by_ssh_and_no_others(
    root: Path, shell: str, session: str, told: bool
) -> None:
    assert set_up(root) == 0
    for flags, says in ((["-i"], told), ([], False)):
        script = f". {at(root, PROFILE)}; echo end"
        words = ["env", "-i", "PATH=/usr/bin:/bin", session, shell, *flags, "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        assert done.stdout.endswith("end\n")
        assert ("jupyter-gpu run" in done.stdout) == says, done
        assert done.stdout.count("\n") == 1 + says


def test_systemd_finds_no_fault_in_the_installed_unit(root: Path, tmp_path: Path) -> None:
    assert set_up(root) == 0
    shutil.copy(at(root, UNIT), tmp_path)
    unit = tmp_path / UNIT.name
    program = "/opt/jupyter-fractional-gpu/bin/jupyter-gpu"
    assert f"ExecStart={program} broker --service" in unit.read_text()
    unit.write_text(unit.read_text().replace(program, "/bin/true"))
    words = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (0, []), done.stderr


def test_a_dry_run_prints_every_file_and_writes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree_of(root)
    assert set_up(root, "--dry-run") == 0
    assert tree_of(root) == before
    said = capsys.readouterr().out
    assert set_up(root) == 0
    for path in [name for name in tree_of(root).keys() - before.keys() if (root / name).is_file()]:
        if path != str(RECORD).lstrip("/"):
            assert f"write {root / path}\n" in said
    assert at(root, CONFIG).read_text() in said
    done = tree_of(root)
    assert set_up(root, "--undo", "--dry-run") == 0
    assert tree_of(root) == done
    assert f"remove {at(root, UNIT)}\n" in capsys.readouterr().out


def test_a_second_run_changes_nothing_and_repeats_what_is_left_to_run(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_up(root, "--share", "1/2") == 0
    done, written = tree_of(root), at(root, UNIT).stat().st_mtime_ns
    left = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not run here: ")]
    assert len(left) == 6
    for words in (["--share", "1/2"], [], ["--dry-run"]):
        assert set_up(root, *words) == 0
        assert capsys.readouterr().out.splitlines()[:6] == left
        assert (tree_of(root), at(root, UNIT).stat().st_mtime_ns) == (done, written)


def test_other_shares_replace_the_kernels_of_the_first(root: Path) -> None:
    before = tree_of(root)
    for share in ("1/2", "1/4"):
        assert set_up(root, "--share", share) == 0
        specs = list_installed(str(at(root, KERNELS)))
        assert [format_fraction(one.fraction_milli) for one in specs] == [share]
    assert set_up(root, "--undo") == 0
    assert tree_of(root) == before


def test_the_administrators_own_configuration_stays_and_gives_the_kernels(root: Path) -> None:
    config = at(root, CONFIG)
    config.parent.mkdir()
    config.write_text("c.GPUBroker.pools = {'night': {'fractions': ['1/8']}}\n")
    before = tree_of(root)
    assert set_up(root) == 0
    assert config.read_text().startswith("c.GPUBroker.pools = {'night'")
    assert [one.pool for one in list_installed(str(at(root, KERNELS)))] == ["night"]
    assert set_up(root, "--undo") == 0
    assert tree_of(root) == before


def test_a_file_that_others_wrote_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = at(root, UNIT)
    unit.parent.mkdir(parents=True)
    unit.write_bytes(b"[Unit]\nDescription=mine \xff\n")
    before = tree_of(root)
    assert set_up(root) == 1
    assert f"first move away what this command did not write: {unit}" in capsys.readouterr().err
    assert tree_of(root) == before


def test_what_the_administrator_changed_later_is_not_lost(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree_of(root)
    assert set_up(root) == 0
    profile, config = at(root, PROFILE), at(root, CONFIG)
    edited = config.read_text() + "c.GPUBroker.host_memory = '30%'\n"
    config.write_text(edited)
    assert set_up(root) == 0, "the configuration is theirs to change"
    profile.write_text("echo mine\n")
    done = tree_of(root)
    for words in (["--share", "1/2"], []):
        capsys.readouterr()
        assert set_up(root, *words) == 1
        assert f"{profile}" in capsys.readouterr().err
        assert tree_of(root) == done
    assert set_up(root, "--undo") == 0
    assert f"These stay until you remove them: {config}, {profile}" in capsys.readouterr().out
    assert profile.read_text() == "echo mine\n"
    assert config.read_text() == edited
    profile.unlink()
    shutil.rmtree(config.parent)
    assert tree_of(root) == before


def test_what_others_put_into_our_folders_stays(root: Path) -> None:
    assert set_up(root) == 0
    theirs = at(root, CONFIG).with_name("jupyter_server_config.py")
    theirs.write_text("")
    assert set_up(root, "--undo") == 0
    assert list(theirs.parent.iterdir()) == [theirs]
    assert not at(root, RECORD).exists()


@pytest.mark.parametrize("path", [CONFIG, UNIT, RECORD])
def test_a_link_is_not_followed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("c.GPUBroker.pools = {'default': {}}\n")
    at(root, path).parent.mkdir(parents=True, exist_ok=True)
    at(root, path).symlink_to(target)
    before = tree_of(root)
    assert set_up(root) == 1
    assert f"{at(root, path)} cannot be changed" in capsys.readouterr().err
    assert tree_of(root) == before
    assert target.read_text() == "c.GPUBroker.pools = {'default': {}}\n"


def test_a_folder_that_leads_out_of_the_image_is_not_used(root: Path, tmp_path: Path) -> None:
    (root / "usr/local/bin").symlink_to(tmp_path)
    before = tree_of(root)
    assert set_up(root) == 1
    assert tree_of(root) == before


def test_nothing_is_written_or_removed_below_a_users_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, folder in (([], root / "usr/local"), (["--undo"], root / "etc")):
        os.chown(folder, 1234, 0)
        before = tree_of(root)
        assert set_up(root, *words) == 1
        assert f"{folder} belongs to another user (uid 1234)" in capsys.readouterr().err

        assert tree_of(root) == before
        os.chown(folder, 0, 0)
        assert set_up(root) == 0


def test_a_folder_that_is_no_image_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--undo"]):
        assert set_up(tmp_path, *words) == 1
        assert f"{tmp_path}/etc is missing: create it" in capsys.readouterr().err
    assert tree_of(tmp_path) == {}


def test_a_damaged_record_is_one_clear_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for damaged in ("", "{", '{"files": 3}'):
        at(root, RECORD).write_text(damaged)
        before = tree_of(root)
        for words in ([], ["--undo"]):
            assert set_up(root, *words) == 1
            assert f"{at(root, RECORD)} is damaged" in capsys.readouterr().err
        assert tree_of(root) == before


def killed_at(root: Path, tmp_path: Path, step: int, *words: str) -> bool:
    """Run the command and kill it before the given step; return whether there was one."""
    failpoints = tmp_path / f"failpoints-{len(list(tmp_path.iterdir()))}"
    failpoints.write_text(f"setup-machine {step} kill")
    argv = [sys.executable, "-m", "fractional_gpu.commands.main", "setup-machine", "--root", str(root), *words]
    environment = {**os.environ, **failing(failpoints)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def test_a_run_that_was_killed_at_any_step_is_finished_by_the_next_or_undone(root: Path, tmp_path: Path) -> None:
    before = tree_of(root)
    share = ("--share", "1/2")
    assert set_up(root, *share) == 0
    complete = tree_of(root)
    assert set_up(root, "--undo") == 0
    steps = 0
    while killed_at(root, tmp_path, steps + 1, *share):
        steps += 1
        partial = tmp_path / f"partial-{steps}"
        shutil.copytree(root, partial, copy_function=shutil.copy2)
        for name, (_, uid, gid, _) in tree_of(root).items():
            os.chown(partial / name, uid, gid)
        assert set_up(root, *share) == 0
        assert tree_of(root) == complete
        assert set_up(partial, "--undo") == 0
        assert tree_of(partial) == before
        assert set_up(root, "--undo") == 0
        assert tree_of(root) == before
    assert steps == 7, "six files, and after the last; no command is run for another root"


def test_an_undo_that_was_killed_at_any_step_is_finished_by_the_next(root: Path, tmp_path: Path) -> None:
    before = tree_of(root)
    step = 1
    while True:
        assert set_up(root, "--share", "1/2") == 0
        if not killed_at(root, tmp_path, step, "--undo"):
            break
        assert set_up(root, "--undo") == 0
        assert tree_of(root) == before
        step += 1
    assert step > 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--share", "5/4"], "5/4"),
        (["--pool", "big"], "not in the form"),
        (["--pool", "Big={}"], "a pool name must be"),
        (["--pool", 'big={"fraction": 1}'], "did you mean 'fractions'"),
        (["--pool", "big=3"], "a pool must be a dictionary"),
    ],
)
def test_a_wrong_word_is_named_before_anything_is_written(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    before = tree_of(root)
    assert set_up(root, *words) in (1, 2)
    assert says in capsys.readouterr().err
    assert tree_of(root) == before


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([], ["1/4", "1/2", "1"]),
        ([24 * 1024], ["1/4", "1/2", "1"]),
        ([80 * 1024] * 2, ["1/8", "1/4", "1/2", "1"]),
        ([80 * 1024, 6 * 1024], ["1"]),
    ],
)
def test_the_proposed_shares_have_room_for_a_model(sizes: list[int], shares: list[str]) -> None:
    assert propose_shares(sizes) == shares


def test_nothing_is_undone_where_nothing_was_set_up(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree_of(root)
    assert set_up(root, "--undo") == 0
    assert capsys.readouterr().out == "Nothing to undo.\n"
    assert tree_of(root) == before


def test_usage_records_stay_and_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = root / "var/lib/jupyter-gpu/ledger.sqlite"
    ledger.parent.mkdir(parents=True)
    ledger.write_text("use")
    assert set_up(root) == 0
    assert set_up(root, "--undo") == 0
    assert ledger.exists()
    assert f"These stay until you remove them: {ledger.parent}" in capsys.readouterr().out


def test_an_environment_of_the_administrator_is_used_and_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = root / "opt/jupyter-fractional-gpu"
    environment.mkdir(parents=True)
    assert set_up(root) == 1
    assert f"{environment} has no jupyter-fractional-gpu" in capsys.readouterr().err
    installed = environment / f"lib/python3.11/site-packages/jupyter_fractional_gpu-{__version__}.dist-info/RECORD"
    installed.parent.mkdir(parents=True)
    installed.touch()
    before = tree_of(root)
    assert set_up(root) == 0
    assert "pip install" not in capsys.readouterr().out
    assert set_up(root, "--undo") == 0
    assert tree_of(root) == before


def test_nothing_is_written_below_a_folder_that_every_user_can_write_to(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "usr/local").chmod(0o777)
    before = tree_of(root)
    assert set_up(root) == 1
    assert f"chmod o-w {root}/usr/local" in capsys.readouterr().err
    assert tree_of(root) == before
