"""Suspend and resume take every step in order, and from each failure go back to where they can prove to be."""

import errno
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest

from fractional_gpu.broker.kernels import process_inspector
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap import gates
from fractional_gpu.broker.swap import suspend as suspend_module
from fractional_gpu.broker.swap import truth as truth_module
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.broker.swap.truth import Truth
from fractional_gpu.core.effects import Resume
from fractional_gpu.core.events import ResumeOutcome, SuspendOutcome
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import DeviceUse, GPUErrorCode, ProcessState
from fractional_gpu.host.memory import Shortage
from fractional_gpu.host.process import ProcessIdentity, identify
from fractional_gpu.host.process import is_alive as really_alive
from fractional_gpu.host.tree import Snapshot
from fractional_gpu.host.tree import scan as real_scan
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.messages import (
    CELL_BARRED,
    CELL_EXAMINED,
    CELL_RUNS,
    NO_CELL_RUNS,
)
from tests.broker.driver import DEVICE, OTHERS, Driver, Quiet, journal, kernel_of, suspend_of, swaps_of

S = ProcessState
CLOSES = {"close": "closed", "shrink": "done"}


def room_for(left_mib: int, limited_by: str) -> Callable[[Mapping[int, int]], Shortage | None]:
    """What tells whether the host has room for several processes, where one limit leaves so much for all of them."""

    def shortage(needs: Mapping[int, int]) -> Shortage | None:
        need_mib = sum(needs.values())
        return Shortage(need_mib, left_mib, limited_by) if need_mib > left_mib else None

    return shortage


@pytest.fixture(autouse=True)
def _plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(100_000, "the test"))


def running(driver: Driver, pids: list[int]) -> None:
    for pid in pids:
        driver.has_context(pid, S.RUNNING, 300)


async def test_a_suspend_locks_all_before_it_saves_any() -> None:
    driver, phases = Driver(), list[str]()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal(phases))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600), sentence
    assert [name for name, _ in driver.calls] == ["lock", "lock", "checkpoint", "checkpoint"]
    assert phases == ["locking", "checkpointing"]
    assert set(driver.states.values()) == {S.CHECKPOINTED}


async def test_a_kernel_without_a_context_has_nothing_to_save_if_its_gate_is_shut_and_is_refused_if_it_has_none() -> (
    None
):
    for answers, outcome in ((CLOSES, SuspendOutcome.NOTHING_TO_SAVE), (None, SuspendOutcome.REFUSED)):
        async with kernel_of(1, answers) as (kernel, _, _pids):
            assert (await swaps_of(Driver()).suspend(kernel, suspend_of(kernel), journal([])))[0] is outcome


Spoil = Callable[[Driver, list[int], Quiet], None]


def not_ready(driver: Driver, pids: list[int], _quiet: Quiet) -> None:
    driver.failures["lock", pids[1]] = GPUErrorCode.NOT_READY


def not_permitted(driver: Driver, pids: list[int], _quiet: Quiet) -> None:
    driver.failures["lock", pids[1]] = GPUErrorCode.NOT_PERMITTED


def checkpoint_refused(driver: Driver, pids: list[int], _quiet: Quiet) -> None:
    driver.failures["checkpoint", pids[0]] = GPUErrorCode.NOT_SUPPORTED


def checkpoint_lies(driver: Driver, pids: list[int], _quiet: Quiet) -> None:
    driver.leaves["checkpoint", pids[0]] = S.LOCKED


def uncounted(driver: Driver, pids: list[int], _quiet: Quiet) -> None:
    for pid in pids:
        driver.has_context(pid, S.RUNNING, 0)


def busy_already(_driver: Driver, _pids: list[int], quiet: Quiet) -> None:
    quiet.busy = True


@pytest.mark.parametrize(
    ("spoil", "outcome", "says"),
    [
        (not_ready, SuspendOutcome.ABORTED, "has GPU work under way"),
        (not_permitted, SuspendOutcome.IMPOSSIBLE, "lock failed as told"),
        (checkpoint_refused, SuspendOutcome.IMPOSSIBLE, "checkpoint failed as told"),
        (checkpoint_lies, SuspendOutcome.IMPOSSIBLE, "after a checkpoint that it called done"),
        (uncounted, SuspendOutcome.REFUSED, "no device tells how much memory"),
        (busy_already, SuspendOutcome.ABORTED, "the kernel became busy"),
    ],
)
async def test_what_fails_before_anything_was_saved_is_undone(spoil: Spoil, outcome: SuspendOutcome, says: str) -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, quiet, pids):
        running(driver, pids)
        spoil(driver, sorted(pids), quiet)
        result = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert result[0] is outcome
    assert says in result[2]
    assert set(driver.states.values()) == {S.RUNNING}, "somebody was left locked"


async def test_a_lock_that_fails_half_way_is_undone_in_reverse_order() -> None:
    driver = Driver()
    async with kernel_of(3, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        driver.failures["lock", sorted(pids)[2]] = GPUErrorCode.NOT_PERMITTED
        await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    locked = [pid for name, pid in driver.calls if name == "lock" and pid != sorted(pids)[2]]
    assert len(locked) == 2
    assert [pid for name, pid in driver.calls if name == "unlock"] == locked[::-1]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"close": "busy"}, "a cell began to run"),
        ({"close": "what?"}, "a cell began to run"),
        ({"close": "hang up"}, "the kernel's extension hung up"),
        ({"close": "closed", "shrink": "busy"}, "the kernel's main loop was not idle"),
        ({"close": "closed", "shrink": "hang up"}, "the kernel's main loop was not idle"),
    ],
    ids=str,
)
async def test_a_gate_that_does_not_shut_leaves_the_kernel_untouched(answers: dict[str, str], says: str) -> None:
    driver = Driver()
    async with kernel_of(1, answers) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.ABORTED
    assert says in sentence
    assert driver.calls == []


class Counters:
    """Says whether a kernel was quiet, and counts how often that was asked."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.asked = 0

    async def __call__(self, _kernel: Kernel) -> bool:
        self.asked += 1
        return self.quiet


def impatient(driver: Driver, counters: Counters) -> Swaps:
    """Swaps that wait for a gate for a moment only."""
    swaps = swaps_of(driver, gate_s=0.05)
    swaps.connect(roots=list, is_quiet=counters)
    return swaps


@pytest.mark.parametrize("linked", [True, False])
async def test_a_gate_that_does_not_answer_is_no_veto_once_the_counters_were_quiet(*, linked: bool) -> None:
    driver, counters = Driver(), Counters(quiet=False)
    async with kernel_of(1, {} if linked else None) as (kernel, _, pids):
        kernel.gated = True
        running(driver, pids)
        swaps = impatient(driver, counters)
        outcome, _, sentence = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
        assert outcome is SuspendOutcome.ABORTED
        assert "does not answer" in sentence
        assert driver.calls == []
        counters.quiet = True
        outcome, saved_mib, sentence = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 300), sentence
    assert [name for name, _ in driver.calls] == ["lock", "checkpoint"]
    assert counters.asked == 2


async def test_a_gate_that_answers_needs_no_quiet_counters() -> None:
    driver, counters = Driver(), Counters(quiet=False)
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, _ = await impatient(driver, counters).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, counters.asked) == (SuspendOutcome.SAVED, 0)


async def test_a_kernel_whose_gate_does_not_answer_and_that_becomes_busy_is_let_go() -> None:
    driver = Driver()
    async with kernel_of(1, {}) as (kernel, quiet, pids):
        running(driver, pids)
        write = journal([], lambda phase: setattr(quiet, "busy", phase == "locking"))
        swaps = impatient(driver, Counters(quiet=True))
        outcome, _, sentence = await swaps.suspend(kernel, suspend_of(kernel), write)
    assert (outcome, sentence) == (SuspendOutcome.ABORTED, "the kernel became busy")
    assert driver.calls == [("lock", pids[0]), ("unlock", pids[0])]


class Stream:
    """Carries the commands, and says whether the extension has read them."""

    def __init__(self, *, read: bool | None) -> None:
        self.read = read

    def keep_alive(self) -> bool:
        return True

    def is_read(self) -> bool | None:
        return self.read


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (True, SuspendOutcome.NOTHING_TO_SAVE),
        (False, SuspendOutcome.REFUSED),
        (None, SuspendOutcome.REFUSED),
    ],
)
async def test_without_a_context_a_gate_that_does_not_answer_is_shut_if_it_has_read_the_command(
    read: bool | None,
    outcome: SuspendOutcome,
) -> None:
    driver = Driver()
    async with kernel_of(1, {}) as (kernel, _, _):
        assert kernel.link is not None
        kernel.link.stream = Stream(read=read)
        found, _, sentence = await impatient(driver, Counters(quiet=True)).suspend(
            kernel, suspend_of(kernel), journal([])
        )
    assert found is outcome, sentence


async def test_a_kernel_that_becomes_busy_while_it_is_locked_is_let_go() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, quiet, pids):
        running(driver, pids)
        write = journal([], lambda phase: setattr(quiet, "busy", phase == "locking"))
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), write)
    assert (outcome, sentence) == (SuspendOutcome.ABORTED, "the kernel became busy")
    assert driver.calls == [("lock", pids[0]), ("unlock", pids[0])]


async def test_a_process_that_begins_to_use_cuda_after_the_lock_stops_the_suspend() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids[:1])
        write = journal([], lambda phase: driver.has_context(pids[1], S.RUNNING, 10) if phase == "locking" else None)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), write)
    assert outcome is SuspendOutcome.ABORTED
    assert f"process {pids[1]} began to use CUDA meanwhile" in sentence
    assert set(driver.states.values()) == {S.RUNNING}


async def test_what_would_not_fit_in_host_memory_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(200, "the group of the notebook server"))
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.REFUSED
    assert "300 MiB would have to be saved" in sentence
    assert "200 MiB are left (limited by the group of the notebook server)" in sentence
    assert driver.calls == []


async def test_a_control_group_with_an_odd_name_does_not_spoil_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(200, "group a\udcff\x1b[2J"))
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.REFUSED
    assert "(limited by group a??[2J)" in sentence


SHORT = [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]


def fails_to_look(monkeypatch: pytest.MonkeyPatch, error: Exception, at: Collection[int]) -> None:
    """Have these looks at the machine fail, counted from one."""
    looks = 0

    def scan(name: str) -> Snapshot:
        nonlocal looks
        looks += 1
        if looks in at:
            raise error
        return real_scan(name)

    monkeypatch.setattr(process_inspector, "scan", scan)


@pytest.mark.parametrize("error", SHORT, ids=str)
@pytest.mark.parametrize("look", [1, 2], ids=["before-the-lock", "after-the-lock"])
async def test_a_machine_that_cannot_be_looked_at_leaves_nobody_locked(
    monkeypatch: pytest.MonkeyPatch, error: Exception, look: int
) -> None:
    fails_to_look(monkeypatch, error, {look})
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.REFUSED
    assert f"could not be looked at: {error}" in sentence
    assert [name for name, _ in driver.calls] == (["lock", "lock", "unlock", "unlock"] if look == 2 else [])
    assert set(driver.states.values()) == {S.RUNNING}, "somebody was left locked"


async def test_a_kernel_of_which_nobody_can_tell_whether_it_lives_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    def is_alive(identity: ProcessIdentity) -> bool:
        if driver.calls:
            raise SHORT[0]
        return really_alive(identity)

    monkeypatch.setattr(gates, "is_alive", is_alive)
    monkeypatch.setattr(truth_module, "is_alive", is_alive)
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert (outcome, "Too many open files" in sentence) == (SuspendOutcome.REFUSED, True), sentence
        assert set(driver.states.values()) == {S.RUNNING}, "somebody was left locked"
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None


@pytest.mark.parametrize("error", [SHORT[0], ValueError("no MemAvailable")], ids=str)
async def test_host_memory_that_cannot_be_read_is_not_counted_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def shortage(_needs: Mapping[int, int]) -> Shortage:
        raise error

    monkeypatch.setattr(suspend_module, "shortage", shortage)
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, str(error) in sentence) == (SuspendOutcome.REFUSED, True), sentence
    assert driver.calls == []


@pytest.mark.parametrize("unwritten", ["locking", "checkpointing"])
async def test_what_cannot_be_written_down_is_not_done(unwritten: str) -> None:
    def fail(phase: str) -> None:
        if phase == unwritten:
            raise LedgerError("the disk is full")

    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([], fail))
    assert outcome is SuspendOutcome.ABORTED
    assert "the disk is full" in sentence
    assert "checkpoint" not in [name for name, _ in driver.calls]
    assert set(driver.states.values()) == {S.RUNNING}


@pytest.mark.parametrize("left", [S.FAILED, S.CHECKPOINTING, S.UNKNOWN])
async def test_a_checkpoint_that_fails_half_way_is_unknown_and_not_touched_again(left: ProcessState) -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        last = sorted(pids)[1]
        driver.failures["checkpoint", last], driver.leaves["checkpoint", last] = GPUErrorCode.OPERATING_SYSTEM, left
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.UNKNOWN
    assert "checkpoint failed as told" in sentence
    assert "unlock" not in [name for name, _ in driver.calls]


# -- preemption --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [{"preempt": "closed"}, None], ids=str)
async def test_a_preempted_kernel_is_saved_in_the_middle_of_its_cell(answers: dict[str, str] | None) -> None:
    driver, phases = Driver(), list[str]()
    async with kernel_of(2, answers) as (kernel, quiet, pids):
        running(driver, pids)
        quiet.busy = quiet.executing = True
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(
            kernel, suspend_of(kernel, preempt=True), journal(phases)
        )
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600), sentence
    assert phases == ["locking", "checkpointing"]
    assert set(driver.states.values()) == {S.CHECKPOINTED}


async def test_a_preempted_kernel_whose_work_does_not_drain_goes_on() -> None:
    driver = Driver()
    async with kernel_of(2, {"preempt": "closed"}) as (kernel, quiet, pids):
        running(driver, pids)
        quiet.busy = True
        driver.failures["lock", sorted(pids)[1]] = GPUErrorCode.NOT_READY
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel, preempt=True), journal([]))
    assert outcome is SuspendOutcome.ABORTED
    assert "has GPU work under way" in sentence
    assert set(driver.states.values()) == {S.RUNNING}, "somebody was left locked"


async def test_a_busy_kernel_without_a_context_is_not_called_saved() -> None:
    async with kernel_of(1, {"preempt": "closed"}) as (kernel, quiet, _pids):
        quiet.busy = True
        assert (await swaps_of(Driver()).suspend(kernel, suspend_of(kernel, preempt=True), journal([])))[
            0
        ] is SuspendOutcome.REFUSED


@pytest.mark.parametrize(
    ("bars", "processes", "outcome"),
    [
        (True, 1, SuspendOutcome.NOTHING_TO_SAVE),
        (True, 2, SuspendOutcome.REFUSED),
        (False, 1, SuspendOutcome.ABORTED),
    ],
    ids=["barred", "barred, with a child", "not known in time"],
)
async def test_a_busy_kernel_gives_its_room_back_in_mid_cell_if_nothing_of_it_can_reach_the_gpu(
    monkeypatch: pytest.MonkeyPatch, *, bars: bool, processes: int, outcome: SuspendOutcome
) -> None:
    monkeypatch.setattr(gates, "_BETWEEN_CELLS_S", 30 if bars else 0.1)
    details = [CELL_BARRED, CELL_EXAMINED]
    watches: list[Quiet] = []

    def preempt() -> str:
        watches[0].busy = not bars  # its requests use no GPU: it says so by itself
        return f"closed: {details.pop()}"

    async with kernel_of(processes, {"preempt": preempt}) as (kernel, quiet, pids):
        watches.append(quiet)
        quiet.busy = True
        result, _, sentence = await swaps_of(Driver()).suspend(kernel, suspend_of(kernel, preempt=True), journal([]))
    assert result is outcome, sentence
    assert (f"process {pids[-1]}, which the kernel started" in sentence) == (processes > 1)


@pytest.mark.parametrize("processes", [1, 2])
async def test_an_idle_kernel_whose_cell_is_barred_is_between_cells_if_it_is_alone(processes: int) -> None:
    """A broker that begins finds it so, or one whose last attempt to take the room failed."""
    answers = {"close": f"closed: {CELL_BARRED}", "shrink": "done: nothing freed"}
    async with kernel_of(processes, answers) as (kernel, _, _pids):
        outcome, _, _ = await swaps_of(Driver()).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is (SuspendOutcome.NOTHING_TO_SAVE if processes == 1 else SuspendOutcome.REFUSED)


@pytest.mark.parametrize(
    ("detail", "outcome"),
    [
        (CELL_RUNS, SuspendOutcome.ABORTED),
        (CELL_EXAMINED, SuspendOutcome.ABORTED),
        (CELL_BARRED, SuspendOutcome.NOTHING_TO_SAVE),
        (NO_CELL_RUNS, SuspendOutcome.NOTHING_TO_SAVE),
    ],
)
async def test_between_two_cells_no_other_cell_runs_that_could_reach_the_gpu(
    detail: str, outcome: SuspendOutcome
) -> None:
    async with kernel_of(1, {"preempt": f"closed: {detail}"}) as (kernel, _, _pids):
        effect = replace(suspend_of(kernel), between_cells=True)
        assert (await swaps_of(Driver()).suspend(kernel, effect, journal([])))[0] is outcome


# -- resume ------------------------------------------------------------------------------------------------------------------


def resume_of(kernel: Kernel) -> Resume:
    return Resume(
        lease_id=kernel.lease_id, operation_id=1, generation=1, device_id=DEVICE, from_device_id=DEVICE, reserve_mib=600
    )


def saved(driver: Driver, pids: list[int]) -> None:
    for pid in pids:
        driver.has_context(pid, S.CHECKPOINTED, 300)


async def test_a_resume_brings_every_process_back() -> None:
    driver, phases = Driver(), list[str]()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600, journal(phases))
    assert outcome is ResumeOutcome.RESTORED
    assert set(driver.states.values()) == {S.RUNNING}
    assert phases == ["restoring"]


async def test_a_restore_is_never_tried_to_find_out_whether_there_is_room() -> None:
    driver = Driver()
    driver.others_mib = 500
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 600, journal([]))
    assert (outcome, sentence) == (ResumeOutcome.NOT_STARTED, "the device has 500 MiB free, 600 MiB are needed")
    assert driver.calls == []


async def test_what_nobody_wrote_down_needs_what_is_reserved_for_it() -> None:
    """All its processes were saved by somebody else."""
    driver = Driver()
    driver.others_mib = 500
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 0, journal([]))
    assert (outcome, sentence) == (ResumeOutcome.NOT_STARTED, "the device has 500 MiB free, 600 MiB are needed")
    assert driver.calls == []


async def test_each_of_several_devices_goes_to_its_counterpart() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        kernel.checkpoint.homes = (DEVICE, OTHERS[0])
        effect = replace(
            resume_of(kernel),
            device_id=OTHERS[1],
            device_ids=(OTHERS[1], OTHERS[2]),
            from_device_ids=kernel.checkpoint.homes,
        )
        outcome, sentence = await swaps_of(driver).resume(kernel, effect, 600, journal([]))
    assert outcome is ResumeOutcome.RESTORED, sentence
    assert driver.moves == [(pid, {DEVICE: OTHERS[1], OTHERS[0]: OTHERS[2]}) for pid in sorted(pids)]


async def test_every_one_of_several_devices_must_have_the_room() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        kernel.checkpoint.homes = (OTHERS[0], DEVICE)
        driver.others_mib = 500
        effect = replace(
            resume_of(kernel),
            device_id=OTHERS[0],
            device_ids=kernel.checkpoint.homes,
            from_device_ids=kernel.checkpoint.homes,
        )
        outcome, sentence = await swaps_of(driver).resume(kernel, effect, 600, journal([]))
    assert (outcome, sentence) == (ResumeOutcome.NOT_STARTED, "the device has 500 MiB free, 600 MiB are needed")
    assert driver.calls == []


async def test_a_kernel_on_several_devices_is_where_its_first_one_is() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        running(driver, pids)
        driver.has_context(pids[1], S.RUNNING, 500)
        driver.where = {pids[1]: OTHERS[0]}
        kernel.checkpoint.homes = (DEVICE, OTHERS[0])
        assert await swaps_of(driver).truth(kernel, None, 0) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)
        kernel.checkpoint.homes = ()
        assert await swaps_of(driver).truth(kernel, None, 0) == Truth(state=LeaseState.RESIDENT, device_id=OTHERS[0])


@pytest.mark.parametrize(("fresh_s", "count"), [(60.0, 2), (0.0, 3)], ids=["soon", "after-a-slow-shrink"])
async def test_a_suspend_looks_at_the_processes_twice_and_again_if_shrinking_takes_long(
    monkeypatch: pytest.MonkeyPatch, fresh_s: float, count: int
) -> None:
    driver, looks = Driver(), list[str]()
    monkeypatch.setattr(suspend_module, "FRESH_S", fresh_s)

    def scan(name: str) -> Snapshot:
        looks.append(name)
        return real_scan(name)

    monkeypatch.setattr(process_inspector, "scan", scan)
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.SAVED, sentence
    assert len(looks) == count


@pytest.mark.parametrize(
    ("left", "outcome"),
    [(None, ResumeOutcome.NOT_STARTED), (S.FAILED, ResumeOutcome.UNKNOWN), (S.RESTORING, ResumeOutcome.UNKNOWN)],
)
async def test_a_restore_that_fails_is_tried_again_only_if_all_is_still_saved(
    left: ProcessState | None, outcome: ResumeOutcome
) -> None:
    driver = Driver()
    async with kernel_of() as (kernel, _, pids):
        saved(driver, pids)
        driver.failures["restore", pids[0]] = GPUErrorCode.OPERATING_SYSTEM
        if left is not None:
            driver.leaves["restore", pids[0]] = left
        result, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 300, journal([]))
    assert result is outcome
    assert "restore failed as told" in sentence


async def test_a_resume_does_not_begin_when_the_machine_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_to_look(monkeypatch, SHORT[0], {1})
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600, journal([]))
        found = await swaps_of(driver).truth(kernel, DEVICE, 600)
    assert outcome is ResumeOutcome.NOT_STARTED
    assert found is not None
    assert found.state is LeaseState.SUSPENDED


@pytest.mark.parametrize("can_look", [True, False])
async def test_a_resume_that_cannot_be_verified_is_unknown_until_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, can_look: bool
) -> None:
    if not can_look:
        fails_to_look(monkeypatch, SHORT[0], {2})
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        fail = {("state", pids[1]): GPUErrorCode.WORKER_HUNG}
        write = journal([], lambda _: driver.failures.update(fail))
        outcome, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600, write)
        assert outcome is ResumeOutcome.UNKNOWN
        assert set(driver.states.values()) == {S.RUNNING}, "the kernel's calls go on before that"
        driver.failures.clear()
        found = await swaps_of(driver).truth(kernel, DEVICE, 600)
    assert found is not None
    assert found.state is LeaseState.RESIDENT


# -- truth -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "truth"),
    [
        ((), Truth(state=LeaseState.NO_CONTEXT)),
        ((S.RUNNING,), Truth(state=LeaseState.RESIDENT, device_id=DEVICE)),
        ((S.LOCKED, S.RUNNING), Truth(state=LeaseState.RESIDENT, device_id=DEVICE)),
        ((S.CHECKPOINTED, S.CHECKPOINTED), Truth(state=LeaseState.SUSPENDED, device_id=DEVICE, saved_mib=600)),
        ((S.CHECKPOINTED, S.LOCKED), Truth(state=LeaseState.RESIDENT, device_id=DEVICE)),
        ((S.UNKNOWN,), None),
        ((S.CHECKPOINTING,), None),
    ],
    ids=str,
)
async def test_the_truth_is_what_the_driver_says_and_half_done_work_is_undone(
    states: tuple[ProcessState, ...], truth: Truth | None
) -> None:
    driver = Driver()
    async with kernel_of(max(1, len(states))) as (kernel, _, pids):
        for pid, state in zip(pids, states, strict=False):
            driver.has_context(pid, state, 300)
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) == truth


async def test_a_kernel_half_of_which_is_saved_stays_unknown_until_there_is_room() -> None:
    driver = Driver()
    driver.others_mib = 500
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(pids[1], S.RUNNING, 300)
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) is None
        assert driver.calls == []
        driver.others_mib = 0
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)


async def half_saved(driver: Driver, kernel: Kernel, pids: list[int]) -> None:
    """Suspend a kernel of two processes, 300 MiB each, whose second checkpoint fails and leaves it running."""
    running(driver, pids)
    last = sorted(pids)[1]
    driver.failures["checkpoint", last], driver.leaves["checkpoint", last] = GPUErrorCode.OPERATING_SYSTEM, S.RUNNING
    outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.UNKNOWN, 0), sentence
    assert kernel.checkpoint.total_mib == 600
    driver.calls.clear()


async def test_what_a_suspend_left_half_saved_comes_back_only_where_the_saved_half_has_room() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        await half_saved(driver, kernel, pids)
        driver.others_mib = 500  # 200 are left
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None
        assert driver.calls == []
        driver.others_mib = 400  # 300 are left: the other half is there already
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)


@pytest.mark.parametrize("newcomer", [False, True])
async def test_what_has_grown_since_the_rest_was_saved_makes_the_rest_no_smaller(*, newcomer: bool) -> None:
    driver = Driver()
    async with kernel_of(3 if newcomer else 2, CLOSES) as (kernel, _, pids):
        await half_saved(driver, kernel, pids[:2])
        driver.has_context(pids[2] if newcomer else sorted(pids)[1], S.RUNNING, 550)
        driver.others_mib = 200 if not newcomer else 0
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None
        assert driver.calls == []


@pytest.mark.parametrize(("left_mib", "restored"), [(299, False), (300, True)])
async def test_what_a_resume_has_brought_back_needs_no_room_again(left_mib: int, *, restored: bool) -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.LOCKED, 300)
        driver.has_context(pids[1], S.CHECKPOINTED, 300)
        driver.others_mib = 1000 - 300 - left_mib
        truth = await swaps_of(driver).truth(kernel, DEVICE, 600)
        assert truth == (Truth(state=LeaseState.RESIDENT, device_id=DEVICE) if restored else None)
        assert ("restore" in [name for name, _ in driver.calls]) is restored


async def test_of_what_runs_nobody_knows_how_much_of_it_was_to_be_saved() -> None:
    """A new broker knows the sum only: what runs beside the saved half may have come since."""
    driver = Driver()
    driver.others_mib = 200
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 600)
        driver.has_context(pids[1], S.RUNNING, 300)
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) is None
        assert driver.calls == []


@pytest.mark.parametrize("state", [S.RUNNING, S.LOCKED])
async def test_what_somebody_else_saved_comes_back_only_to_a_device_without_others(state: ProcessState) -> None:
    """Nobody wrote down how much it is."""
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(pids[1], state, 300)
        driver.has_context(1, S.RUNNING, 100)
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None
        assert driver.calls == []
        del driver.states[1], driver.mib[1]
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)


async def test_what_somebody_else_saved_beside_what_we_did_is_not_known_either() -> None:
    driver = Driver()
    async with kernel_of(3, CLOSES) as (kernel, _, pids):
        await half_saved(driver, kernel, pids[:2])
        driver.has_context(pids[2], S.CHECKPOINTED, 900)
        driver.has_context(1, S.RUNNING, 100)
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) is None
        assert driver.calls == []


async def test_a_new_suspend_does_not_go_by_what_the_last_one_saved() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        assert (await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([])))[0] is SuspendOutcome.SAVED
        assert kernel.checkpoint.total_mib == 600
        driver.has_context(pids[0], S.CHECKPOINTED, 900)  # it grew, and then somebody else saved it
        driver.has_context(pids[1], S.RUNNING, 300)
        assert (await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([])))[0] is SuspendOutcome.REFUSED
        assert kernel.checkpoint.total_mib == 0


async def test_room_is_looked_for_anew_before_a_half_saved_kernel_is_brought_back() -> None:
    """The look that a broker begins with is taken before it brings back whom it finds first."""
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(pids[1], S.LOCKED, 300)
        swaps = swaps_of(driver)
        host = await swaps.inspector.take()
        driver.others_mib = 500
        assert await swaps.truth(kernel, DEVICE, 600, host) is None
        assert driver.calls == []


@pytest.mark.parametrize("error", SHORT, ids=str)
async def test_a_machine_that_cannot_be_looked_at_tells_no_truth(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fails_to_look(monkeypatch, error, {1, 3})
    driver = Driver()
    async with kernel_of() as (kernel, _, pids):
        driver.has_context(pids[0], S.LOCKED, 300)
        swaps = swaps_of(driver)
        assert [await swaps.truth(kernel, DEVICE, 0) for _ in range(2)] == [None, None]
        assert await swaps.truth(kernel, DEVICE, 0) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)


@pytest.mark.parametrize("other", [S.RUNNING, S.LOCKED, S.CHECKPOINTED, S.FAILED])
async def test_a_failed_process_leaves_its_kernel_in_quarantine_with_a_sentence_for_its_user(
    other: ProcessState,
) -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.FAILED, 300)
        driver.has_context(pids[1], other, 300)
        truth = await swaps_of(driver).truth(kernel, DEVICE, 600)
        assert truth is not None
        assert (truth.state, truth.device_id, truth.saved_mib) == (LeaseState.QUARANTINED, DEVICE, 600)
        assert f"process {pids[0]} met an error" in truth.sentence
        assert "restart the kernel" in truth.sentence
        assert "restore" not in [name for name, _ in driver.calls]


async def test_a_driver_that_does_not_answer_tells_no_truth() -> None:
    driver = Driver()
    async with kernel_of() as (kernel, _, pids):
        driver.failures["state", pids[0]] = GPUErrorCode.WORKER_HUNG
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) is None


async def test_a_kernel_that_has_ended_is_unattached() -> None:
    async with kernel_of() as (kernel, _, _pids):
        kernel.forget_process()
        assert await swaps_of(Driver()).truth(kernel, DEVICE, 600) == Truth(state=LeaseState.UNATTACHED)


# -- what has to be saved, and where it fits -----------------------------------------------------------------------------------


async def test_caches_are_given_back_before_host_memory_is_called_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(200, "the test"))
    driver = Driver()
    async with kernel_of(1, {**CLOSES, "shrink": lambda: shrink(driver)}) as (kernel, _, pids):
        driver.has_context(pids[0], S.RUNNING, 900)
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(
            kernel, suspend_of(kernel, host_mib=100), journal([])
        )
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 90), sentence


def shrink(driver: Driver) -> str:
    driver.mib = {pid: mib // 10 for pid, mib in driver.mib.items()}
    return "done"


async def test_an_idle_kernel_is_shrunk_without_being_suspended() -> None:
    driver = Driver()
    async with kernel_of(1, {"shrink": lambda: shrink(driver)}) as (kernel, quiet, pids):
        driver.has_context(pids[0], S.RUNNING, 900)
        assert await swaps_of(driver).shrink(kernel) == 90
        quiet.busy = True
        assert await swaps_of(driver).shrink(kernel) is None
    assert driver.calls == []


@pytest.mark.parametrize("answers", [None, {"shrink": "busy"}, {"shrink": "hang up"}], ids=str)
async def test_a_kernel_that_cannot_shrink_says_so(answers: dict[str, str] | None) -> None:
    driver = Driver()
    async with kernel_of(1, answers) as (kernel, _, pids):
        running(driver, pids)
        assert await swaps_of(driver).shrink(kernel) is None


async def test_what_several_processes_would_save_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(500, "the test"))  # room for each, and not for both
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])
    assert "600 MiB would have to be saved" in sentence


async def test_more_than_was_reserved_for_it_is_not_saved_and_is_told() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, need_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel, host_mib=599), journal([]))
        assert (outcome, need_mib, driver.calls) == (SuspendOutcome.ABORTED, 600, [])
        outcome, saved_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel, host_mib=600), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600)


async def test_a_kernel_that_grows_before_it_is_locked_is_let_go() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        write = journal([], lambda phase: driver.mib.update({pids[0]: 400}) if phase == "locking" else None)
        outcome, need_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel, host_mib=300), write)
    assert (outcome, need_mib) == (SuspendOutcome.ABORTED, 400)
    assert driver.calls == [("lock", pids[0]), ("unlock", pids[0])]


async def test_a_cuda_process_that_no_device_counts_is_saved_at_the_most_it_can_have() -> None:
    """It only initialised the driver, or the device does not list it: what no process is charged with is the most that it has."""
    driver = Driver()
    driver.others_mib = 120
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids[:1])
        driver.has_context(pids[1], S.RUNNING, 0)
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 300 + 120), sentence
    assert set(driver.states.values()) == {S.CHECKPOINTED}


async def test_once_devices_are_known_to_count_processes_one_without_memory_is_saved_alone() -> None:
    driver = Driver()
    swaps = swaps_of(driver)
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        driver.has_context(pids[0], S.RUNNING, 0)
        assert (await swaps.suspend(kernel, suspend_of(kernel), journal([])))[0] is SuspendOutcome.REFUSED
        swaps.inspector.set_counts_processes()
        outcome, saved_mib, _ = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, process_inspector.NOMINAL_MIB)


async def test_memory_on_a_device_that_is_not_the_leases_is_not_saved() -> None:
    """It would be restored there, where no room is reserved for it."""
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        driver.where[pids[1]], kernel.measurement.seen_on = OTHERS[0], frozenset({DEVICE, OTHERS[0]})
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])
    assert OTHERS[0] in sentence


@pytest.mark.parametrize(("others_mib", "outcome"), [(399, ResumeOutcome.RESTORED), (400, ResumeOutcome.NOT_STARTED)])
async def test_a_restore_leaves_a_margin_free(others_mib: int, outcome: ResumeOutcome) -> None:
    driver = Driver()
    async with kernel_of(1) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(os.getpid(), S.RUNNING, others_mib)  # of 1000
        result = await swaps_of(driver, overhead_mib=301).resume(kernel, resume_of(kernel), 345, journal([]))
        assert result[0] is outcome, result[1]  # 345 and 256
        if outcome is ResumeOutcome.NOT_STARTED:
            assert "a margin of 256 MiB" in result[1]
            assert driver.calls == []
        swaps = swaps_of(driver, overhead_mib=10)
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        assert (await swaps.resume(kernel, resume_of(kernel), 345, journal([])))[0] is ResumeOutcome.RESTORED, "no more"


@pytest.mark.parametrize(("age_s", "looks"), [(0.0, 1), (1.0, 2)], ids=["fresh", "stale"])
async def test_a_resume_goes_by_what_was_seen_a_moment_ago_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, age_s: float, looks: int
) -> None:
    counted = 0

    def scan(name: str) -> Snapshot:
        nonlocal counted
        counted += 1
        return real_scan(name)

    monkeypatch.setattr(process_inspector, "scan", scan)
    driver = Driver()
    swaps = swaps_of(driver)
    async with kernel_of(1) as (kernel, _, pids):
        saved(driver, pids)
        seen = await swaps.glance()
        assert seen is not None
        result = await swaps.resume(kernel, resume_of(kernel), 300, journal([]), replace(seen, at_s=seen.at_s - age_s))
    assert (result[0], counted) == (ResumeOutcome.RESTORED, looks)


async def test_a_glance_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_to_look(monkeypatch, SHORT[0], {1})
    assert await swaps_of(Driver()).glance() is None


async def test_a_device_of_its_own_needs_no_margin() -> None:
    driver = Driver()
    async with kernel_of(1) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        swaps = swaps_of(driver, overhead_mib=500)
        assert (await swaps.resume(kernel, resume_of(kernel), 1000, journal([])))[0] is ResumeOutcome.RESTORED


# -- processes that say nothing about the kernel, or cannot answer ----------------------------------------------------------------

FORKS = """
import os
if os.fork() == 0:
    open(0).read()
    os._exit(0)
"""


def stop(pid: int) -> None:
    """Stop a child of this process."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def forked_by(kernel: Kernel) -> int:
    """The pid of the process that the kernel forked."""
    assert kernel.identity is not None
    (child,) = [one for one in real_scan().tree(kernel.identity) if one != kernel.identity]
    return child.pid


@pytest.mark.parametrize("says", ["an error", "running"])
async def test_a_forked_child_that_inherited_a_context_keeps_the_kernel_and_is_named(says: str) -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, pids):
        running(driver, pids)
        child = forked_by(kernel)
        if says == "running":
            driver.has_context(child, S.RUNNING, 0)
        else:
            driver.failures["state", child] = GPUErrorCode.OPERATING_SYSTEM
        swaps = swaps_of(driver)
        swaps.inspector.set_counts_processes()
        outcome, _, sentence = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
        truth = await swaps.truth(kernel, DEVICE, 0)
    assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])
    assert f"process {child} was forked by the kernel" in sentence
    assert truth == Truth(state=LeaseState.RESIDENT, device_id=DEVICE), "what it says decides nothing about the kernel"


async def test_a_forked_child_of_which_the_driver_knows_nothing_does_not_matter() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.SAVED, sentence


async def test_a_forked_child_with_memory_of_its_own_is_saved_like_any_other() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, _pids):
        running(driver, [forked_by(kernel)])  # the kernel itself does not use CUDA
        outcome, saved_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 300)


async def test_a_forked_child_that_was_saved_is_brought_back() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, pids):
        child = forked_by(kernel)
        running(driver, [*pids, child])
        outcome, _, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert outcome is SuspendOutcome.SAVED
        result, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600, journal([]))
    assert result is ResumeOutcome.RESTORED
    assert set(driver.states.values()) == {S.RUNNING}, "it uses no device while it is saved, and is still no heir"


async def test_an_error_about_a_program_of_its_own_is_an_error_about_the_kernel() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        driver.failures["state", pids[1]] = GPUErrorCode.OPERATING_SYSTEM
        outcome, _, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])


@pytest.mark.parametrize("which", [0, 1], ids=["the-kernel", "a-child"])
async def test_a_stopped_process_is_named_at_once_and_not_asked(which: int) -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        pid = pids[which]
        stop(pid)
        driver.failures["state", pid] = GPUErrorCode.WORKER_HUNG
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])
        assert f"process {pid} is stopped" in sentence
        kernel.checkpoint.sizes = {identify(pid): 300}
        for one in pids:
            driver.has_context(one, S.CHECKPOINTED, 300)
        result, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 600, journal([]))
        assert (result, driver.calls) == (ResumeOutcome.NOT_STARTED, [])
        assert f"kill -CONT {pid}" in sentence


async def test_a_stopped_process_without_device_memory_does_not_matter() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids[:1])
        stop(pids[1])
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.SAVED, sentence


class ReadDriver(Driver):
    """Notes which devices are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def use(self, device_id: str) -> DeviceUse:
        self.read.append(device_id)
        return super().use(device_id)


async def test_only_the_devices_concerned_are_read() -> None:
    driver = ReadDriver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert outcome is SuspendOutcome.SAVED
        assert driver.read == [DEVICE] * 2, "before the lock, and after it"
        driver.read.clear()
        await swaps_of(driver).resume(kernel, resume_of(kernel), 300, journal([]))
    assert driver.read == [DEVICE], "before the restore"


async def test_the_broker_is_no_part_of_the_kernel_that_started_it() -> None:
    driver = Driver()
    kernel = Kernel(lease_id="lease-of-tests", uid=os.getuid(), token_sha256="")
    kernel.identity = identify(os.getppid())
    host = process_inspector.HostSnapshot(processes=real_scan(process_inspector.LEASE_VARIABLE), uses={})
    tree = swaps_of(driver).inspector.tree(kernel, host)
    assert kernel.identity in tree
    assert os.getpid() not in {one.pid for one in tree}
