"""Suspend and resume take every step in order, and from each failure go back to where they can prove to be."""

import errno
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from provisioner.broker import sight
from provisioner.broker import swaps as swaps_module
from provisioner.broker.kernels import Kernel
from provisioner.broker.swaps import Truth
from provisioner.core.effects import Resume
from provisioner.core.events import ResumeOutcome, SuspendOutcome
from provisioner.core.model import LeaseState
from provisioner.gpu.interface import GPUErrorCode, ProcessState
from provisioner.host.memory import Headroom
from provisioner.host.process import ProcessIdentity
from provisioner.host.process import is_alive as really_alive
from provisioner.host.tree import Snapshot
from provisioner.host.tree import scan as real_scan
from provisioner.ledger.records import LedgerError
from tests.broker.driver import DEVICE, OTHERS, Driver, Quiet, journal, kernel_of, swaps_of

S = ProcessState
CLOSES = {"close": "closed", "shrink": "done"}


@pytest.fixture(autouse=True)
def _plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps_module, "headroom", lambda _pid: Headroom(100_000, "the test"))


def running(driver: Driver, pids: list[int]) -> None:
    for pid in pids:
        driver.has_context(pid, S.RUNNING, 300)


async def test_a_suspend_locks_all_before_it_saves_any() -> None:
    driver, phases = Driver(), list[str]()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, journal(phases))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600), sentence
    assert [name for name, _ in driver.calls] == ["lock", "lock", "checkpoint", "checkpoint"]
    assert phases == ["locking", "checkpointing"]
    assert set(driver.states.values()) == {S.CHECKPOINTED}


async def test_a_kernel_without_a_context_has_nothing_to_save_if_its_gate_is_shut_and_is_refused_if_it_has_none() -> (
    None
):
    for answers, outcome in ((CLOSES, SuspendOutcome.NOTHING_TO_SAVE), (None, SuspendOutcome.REFUSED)):
        async with kernel_of(1, answers) as (kernel, _, _pids):
            assert (await swaps_of(Driver()).suspend(kernel, journal([])))[0] is outcome


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
    driver.has_context(pids[0], S.RUNNING, 0)


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
        result = await swaps_of(driver).suspend(kernel, journal([]))
    assert result[0] is outcome
    assert says in result[2]
    assert set(driver.states.values()) == {S.RUNNING}, "somebody was left locked"


async def test_a_lock_that_fails_half_way_is_undone_in_reverse_order() -> None:
    driver = Driver()
    async with kernel_of(3, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        driver.failures["lock", sorted(pids)[2]] = GPUErrorCode.NOT_PERMITTED
        await swaps_of(driver).suspend(kernel, journal([]))
    locked = [pid for name, pid in driver.calls if name == "lock" and pid != sorted(pids)[2]]
    assert len(locked) == 2
    assert [pid for name, pid in driver.calls if name == "unlock"] == locked[::-1]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"close": "busy"}, "a cell began to run"),
        ({"close": "what?"}, "a cell began to run"),
        ({"close": "hang up"}, "did not answer in time"),
        ({"close": "closed", "shrink": "busy"}, "the kernel's main loop was not idle"),
        ({"close": "closed", "shrink": "hang up"}, "the kernel's main loop was not idle"),
    ],
    ids=str,
)
async def test_a_gate_that_does_not_shut_leaves_the_kernel_untouched(answers: dict[str, str], says: str) -> None:
    driver = Driver()
    async with kernel_of(1, answers) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
    assert outcome is SuspendOutcome.ABORTED
    assert says in sentence
    assert driver.calls == []


async def test_a_kernel_that_becomes_busy_while_it_is_locked_is_let_go() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, quiet, pids):
        running(driver, pids)
        write = journal([], lambda phase: setattr(quiet, "busy", phase == "locking"))
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, write)
    assert (outcome, sentence) == (SuspendOutcome.ABORTED, "the kernel became busy")
    assert driver.calls == [("lock", pids[0]), ("unlock", pids[0])]


async def test_a_process_that_begins_to_use_cuda_after_the_lock_stops_the_suspend() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids[:1])
        write = journal([], lambda phase: driver.has_context(pids[1], S.RUNNING, 10) if phase == "locking" else None)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, write)
    assert outcome is SuspendOutcome.ABORTED
    assert f"process {pids[1]} began to use CUDA meanwhile" in sentence
    assert set(driver.states.values()) == {S.RUNNING}


async def test_what_would_not_fit_in_host_memory_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps_module, "headroom", lambda _pid: Headroom(200, "the group of the notebook server"))
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
    assert outcome is SuspendOutcome.REFUSED
    assert "300 MiB would have to be saved" in sentence
    assert "200 MiB are left (limited by the group of the notebook server)" in sentence
    assert driver.calls == []


async def test_a_control_group_with_an_odd_name_does_not_spoil_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps_module, "headroom", lambda _pid: Headroom(200, "group a\udcff\x1b[2J"))
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
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

    monkeypatch.setattr(sight, "scan", scan)


@pytest.mark.parametrize("error", SHORT, ids=str)
@pytest.mark.parametrize("look", [1, 2], ids=["before-the-lock", "after-the-lock"])
async def test_a_machine_that_cannot_be_looked_at_leaves_nobody_locked(
    monkeypatch: pytest.MonkeyPatch, error: Exception, look: int
) -> None:
    fails_to_look(monkeypatch, error, {look})
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
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

    monkeypatch.setattr(swaps_module, "is_alive", is_alive)
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
        assert (outcome, "Too many open files" in sentence) == (SuspendOutcome.REFUSED, True), sentence
        assert set(driver.states.values()) == {S.RUNNING}, "somebody was left locked"
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None


@pytest.mark.parametrize("error", [SHORT[0], ValueError("no MemAvailable")], ids=str)
async def test_host_memory_that_cannot_be_read_is_not_counted_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def headroom(_pid: int) -> Headroom:
        raise error

    monkeypatch.setattr(swaps_module, "headroom", headroom)
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
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
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([], fail))
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
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
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
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, journal(phases), preempt=True)
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600), sentence
    assert phases == ["locking", "checkpointing"]
    assert set(driver.states.values()) == {S.CHECKPOINTED}


async def test_a_preempted_kernel_whose_work_does_not_drain_goes_on() -> None:
    driver = Driver()
    async with kernel_of(2, {"preempt": "closed"}) as (kernel, quiet, pids):
        running(driver, pids)
        quiet.busy = True
        driver.failures["lock", sorted(pids)[1]] = GPUErrorCode.NOT_READY
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]), preempt=True)
    assert outcome is SuspendOutcome.ABORTED
    assert "has GPU work under way" in sentence
    assert set(driver.states.values()) == {S.RUNNING}, "somebody was left locked"


async def test_a_busy_kernel_without_a_context_is_not_called_saved() -> None:
    async with kernel_of(1, {"preempt": "closed"}) as (kernel, quiet, _pids):
        quiet.busy = True
        assert (await swaps_of(Driver()).suspend(kernel, journal([]), preempt=True))[0] is SuspendOutcome.REFUSED


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
        kernel.homes = (DEVICE, OTHERS[0])
        effect = replace(
            resume_of(kernel), device_id=OTHERS[1], device_ids=(OTHERS[1], OTHERS[2]), from_device_ids=kernel.homes
        )
        outcome, sentence = await swaps_of(driver).resume(kernel, effect, 600, journal([]))
    assert outcome is ResumeOutcome.RESTORED, sentence
    assert driver.moves == [(pid, {DEVICE: OTHERS[1], OTHERS[0]: OTHERS[2]}) for pid in sorted(pids)]


async def test_every_one_of_several_devices_must_have_the_room() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        kernel.homes = (OTHERS[0], DEVICE)
        driver.others_mib = 500
        effect = replace(resume_of(kernel), device_id=OTHERS[0], device_ids=kernel.homes, from_device_ids=kernel.homes)
        outcome, sentence = await swaps_of(driver).resume(kernel, effect, 600, journal([]))
    assert (outcome, sentence) == (ResumeOutcome.NOT_STARTED, "the device has 500 MiB free, 600 MiB are needed")
    assert driver.calls == []


async def test_a_kernel_on_several_devices_is_where_its_first_one_is() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        running(driver, pids)
        driver.has_context(pids[1], S.RUNNING, 500)
        driver.where = {pids[1]: OTHERS[0]}
        kernel.homes = (DEVICE, OTHERS[0])
        assert await swaps_of(driver).truth(kernel, None, 0) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)
        kernel.homes = ()
        assert await swaps_of(driver).truth(kernel, None, 0) == Truth(state=LeaseState.RESIDENT, device_id=OTHERS[0])


async def test_a_suspend_looks_at_the_machine_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, looks = Driver(), list[str]()

    def scan(name: str) -> Snapshot:
        looks.append(name)
        return real_scan(name)

    monkeypatch.setattr(sight, "scan", scan)
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, journal([]))
    assert outcome is SuspendOutcome.SAVED, sentence
    assert len(looks) == 2


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


@pytest.mark.parametrize(
    ("looks", "outcome"),
    [({1}, ResumeOutcome.NOT_STARTED), ({2}, ResumeOutcome.UNKNOWN), ({2, 3}, ResumeOutcome.UNKNOWN)],
    ids=str,
)
async def test_a_resume_says_what_it_knows_when_the_machine_cannot_be_looked_at(
    monkeypatch: pytest.MonkeyPatch, looks: set[int], outcome: ResumeOutcome
) -> None:
    fails_to_look(monkeypatch, SHORT[0], looks)
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        assert (await swaps_of(driver).resume(kernel, resume_of(kernel), 600, journal([])))[0] is outcome
        found = await swaps_of(driver).truth(kernel, DEVICE, 600)
        assert found is not None
        assert found.state is (LeaseState.SUSPENDED if looks == {1} else LeaseState.RESIDENT)


# -- truth -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "truth"),
    [
        ((), Truth(state=LeaseState.UNARMED)),
        ((S.RUNNING,), Truth(state=LeaseState.RESIDENT, device_id=DEVICE)),
        ((S.LOCKED, S.RUNNING), Truth(state=LeaseState.RESIDENT, device_id=DEVICE)),
        ((S.CHECKPOINTED, S.CHECKPOINTED), Truth(state=LeaseState.SUSPENDED, device_id=DEVICE, saved_mib=600)),
        ((S.CHECKPOINTED, S.LOCKED), Truth(state=LeaseState.RESIDENT, device_id=DEVICE)),
        ((S.CHECKPOINTED, S.FAILED), None),
        ((S.FAILED,), None),
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
    outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.UNKNOWN, 0), sentence
    assert kernel.checkpointed_mib == 600
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
        assert (await swaps_of(driver).suspend(kernel, journal([])))[0] is SuspendOutcome.SAVED
        assert kernel.checkpointed_mib == 600
        driver.has_context(pids[0], S.CHECKPOINTED, 900)  # it grew, and then somebody else saved it
        driver.has_context(pids[1], S.RUNNING, 300)
        assert (await swaps_of(driver).suspend(kernel, journal([])))[0] is SuspendOutcome.REFUSED
        assert kernel.checkpointed_mib == 0


async def test_room_is_looked_for_anew_before_a_half_saved_kernel_is_brought_back() -> None:
    """The look that a broker begins with is taken before it brings back whom it finds first."""
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(pids[1], S.LOCKED, 300)
        swaps = swaps_of(driver)
        scene = await swaps.scene()
        driver.others_mib = 500
        assert await swaps.truth(kernel, DEVICE, 600, scene) is None
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


async def test_a_driver_that_does_not_answer_tells_no_truth() -> None:
    driver = Driver()
    async with kernel_of() as (kernel, _, pids):
        driver.failures["state", pids[0]] = GPUErrorCode.WORKER_HUNG
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) is None


async def test_a_kernel_that_has_ended_is_unattached() -> None:
    async with kernel_of() as (kernel, _, _pids):
        kernel.forget_process()
        assert await swaps_of(Driver()).truth(kernel, DEVICE, 600) == Truth(state=LeaseState.UNATTACHED)
