"""A broker without its ledger takes back the leases of living processes, and no process gets a lease by a claim alone."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import structs

from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.persistence.lease_files import LeaseFiles, read_records
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.recovery.lost_leases import lost_kernels, lost_sentence, take_records
from fractional_gpu.broker.recovery.recovery import recover
from fractional_gpu.config import load
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import DeviceSeen, HostMemorySeen, PoolConfigured
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, LeaseView, PoolSpec
from fractional_gpu.gpu.interface import Monitor, ProcessState
from fractional_gpu.host.process import ProcessIdentity, identify
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord, SeatRecord
from tests.broker.driver import DEVICE, Driver, swaps_of
from tests.broker.live import BECOME_NOBODY
from tests.support.records import a_record

pytestmark = pytest.mark.promise("lost-ledger")

S, L = ProcessState, LeaseState
CONNECTION = {"transport": "tcp", "ip": "127.0.0.1", "iopub_port": 9, "shell_port": 9, "key": "k"}

SEAT = SeatRecord(
    seat_id="seat", owner="ann", server="ann/", group="", pool="default", fraction_milli=250, memory_mib=250,
    priority=0, weight=100, max_kernels=2, uid=None, device_id=None, token_sha256=token_digest("secret"), created_ms=1, expires_ms=9,
)  # fmt: skip


class OneDevice(Driver):
    """A machine with one device, so the device of a checkpoint is certain."""

    def devices(self) -> list[Any]:
        return super().devices()[:1]


@contextmanager
def carrier(
    lease_id: str, socket: Path, *, connection: Path | None = None, first: str = "", **environment: str
) -> Iterator[ProcessIdentity]:
    """A process started for a lease of the broker on `socket`; it is a kernel if it names a connection file."""
    argv = [sys.executable, "-S", "-c", f"{first}\nprint(flush=True); open(0).read()"]
    process = subprocess.Popen(
        [*argv, "-f", str(connection)] if connection is not None else argv,
        env={
            "JUPYTER_GPU_LEASE": lease_id,
            "JUPYTER_GPU_SOCKET": str(socket),
            "PATH": os.environ["PATH"],
            **environment,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield identify(process.pid)
        finally:
            process.kill()


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "broker.sock"


@pytest.fixture
def connection(tmp_path: Path) -> Path:
    path = tmp_path / "kernel-0b9c.json"
    path.write_text(json.dumps(CONNECTION))
    return path


def record_of(lease_id: str, identity: ProcessIdentity, **changes: Any) -> LeaseRecord:  # noqa: ANN401 - fields
    spec = LeaseSpec(
        lease_id=lease_id, pool="default", owner="me", fraction_milli=250, reserve_mib=200, priority=7, seat="s"
    )
    values: dict[str, Any] = {
        "spec": spec, "state": L.SUSPENDED, "generation": 7, "device_id": DEVICE, "saved_mib": 150, "uid": os.getuid(),
        "kernel_id": "k", "token_sha256": "abc", **identity.to_dict(), "connection": json.dumps(CONNECTION),
        "language": "python", "ipykernel": True, "created_ms": 1, "suspends": 3, "resumes": 2, **changes,
    }  # fmt: skip
    return a_record(**values)


def write_record(socket: Path, record: LeaseRecord) -> Path:
    """Leave a backup record as an earlier broker would have."""
    folder = Path(f"{socket}.leases")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{record.spec.lease_id}.json"
    path.write_bytes(msgspec.json.encode(record))
    path.chmod(0o600)
    return path


@asynccontextmanager
async def started(socket: Path, driver: Driver, *, ledger: Ledger | None = None) -> AsyncIterator[Broker]:
    """A broker that has just started on the socket, with a new ledger by default."""
    ledger = ledger or Ledger.open(socket.with_name("ledger.sqlite"))
    swaps = swaps_of(driver)
    files = LeaseFiles(Path(f"{socket}.leases"))
    broker = Broker(Arbiter(), cast("Monitor", driver), swaps, LedgerWriter(ledger), files=files)
    for device in driver.devices():
        spec = DeviceSpec(device_id=device.device_id, name=device.name, memory_mib=device.memory_mib)
        broker.dispatch(DeviceSeen(at_ms=now_ms(), device=spec))
    devices = tuple(device.device_id for device in driver.devices())
    broker.dispatch(PoolConfigured(at_ms=now_ms(), pool=PoolSpec(name="default", devices=devices)))
    broker.dispatch(HostMemorySeen(at_ms=now_ms(), budget_mib=4096))
    try:
        await recover(broker, swaps, ledger, take_records(files.folder, ledger))
        yield broker
    finally:
        await broker.close()


def view_of(broker: Broker, lease_id: str) -> LeaseView:
    view = broker.arbiter.lease(lease_id)
    assert view is not None
    return view


async def test_a_backup_record_gives_a_lease_back_as_it_was(socket: Path) -> None:
    driver = OneDevice()
    with carrier("one", socket) as process:
        driver.has_context(process.pid, S.CHECKPOINTED, 150)
        write_record(socket, record_of("one", process))
        async with started(socket, driver) as broker:
            view, kernel = view_of(broker, "one"), broker.kernels["one"]
            assert (view.state, view.saved_mib, view.device_id) == (L.SUSPENDED, 150, DEVICE)
            assert (view.spec.fraction_milli, view.spec.reserve_mib, view.spec.priority, view.spec.seat) == (
                250,
                200,
                7,
                "s",
            )
            assert (kernel.identity, kernel.token_sha256, kernel.facts.suspends) == (process, "abc", 3)
            await broker.writer.flushed()
            assert broker.writer.ledger.has_lease("one"), "the new ledger knows it"


@pytest.mark.parametrize(
    "wrong", [{"uid": 4242}, {"boot_id": "yesterday"}, {"start_time": 1}, {"pid": 1}, {"pid": None}], ids=str
)
async def test_a_record_counts_only_for_the_process_that_it_names(socket: Path, wrong: dict[str, Any]) -> None:
    with carrier("one", socket) as process:
        path = write_record(socket, record_of("one", process, **wrong))
        async with started(socket, OneDevice()) as broker:
            assert broker.arbiter.leases() == []
        assert not path.exists()


async def test_a_record_of_another_lease_is_not_taken_by_a_process(socket: Path) -> None:
    """A record cannot make a kernel hold another lease, even of the same user."""
    with carrier("mine", socket) as process:
        write_record(socket, record_of("richer", process))
        async with started(socket, OneDevice()) as broker:
            assert broker.arbiter.leases() == []


async def test_records_that_others_could_have_written_are_not_read(socket: Path) -> None:
    with carrier("one", socket) as process:
        path = write_record(socket, record_of("one", process))
        path.chmod(0o622)
        assert read_records(path.parent, LeaseRecord) == []
        path.chmod(0o600)
        assert [record.spec.lease_id for record in read_records(path.parent, LeaseRecord)] == ["one"]
        path.parent.chmod(0o777)
        assert read_records(path.parent, LeaseRecord) == []
        path.parent.chmod(0o700)
        (other := socket.with_name("other")).hardlink_to(path)
        assert read_records(path.parent, LeaseRecord) == [], "who has its other name could have written it"
        other.unlink()
        path.rename(path.with_name("another.json"))
        assert read_records(path.parent, LeaseRecord) == [], "its name is another lease's"


async def test_what_the_ledger_knows_to_be_over_stays_over(socket: Path) -> None:
    driver = OneDevice()
    with carrier("one", socket) as process, Ledger.open(socket.with_name("ledger.sqlite")) as ledger:
        driver.has_context(process.pid, S.RUNNING, 150)
        path = write_record(socket, record := record_of("one", process))
        ledger.save_lease(record)
        ledger.end_lease("one", 1, "released")
        async with started(socket, driver, ledger=ledger) as broker:
            assert broker.arbiter.leases() == []
            assert not path.exists()


async def test_kernels_without_a_record_are_listed_and_nothing_of_them_is_guessed(
    socket: Path, connection: Path
) -> None:
    """Not listed: another broker's kernels, processes that are not kernels, and processes of an ended lease."""
    driver = OneDevice()
    other = socket.with_name("other.sock")
    with (
        carrier("one", other, connection=connection),  # older, with the same id: it hides nothing
        carrier("one", socket, connection=connection) as process,
        carrier("job", socket),
        carrier("theirs", other, connection=connection),
        carrier("over", socket, connection=connection) as over,
        Ledger.open(socket.with_name("ledger.sqlite")) as ledger,
    ):
        driver.has_context(process.pid, S.CHECKPOINTED, 300)
        ledger.save_lease(record_of("over", over))
        ledger.end_lease("over", 1, "released")
        lost = lost_kernels(None, str(socket), ledger, set())
        assert lost == {"one": process}
        assert (
            f"(process {process.pid}); the kernels keep their variables; to restore lost records, run `jupyter gpu"
            in lost_sentence(lost)
        )
        assert lost_kernels(os.getuid() + 1, str(socket), ledger, set()) == {}
        assert lost_kernels(None, str(socket), ledger, {"one"}) == {}, "it has a record"
        async with started(socket, driver, ledger=ledger) as broker:
            assert broker.arbiter.leases() == []
            assert driver.states[process.pid] is S.CHECKPOINTED
    assert lost_sentence(lost) == "", "it has ended"


@pytest.mark.skipif(os.getuid() != 0, reason="starts processes of another user")
async def test_a_user_cannot_take_another_users_lease_by_its_id(socket: Path, connection: Path) -> None:
    """The thief carries the id and was there first; the record names the owner's process."""
    driver = OneDevice()
    with (
        carrier("one", socket, connection=connection, first=BECOME_NOBODY) as thief,
        carrier("one", socket, connection=connection) as owner,
    ):
        driver.has_context(thief.pid, S.RUNNING, 10)
        driver.has_context(owner.pid, S.CHECKPOINTED, 150)
        write_record(socket, record_of("one", owner))
        async with started(socket, driver) as broker:
            assert (broker.kernels["one"].identity, broker.kernels["one"].uid) == (owner, 0)
            assert view_of(broker, "one").spec.reserve_mib == 200


async def test_files_follow_the_leases_and_are_put_back(socket: Path) -> None:
    files = LeaseFiles(Path(f"{socket}.leases"))
    with carrier("one", socket) as process:
        record = record_of("one", process)
        for state in (L.RESIDENT, L.SUSPENDED):
            files.put(replace(record, state=state))
        await files.flushed()
        (path,) = files.folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert [found.state for found in read_records(files.folder, LeaseRecord)] == [L.SUSPENDED]
        path.unlink()
        files.folder.rmdir()
        await files.repair()
        assert read_records(files.folder, LeaseRecord) == [replace(record, state=L.SUSPENDED)]
        files.drop("one", LeaseRecord)
        await files.close()
        assert not files.folder.exists(), "nothing is left of a broker without leases"


async def test_a_file_that_cannot_be_written_is_written_later(socket: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = LeaseFiles(Path(f"{socket}.leases"))
    files.folder.write_text("in the way")
    with carrier("one", socket) as process:
        files.put(record_of("one", process))
        await files.flushed()
        assert "not up to date" in caplog.text
        files.folder.unlink()
        files.put(record_of("two", process))
        await files.repair()
        assert {record.spec.lease_id for record in read_records(files.folder, LeaseRecord)} == {"one", "two"}
    await files.close()


async def test_a_confirmed_seat_outlives_its_ledger(socket: Path) -> None:
    """The seat lets a server's next kernels keep what the hub gave it; an ended seat stays ended."""
    async with started(socket, OneDevice()) as broker:
        seats = LeaseService(broker, load(None, {})).seats
        for name in ("kept", "ended"):
            seat = structs.replace(SEAT, seat_id=name, server=name)
            await broker.writer.run(partial(broker.writer.ledger.save_seat, seat))
            seats._seats[name] = seat
            await seats.confirm(name)
        await seats.release("ended")
        assert broker.records.files is not None
        await broker.records.files.flushed()
    socket.with_name("ledger.sqlite").unlink()
    async with started(socket, OneDevice()) as broker:
        seats = LeaseService(broker, load(None, {})).seats
        seats.recover(broker.writer.ledger)
        assert seats.draws.of_token("secret") == "kept"
        await broker.writer.flushed()
        assert [seat.seat_id for seat in broker.writer.ledger.live_seats()] == ["kept"]
