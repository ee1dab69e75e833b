"""A new broker trusts the driver and /proc, not the ledger; what it cannot know counts as neither dead nor free."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from fractional_gpu.broker import broker as broker_module
from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels import process_inspector
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.recovery.recovery import recover
from fractional_gpu.broker.swap import suspend as suspend_module
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import (
    DeviceSeen,
    HostMemorySeen,
    PoolConfigured,
    ResizeRequested,
    SuspendRequested,
    Wanted,
)
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec
from fractional_gpu.gpu.interface import GPUErrorCode, Monitor, ProcessState
from fractional_gpu.host.process import Snapshot
from fractional_gpu.host.process import scan as real_scan
from fractional_gpu.ledger.records import LeaseRecord
from tests.broker.driver import DEVICE, OTHERS, Driver, Quiet, swaps_of
from tests.broker.live import DEADLINE_S, started_for
from tests.broker.persistence.disk import Disk
from tests.support.records import a_record

pytestmark = pytest.mark.promise("full-disk")

LEASE = "lease-of-tests"
S, L = ProcessState, LeaseState
OWN_SIZE = ResizeRequested(at_ms=0, lease_id=LEASE, fraction_milli=250, reserve_mib=250)


def record_of(process: dict[str, Any] | None, state: LeaseState, **changes: Any) -> LeaseRecord:  # noqa: ANN401 - fields
    spec = LeaseSpec(lease_id=LEASE, pool="default", owner="me", fraction_milli=500, reserve_mib=500, gated=False)
    identity = {"boot_id": "", "pid": None, "start_time": None}
    connection = ""
    if process is not None:
        identity = {name: process[name] for name in identity}
        connection = json.dumps(process["connection"])
    values: dict[str, Any] = {
        "spec": spec, "state": state, "generation": 7, "device_id": DEVICE, "saved_mib": 0, "uid": 0, "kernel_id": "k",
        "token_sha256": "", **identity, "connection": connection, "language": "python", "ipykernel": True,
        "created_ms": 1, "suspends": 3, "resumes": 2, **changes,
    }  # fmt: skip
    return a_record(**values)


@asynccontextmanager
async def recovered(
    tmp_path: Path,
    driver: Driver,
    *records: LeaseRecord,
    full_disk: bool = False,
) -> AsyncIterator[Broker]:
    """A new broker that finds this in its ledger; with `full_disk` it cannot write until it has found everything."""
    ledger = Disk.open(tmp_path / "ledger.sqlite")
    for record in records:
        ledger.save_lease(record)
    swaps = swaps_of(driver)
    broker = Broker(Arbiter(), cast("Monitor", driver), swaps, LedgerWriter(ledger))
    broker.dispatch(DeviceSeen(at_ms=now_ms(), device=DeviceSpec(device_id=DEVICE, name="G", memory_mib=1000)))
    broker.dispatch(PoolConfigured(at_ms=now_ms(), pool=PoolSpec(name="default", devices=(DEVICE,))))
    broker.dispatch(HostMemorySeen(at_ms=now_ms(), budget_mib=4096))
    try:
        ledger.full = full_disk
        await recover(broker, swaps, ledger)
        await asyncio.gather(broker.writer.flushed(), return_exceptions=True)
        ledger.full = False
        yield broker
    finally:
        await broker.close()


@pytest.mark.parametrize(
    ("was", "found", "state"),
    [
        (L.RESIDENT, S.RUNNING, L.RESIDENT),
        (L.SUSPENDED, S.RUNNING, L.RESIDENT),
        (L.RESIDENT, S.CHECKPOINTED, L.SUSPENDED),
        (L.SUSPENDED, S.CHECKPOINTED, L.SUSPENDED),
        (L.SUSPENDING, S.LOCKED, L.RESIDENT),
        (L.RESIDENT, None, L.RESIDENT),  # its gate may be open, so it may create a context at any moment
        (L.NO_CONTEXT, None, L.NO_CONTEXT),
        (L.RESIDENT, S.FAILED, L.QUARANTINED),
        (L.SUSPENDED, S.CHECKPOINTING, L.QUARANTINED),
    ],
)
async def test_what_the_driver_says_is_believed(
    tmp_path: Path, was: LeaseState, found: ProcessState | None, state: LeaseState
) -> None:
    driver = Driver()
    with started_for(LEASE) as process:
        if found is not None:
            driver.has_context(process["pid"], found, 300)
        async with recovered(
            tmp_path, driver, record_of(process, was, saved_mib=300 if was is L.SUSPENDED else 0)
        ) as broker:
            view, kernel = broker.arbiter.lease(LEASE), broker.kernels[LEASE]
            assert view is not None
            assert view.state is state
            assert view.generation > 7
            assert kernel.identity is not None
            assert kernel.busy, "the broker has not heard its messages yet"
            assert (kernel.facts.suspends, kernel.facts.resumes) == (3, 2)
            assert (driver.states.get(process["pid"]) is S.LOCKED) is False, "it was left locked"


@pytest.mark.parametrize("had_process", [True, False])
async def test_whether_a_lease_ever_had_a_process_outlives_the_broker(tmp_path: Path, *, had_process: bool) -> None:
    async with recovered(tmp_path, Driver(), record_of(None, L.UNATTACHED, had_process=had_process)) as broker:
        await broker.survivors.release(broker.kernels[LEASE])
        await broker.writer.flushed()
        assert broker.writer.ledger.has_lease(LEASE) is had_process, "one that never had leaves no history"


@pytest.mark.promise("race-pids")
async def test_after_a_reboot_no_process_is_taken_for_the_kernel_that_had_its_pid(tmp_path: Path) -> None:
    """Saved state is lost with the machine's memory, and a process that happens to have the pid is no kernel."""
    driver = Driver()
    with started_for(LEASE) as process:
        driver.has_context(process["pid"], S.CHECKPOINTED, 300)
        record = record_of({**process, "boot_id": "yesterday"}, L.SUSPENDED, saved_mib=300, device_id=None)
        async with recovered(tmp_path, driver, record) as broker:
            view = broker.arbiter.lease(LEASE)
            assert view is not None
            assert (view.state, view.saved_mib, broker.kernels[LEASE].identity) == (L.UNATTACHED, 0, None)
            assert driver.states[process["pid"]] is S.CHECKPOINTED, "nothing is done to a stranger"
            assert not [name for name, _ in driver.calls]


async def test_a_driver_that_does_not_answer_makes_nothing_free(tmp_path: Path) -> None:
    driver = Driver()
    with started_for(LEASE) as process:
        driver.failures["state", process["pid"]] = GPUErrorCode.WORKER_HUNG
        async with recovered(tmp_path, driver, record_of(process, L.RESIDENT)) as broker:
            view = broker.arbiter.lease(LEASE)
            assert view is not None
            assert (view.state, view.device_id) == (L.QUARANTINED, DEVICE)
            assert broker.arbiter.devices()[0].reserved_mib == 500


async def test_a_lease_whose_process_has_ended_waits_for_another(tmp_path: Path) -> None:
    with started_for(LEASE) as process:
        pass
    for record in (record_of(process, L.RESIDENT), record_of(None, L.UNATTACHED)):
        async with recovered(tmp_path, Driver(), record) as broker:
            view = broker.arbiter.lease(LEASE)
            assert view is not None
            assert view.state is L.UNATTACHED
            assert broker.arbiter.devices()[0].reserved_mib == 0


async def test_a_suspend_that_was_under_way_is_known_with_what_it_was_to_save(tmp_path: Path) -> None:
    driver = Driver()
    with started_for(LEASE) as process:
        driver.has_context(process["pid"], S.CHECKPOINTED, 0)
        async with recovered(tmp_path, driver, record_of(process, L.SUSPENDING, saved_mib=300)) as broker:
            view = broker.arbiter.lease(LEASE)
            assert view is not None
            assert (view.state, view.saved_mib) == (L.SUSPENDED, 300)


async def test_a_suspend_is_on_the_disk_before_each_step_with_what_it_is_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, steps = Driver(), list[tuple[LeaseState, int]]()
    monkeypatch.setattr(suspend_module, "shortage", lambda _needs: None)
    with started_for(LEASE) as process:
        driver.has_context(process["pid"], S.RUNNING, 300)
        async with recovered(tmp_path, driver, record_of(process, L.RESIDENT)) as broker:
            kernel, write = broker.kernels[LEASE], broker.records.write
            kernel.iopub = cast("IOPubWatch", Quiet())

            async def noted(kernel: Kernel) -> None:
                await write(kernel)
                (kept,) = broker.writer.ledger.live_leases()
                steps.append((kept.state, kept.saved_mib))

            monkeypatch.setattr(broker.records, "write", noted)
            broker.sync_busy_state(kernel)
            broker.dispatch(SuspendRequested(at_ms=now_ms(), lease_id=LEASE, by="a test"))
            async with asyncio.timeout(DEADLINE_S):
                while (view := broker.arbiter.lease(LEASE)) is None or view.state is not L.SUSPENDED:
                    await broker.anything_changed.wait()
    assert steps == [(L.SUSPENDING, 0), (L.SUSPENDING, 0), (L.SUSPENDING, 300)]


async def test_a_lease_that_was_found_on_a_full_disk_comes_back_when_there_is_room_on_it(tmp_path: Path) -> None:
    driver = Driver()
    with started_for(LEASE) as process:
        driver.has_context(process["pid"], S.CHECKPOINTED, 300)
        record = record_of(process, L.SUSPENDING, saved_mib=300)
        async with recovered(tmp_path, driver, record, full_disk=True) as broker:
            broker.dispatch(Wanted(at_ms=now_ms(), lease_id=LEASE))
            async with asyncio.timeout(DEADLINE_S):
                while (view := broker.arbiter.lease(LEASE)) is None or view.state is not L.RESIDENT:
                    await broker.anything_changed.wait()
            await broker.writer.flushed()
            (kept,) = broker.writer.ledger.live_leases()
            assert kept.state is L.RESIDENT


@pytest.mark.promise("race-half-done")
@pytest.mark.parametrize("quarantined", [False, True])
@pytest.mark.parametrize(("left_mib", "state"), [(299, L.QUARANTINED), (300, L.RESIDENT)])
async def test_what_an_earlier_broker_left_half_saved_comes_back_only_if_it_has_room(
    tmp_path: Path, left_mib: int, state: LeaseState, *, quarantined: bool
) -> None:
    driver = Driver()
    with started_for(LEASE) as process, started_for(LEASE) as other:
        driver.has_context(process["pid"], S.CHECKPOINTED, 300)
        driver.has_context(other["pid"], S.LOCKED, 300)
        driver.others_mib = 1000 - 300 - left_mib
        record = record_of(process, L.QUARANTINED if quarantined else L.SUSPENDING, saved_mib=600)
        async with recovered(tmp_path, driver, record) as broker:
            view, kernel = broker.arbiter.lease(LEASE), broker.kernels[LEASE]
            assert view is not None
            assert view.state is state
            again = broker.records.record(kernel)
            assert again is not None
            assert again.saved_mib == (600 if state is L.QUARANTINED else 0), "the broker after this one needs it, too"


async def test_all_leases_are_found_with_one_look_at_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, looks = Driver(), list[str]()

    def scan(name: str, *_: object) -> Snapshot:
        looks.append(name)
        return real_scan(name)

    monkeypatch.setattr(process_inspector, "scan", scan)
    names = [f"lease-{number}" for number in range(4)]
    with ExitStack() as stack:
        processes = [stack.enter_context(started_for(name)) for name in names]
        for process in processes:
            driver.has_context(process["pid"], S.RUNNING, 100)
        found = [record_of(process, L.RESIDENT) for process in processes]
        records = [
            replace(record, spec=replace(record.spec, lease_id=name, reserve_mib=100))
            for name, record in zip(names, found, strict=True)
        ]
        async with recovered(tmp_path, driver, *records) as broker:
            assert {view.state for view in broker.arbiter.leases()} == {L.RESIDENT}
            assert len(looks) == 1


async def test_a_lease_of_several_devices_comes_back_on_all_of_them(tmp_path: Path) -> None:
    driver = Driver()
    with started_for(LEASE) as process:
        driver.has_context(process["pid"], S.RUNNING, 300)
        devices = (DEVICE, OTHERS[0])
        record = record_of(process, L.RESIDENT, device_ids=devices, home_ids=devices)
        async with recovered(tmp_path, driver, record) as broker:
            assert broker.kernels[LEASE].checkpoint.homes == devices
            again = broker.records.record(broker.kernels[LEASE])
            assert again is not None
            assert again.home_ids == devices


@pytest.mark.parametrize("request_mib", [None, 100])
async def test_a_burst_ends_with_its_kernel_also_where_that_ended_after_its_broker(
    tmp_path: Path, request_mib: int | None
) -> None:
    with started_for(LEASE) as process:
        record = record_of(process, L.RESIDENT, own_size=replace(OWN_SIZE, request_mib=request_mib))
    async with recovered(tmp_path, Driver(), record) as broker:
        view = broker.arbiter.lease(LEASE)
        assert view is not None
        assert (view.state, view.spec.fraction_milli) == (L.UNATTACHED, 250)
        await broker.writer.flushed()
        (saved,) = broker.writer.ledger.live_leases()
        assert (saved.spec.fraction_milli, saved.own_size) == (view.spec.fraction_milli, None)


async def test_a_kernel_for_which_there_is_no_socket_is_watched_and_keeps_no_broker_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: object, **__: object) -> IOPubWatch:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(broker_module, "IOPubWatch", no_socket)
    with started_for(LEASE) as process:
        async with recovered(tmp_path, Driver(), record_of(process, L.RESIDENT)) as broker:
            view, kernel = broker.arbiter.lease(LEASE), broker.kernels[LEASE]
            assert view is not None
            assert (view.state, view.busy) == (L.RESIDENT, True)
            assert kernel.busy, "nothing is heard of it"
            assert kernel.identity is not None
            assert kernel.connection, "the next broker may hear it"
