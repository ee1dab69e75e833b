"""A ledger is moved between folders with all that it holds, and a move that is killed at any step is finished by the next one."""

import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.broker.persistence.ledger_move import move_ledger
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.ledger import LeaseRecord, Ledger, LedgerError
from fractional_gpu.ledger.records import LedgerInUseError
from tests.broker.persistence.forked_ledgers import Forks

_STEPS = ("begin", "copied", "beside", "named", "done")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks.open() as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path, forks: Forks) -> Path:
    """A ledger with two live leases, whose last words are in the write-ahead log: its broker was killed."""
    path = tmp_path / "run" / "ledger.sqlite"
    fill(path, "a-lease", "another")
    assert forks.write_and_die(path) == -signal.SIGKILL
    assert path.with_name("ledger.sqlite-wal").stat().st_size > 0
    return path


@pytest.fixture(params=["same filesystem", "another filesystem"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "same filesystem":
        folder = tmp_path / "state"
        folder.mkdir(mode=0o700)
        yield folder / "ledger.sqlite"
        return
    folder = Path("/dev/shm", f"jfg-move-{secrets.token_hex(4)}")  # noqa: S108 - another filesystem than the folder of tests
    folder.mkdir(mode=0o700)
    assert folder.stat().st_dev != tmp_path.stat().st_dev
    try:
        yield folder / "ledger.sqlite"
    finally:
        shutil.rmtree(folder)


def fill(path: Path, *leases: str) -> None:
    with Ledger.open(path) as ledger:
        for number, lease_id in enumerate(leases):
            spec = LeaseSpec(lease_id=lease_id, pool="default", owner="ada", fraction_milli=250, reserve_mib=100)
            ledger.save_lease(record(spec, number))


def record(spec: LeaseSpec, created_ms: int) -> LeaseRecord:
    return LeaseRecord(
        spec=spec,
        state=LeaseState.SUSPENDED,
        generation=1,
        device_id="GPU-1",
        saved_mib=16,
        uid=0,
        kernel_id="",
        token_sha256="",
        boot_id="",
        pid=None,
        start_time=None,
        connection="",
        language="python",
        ipykernel=True,
        created_ms=created_ms,
        suspends=0,
        resumes=0,
    )


def leases(path: Path) -> list[str]:
    with Ledger.open(path) as ledger:
        return [lease.spec.lease_id for lease in ledger.live_leases()]


def assert_moved(source: Path, target: Path) -> None:
    """It is there with all that it had, and nowhere else."""
    # A lock that a killed mover left behind is held by nobody.
    assert {path.name for path in source.parent.iterdir()} <= {"ledger.sqlite.lock"}
    with Ledger.open(target) as ledger:
        assert [lease.spec.lease_id for lease in ledger.live_leases()] == ["a-lease", "another"]
        assert [line.sentence for line in ledger.story("a-lease")] == ["in the log only"]
    assert target.stat().st_mode & 0o777 == 0o600


def test_everything_is_moved_what_is_in_the_log_too(source: Path, target: Path) -> None:
    assert move_ledger(source, target)
    assert_moved(source, target)
    assert not move_ledger(source, target)
    assert_moved(source, target)


def test_and_back(source: Path, target: Path) -> None:
    move_ledger(source, target)
    assert move_ledger(target, source)
    assert_moved(target, source)


def test_what_belongs_to_it_comes_along(source: Path, target: Path) -> None:
    names = ("ledger.oom.json", "audit.jsonl", "audit.jsonl.20260101T000000.000000Z")
    for name in names:
        source.with_name(name).write_text(name)
    target.with_name("audit.jsonl").write_text("this one was begun already")
    move_ledger(source, target)
    assert {path.name for path in source.parent.iterdir()} == {"audit.jsonl"}
    assert target.with_name("audit.jsonl").read_text() == "this one was begun already"
    assert [target.with_name(name).read_text() for name in (names[0], names[2])] == [names[0], names[2]]


def test_where_there_is_nothing_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert not move_ledger(tmp_path / "run" / "ledger.sqlite", tmp_path / "state" / "ledger.sqlite")
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_one_folder_under_two_names_is_left(source: Path) -> None:
    source.parent.with_name("link").symlink_to(source.parent)
    assert not move_ledger(source, source.parent.with_name("link") / source.name)
    assert leases(source) == ["a-lease", "another"]


@pytest.mark.parametrize("step", _STEPS)
def test_a_move_that_is_killed_leaves_one_ledger_and_the_next_one_finishes_it(
    source: Path, target: Path, tmp_path: Path, forks: Forks, step: str
) -> None:
    point = tmp_path / "failpoint"
    point.write_text(f"ledger-move.{step} 1 kill")
    status = forks.move(source, target, point)
    same = source.parent.stat().st_dev == target.parent.stat().st_dev
    reached = not same or step in ("begin", "done")
    assert status == (-signal.SIGKILL if reached else 0)
    if reached:
        named = [path for path in (source, target) if path.exists()]
        between = source.with_name("ledger.sqlite.moved")
        assert len(named) == 1 or (named == [] and between.exists())
    assert forks.move(source, target) == 0
    assert_moved(source, target)
    assert {path.name for path in target.parent.iterdir()} <= {"ledger.sqlite", "ledger.sqlite.lock"}


@pytest.mark.parametrize("holder", ["source", "target"])
def test_a_ledger_that_is_in_use_is_not_moved(source: Path, target: Path, holder: str) -> None:
    with (
        Ledger.open(source if holder == "source" else target),
        pytest.raises(LedgerInUseError, match="is in use by pid"),
    ):
        move_ledger(source, target)
    assert leases(source) == ["a-lease", "another"]


@pytest.mark.parametrize("spoiled", [b"", b"not a ledger" * 100])
def test_what_is_no_ledger_is_left_and_named(source: Path, target: Path, spoiled: bytes) -> None:
    source.with_name("ledger.sqlite-wal").unlink()
    source.write_bytes(spoiled)
    with pytest.raises(LedgerError, match=f"the ledger {source} is "):
        move_ledger(source, target)
    assert source.read_bytes() == spoiled
    assert not target.exists()


def test_a_log_without_its_ledger_is_named(source: Path, target: Path) -> None:
    source.unlink()
    with pytest.raises(LedgerError, match="is gone but its write-ahead log is still there"):
        move_ledger(source, target)


def test_of_two_ledgers_the_one_with_live_leases_counts(source: Path, target: Path) -> None:
    Ledger.open(target).close()
    assert move_ledger(source, target)
    assert leases(target) == ["a-lease", "another"]
    (aside,) = target.parent.glob("ledger.sqlite.unused-*")
    assert leases(aside) == []
    Ledger.open(source).close()
    assert not move_ledger(source, target)
    assert leases(target) == ["a-lease", "another"]
    assert len(list(source.parent.glob("ledger.sqlite.unused-*"))) == 1


def test_of_two_ledgers_with_live_leases_neither_is_touched(source: Path, target: Path) -> None:
    fill(target, "a-third")
    with pytest.raises(LedgerError, match=r"has 1 live leases, and .* has 2: both were used; move the one away"):
        move_ledger(source, target)
    assert leases(source) == ["a-lease", "another"]
    assert leases(target) == ["a-third"]
