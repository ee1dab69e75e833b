"""The ledger records each operation's begin and end, and neither a full disk nor a failed look stops a lease for good."""

import asyncio
import errno
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.swap import operations as operations_module
from fractional_gpu.broker.swap.operations import Operations
from fractional_gpu.broker.swap.suspend import Reserve
from fractional_gpu.broker.swap.swap import Swaps, Truth
from fractional_gpu.core.effects import LookAgain, Resume, Suspend
from fractional_gpu.core.events import (
    Event,
    HostMemoryNeeded,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    TruthFound,
)
from fractional_gpu.core.model import LeaseSpec, LeaseState, LeaseView
from tests.broker.persistence.disk import Disk
from tests.support.records import a_record

pytestmark = pytest.mark.promise("full-disk")

LEASE = "lease-of-tests"
DEVICE = "GPU-0"
SPEC = LeaseSpec(lease_id=LEASE, pool="default", owner="me", fraction_milli=500, reserve_mib=500)


@dataclass
class Stage:
    """One lease and its operations, which succeed at once; the disk fills up after as many of them as the test sets."""

    writer: LedgerWriter
    disk: Disk
    full_after: int = -1
    failing_looks: list[str] = field(default_factory=list)  # which step of each fails, in order
    truths: list[Truth] = field(default_factory=list)  # what the first looks find
    events: list[Event] = field(default_factory=list)
    need_mib: int = 0  # what suspends ask the arbiter for
    reserved_mib: list[int] = field(default_factory=list)  # and the answers
    operations: Operations = field(init=False)
    broker: Broker = field(init=False)

    def __post_init__(self) -> None:
        self.worker = self
        broker = SimpleNamespace(
            arbiter=self,
            writer=self.writer,
            kernels={LEASE: Kernel(lease_id=LEASE, uid=0, token_sha256="")},
            dispatch=self.events.append,
            suspend_finished=lambda _kernel: None,
            records=SimpleNamespace(write=self._write),
            hard_caps=SimpleNamespace(apply=self._raise_limit),
        )
        self.broker = cast("Broker", broker)
        self.operations = Operations(self.broker, cast("Swaps", self))

    # the arbiter

    def lease(self, lease_id: str) -> LeaseView:
        return LeaseView(
            spec=SPEC, state=LeaseState.SUSPENDED, generation=1, device_id=DEVICE, saved_mib=300, used_mib=0, busy=False,
            since_ms=0, last_active_ms=0, operation_id=None, reason="", sentence=lease_id, host_reserved_mib=450,
        )  # fmt: skip

    async def _raise_limit(self, _kernel: Kernel) -> str:
        return ""

    async def _write(self, _kernel: Kernel) -> None:
        await self.writer.run(partial(self.disk.keep, "lease", "as it is"))

    # the swaps

    async def suspend(
        self, _kernel: Kernel, _effect: Suspend, _journal: object, reserve: Reserve
    ) -> tuple[SuspendOutcome, int, str]:
        self._worked()
        if self.need_mib:
            self.reserved_mib.append(reserve(self.need_mib))
        return SuspendOutcome.SAVED, 300, ""

    async def resume(self, *_arguments: object) -> tuple[ResumeOutcome, str]:
        self._worked()
        return ResumeOutcome.RESTORED, ""

    async def glance(self) -> None:
        """Nothing was seen."""

    async def wait_for_previous_worker(self) -> None:
        self._look("wait_for_previous_worker")

    async def truth(self, *_arguments: object) -> Truth:
        self._look("truth")
        if self.truths:
            return self.truths.pop(0)
        return Truth(state=LeaseState.RESIDENT, device_id=DEVICE)

    def _look(self, step: str) -> None:
        if self.failing_looks[:1] == [step]:
            del self.failing_looks[0]
            raise OSError(errno.EMFILE, "Too many open files")

    def _worked(self) -> None:
        self.full_after -= 1
        self.disk.full = self.disk.full or self.full_after == 0

    # the test

    async def carry_out(self, effect: Suspend | Resume) -> SuspendOutcome | ResumeOutcome:
        """Return the outcome once the end was written, or will never be."""
        self.operations.start(effect)
        await asyncio.gather(*self.operations._tasks)
        await asyncio.gather(self.writer.flushed(), return_exceptions=True)
        event = self.events[-1]
        assert isinstance(event, SuspendFinished | ResumeFinished)
        return event.outcome


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(operations_module, "_FAILED_RESUME_PAUSE_S", 0)
    monkeypatch.setattr(operations_module, "_LOOK_AGAIN_S", (0,))
    disk = Disk.open(tmp_path / "state" / "ledger.sqlite")
    disk.save_lease(
        a_record(
            spec=SPEC, state=LeaseState.SUSPENDED, generation=1, device_id=DEVICE, saved_mib=300, uid=0, kernel_id="",
            token_sha256="", boot_id="", pid=None, start_time=None, connection="", language="", ipykernel=True,
            created_ms=1, suspends=0, resumes=0,
        )
    )  # fmt: skip
    made = Stage(LedgerWriter(disk), disk)
    yield made
    await made.operations.close()
    await made.writer.close()


def suspend(number: int) -> Suspend:
    return Suspend(lease_id=LEASE, operation_id=number, generation=number, device_ids=(DEVICE,), host_mib=300)


def resume(number: int) -> Resume:
    return Resume(
        lease_id=LEASE,
        operation_id=number,
        generation=number,
        device_ids=(DEVICE,),
        from_device_ids=(DEVICE,),
        reserve_mib=500,
    )


@pytest.mark.parametrize(("generation", "told_mib"), [(1, 450), (2, 300)], ids=["under-way", "stale"])
async def test_a_suspend_asks_the_arbiter_for_more_host_memory_and_is_told_what_it_has(
    stage: Stage, generation: int, told_mib: int
) -> None:
    stage.need_mib = 450
    await stage.carry_out(suspend(generation))
    (asked,) = [event for event in stage.events if isinstance(event, HostMemoryNeeded)]
    assert (asked.lease_id, asked.operation_id, asked.generation, asked.need_mib) == (
        LEASE,
        generation,
        generation,
        450,
    )
    assert stage.reserved_mib == [told_mib]


async def test_what_could_not_be_begun_is_not_ended_and_the_next_one_is_carried_out(stage: Stage) -> None:
    stage.disk.full = True
    assert await stage.carry_out(suspend(1)) is SuspendOutcome.ABORTED
    assert await stage.carry_out(resume(2)) is ResumeOutcome.NOT_STARTED
    stage.disk.full = False
    assert await stage.carry_out(resume(3)) is ResumeOutcome.RESTORED
    assert await stage.carry_out(suspend(4)) is SuspendOutcome.SAVED


async def test_the_operation_of_a_lease_that_is_gone_is_not_written_down(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.broker.kernels.clear()
    assert await stage.carry_out(suspend(1)) is SuspendOutcome.ABORTED
    assert await stage.carry_out(resume(2)) is ResumeOutcome.NOT_STARTED
    assert not [record for record in caplog.records if "not written" in record.getMessage()]


async def test_a_lease_is_looked_at_until_the_machine_can_be_looked_at(stage: Stage) -> None:
    stage.failing_looks = ["truth", "wait_for_previous_worker", "truth"]
    stage.operations.start(LookAgain(lease_id=LEASE, generation=1))
    await asyncio.gather(*stage.operations._looking)
    (found,) = stage.events
    assert isinstance(found, TruthFound)
    assert (found.state, stage.failing_looks) == (LeaseState.RESIDENT, [])


async def test_a_failure_of_the_driver_is_reported_once_and_looked_at_again(stage: Stage) -> None:
    failed = Truth(state=LeaseState.QUARANTINED, device_id=DEVICE, saved_mib=300, sentence="it failed")
    stage.truths = [failed, failed]
    stage.operations.start(LookAgain(lease_id=LEASE, generation=1))
    await asyncio.gather(*stage.operations._looking)
    found = [(event.state, event.sentence) for event in stage.events if isinstance(event, TruthFound)]
    assert found == [(LeaseState.QUARANTINED, "it failed"), (LeaseState.RESIDENT, "")]
