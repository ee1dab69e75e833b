"""A suspend takes every step in order, and after any failure goes back to a state that it can prove."""

from collections.abc import Callable, Mapping

import pytest

from fractional_gpu.broker.kernels import process_inspector
from fractional_gpu.broker.swap import suspend
from fractional_gpu.broker.swap import suspend as suspend_module
from fractional_gpu.broker.swap import swap as truth_module
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.gpu.interface import GPUErrorCode, ProcessState
from fractional_gpu.host.memory import Shortage
from fractional_gpu.host.process import ProcessIdentity, Snapshot
from fractional_gpu.host.process import is_alive as really_alive
from fractional_gpu.host.process import scan as real_scan
from fractional_gpu.ledger.records import LedgerError
from tests.broker.driver import DEVICE, OTHERS, Driver, Quiet, journal, kernel_of, suspend_of, swaps_of
from tests.broker.swap.kernels import CLOSES, SHORT, S, fails_to_look, room_for, running

pytestmark = pytest.mark.promise("driver-answers")


async def test_a_suspend_locks_all_before_it_saves_any() -> None:
    driver, phases = Driver(), list[str]()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal(phases))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600), sentence
    assert [name for name, _ in driver.calls] == ["lock", "lock", "checkpoint", "checkpoint"]
    assert phases == ["locking", "checkpointing"]
    assert set(driver.states.values()) == {S.CHECKPOINTED}


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


@pytest.mark.promise("race-lock")
@pytest.mark.parametrize(
    ("spoil", "outcome", "says"),
    [
        (not_ready, SuspendOutcome.ABORTED, "is still working on the GPU"),
        (not_permitted, SuspendOutcome.IMPOSSIBLE, "lock failed as told"),
        (checkpoint_refused, SuspendOutcome.IMPOSSIBLE, "checkpoint failed as told"),
        (checkpoint_lies, SuspendOutcome.IMPOSSIBLE, "the driver reported the checkpoint as done"),
        (uncounted, SuspendOutcome.REFUSED, "no device reports how much memory"),
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
    assert set(driver.states.values()) == {S.RUNNING}, "a process was left locked"


@pytest.mark.promise("race-lock")
async def test_a_lock_that_fails_half_way_is_undone_in_reverse_order() -> None:
    driver = Driver()
    async with kernel_of(3, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        driver.failures["lock", sorted(pids)[2]] = GPUErrorCode.NOT_PERMITTED
        await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    locked = [pid for name, pid in driver.calls if name == "lock" and pid != sorted(pids)[2]]
    assert len(locked) == 2
    assert [pid for name, pid in driver.calls if name == "unlock"] == locked[::-1]


@pytest.mark.promise("race-lock")
@pytest.mark.parametrize(
    ("code", "outcome", "says"),
    [
        (GPUErrorCode.NO_SUCH_PROCESS, SuspendOutcome.IMPOSSIBLE, "lock failed as told"),
        (GPUErrorCode.OPERATING_SYSTEM, SuspendOutcome.UNKNOWN, "may still be locked"),
    ],
)
async def test_a_process_that_cannot_be_unlocked_is_forgotten_only_if_it_ended(
    code: GPUErrorCode, outcome: SuspendOutcome, says: str
) -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        first, second = sorted(pids)
        driver.failures["lock", second] = GPUErrorCode.NOT_PERMITTED
        driver.failures["unlock", first] = code
        result = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert result[0] is outcome
    assert says in result[2]


@pytest.mark.promise("race-lock")
async def test_a_kernel_that_becomes_busy_while_it_is_locked_is_let_go() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, quiet, pids):
        running(driver, pids)
        write = journal([], lambda phase: setattr(quiet, "busy", phase == "locking"))
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), write)
    assert outcome is SuspendOutcome.ABORTED
    assert "busy" in sentence
    assert driver.calls == [("lock", pids[0]), ("unlock", pids[0])]


@pytest.mark.promise("race-lock")
async def test_a_process_that_begins_to_use_cuda_after_the_lock_stops_the_suspend() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids[:1])
        write = journal([], lambda phase: driver.has_context(pids[1], S.RUNNING, 10) if phase == "locking" else None)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), write)
    assert outcome is SuspendOutcome.ABORTED
    assert str(pids[1]) in sentence
    assert set(driver.states.values()) == {S.RUNNING}


@pytest.mark.promise("race-host-memory")
async def test_what_would_not_fit_in_host_memory_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(200, "the group of the notebook server"))
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.NO_MEMORY
    assert all(one in sentence for one in ("300 MiB", "200 MiB", "the group of the notebook server"))
    assert driver.calls == []


async def test_a_control_group_with_an_odd_name_does_not_spoil_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(200, "group a\udcff\x1b[2J"))
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.NO_MEMORY
    assert "a??[2J" in sentence


@pytest.mark.parametrize("look", [1, 2], ids=["before-the-lock", "after-the-lock"])
async def test_an_unreadable_machine_leaves_no_process_locked(monkeypatch: pytest.MonkeyPatch, look: int) -> None:
    fails_to_look(monkeypatch, SHORT, {look})
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.REFUSED
    assert str(SHORT) in sentence
    assert [name for name, _ in driver.calls] == (["lock", "lock", "unlock", "unlock"] if look == 2 else [])
    assert set(driver.states.values()) == {S.RUNNING}, "a process was left locked"


async def test_a_kernel_that_may_be_dead_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    def is_alive(identity: ProcessIdentity) -> bool:
        if driver.calls:
            raise SHORT
        return really_alive(identity)

    monkeypatch.setattr(suspend, "is_alive", is_alive)
    monkeypatch.setattr(truth_module, "is_alive", is_alive)
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert (outcome, "Too many open files" in sentence) == (SuspendOutcome.REFUSED, True), sentence
        assert set(driver.states.values()) == {S.RUNNING}, "a process was left locked"
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None


@pytest.mark.parametrize("error", [SHORT, ValueError("no MemAvailable")], ids=str)
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


@pytest.mark.parametrize(("fresh_s", "count"), [(60.0, 2), (0.0, 3)], ids=["soon", "after-a-slow-shrink"])
async def test_a_suspend_looks_at_the_processes_twice_and_again_if_shrinking_takes_long(
    monkeypatch: pytest.MonkeyPatch, fresh_s: float, count: int
) -> None:
    driver, looks = Driver(), list[str]()
    monkeypatch.setattr(suspend_module, "FRESH_S", fresh_s)

    def scan(name: str, *_: object) -> Snapshot:
        looks.append(name)
        return real_scan(name)

    monkeypatch.setattr(process_inspector, "scan", scan)
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.SAVED, sentence
    assert len(looks) == count


@pytest.mark.promise("race-host-memory")
async def test_what_several_processes_would_save_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", room_for(500, "the test"))  # room for either one, but not for both
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, driver.calls) == (SuspendOutcome.NO_MEMORY, [])
    assert "600 MiB must be saved" in sentence


@pytest.mark.promise("race-size")
async def test_more_than_was_reserved_for_it_is_not_saved_and_is_told() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, need_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel, host_mib=599), journal([]))
        assert (outcome, need_mib, driver.calls) == (SuspendOutcome.ABORTED, 600, [])
        outcome, saved_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel, host_mib=600), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 600)


@pytest.mark.parametrize("phase", ["", "locking"], ids=["before-the-locks", "under-the-locks"])
async def test_what_is_lacking_is_asked_of_the_arbiter_before_the_point_of_no_return(phase: str) -> None:
    for granted_mib, expected in ((400, (SuspendOutcome.SAVED, 400)), (399, (SuspendOutcome.ABORTED, 400))):
        driver, asked = Driver(), list[int]()

        def reserve(need_mib: int, asked: list[int] = asked, granted_mib: int = granted_mib) -> int:
            asked.append(need_mib)
            return granted_mib

        async with kernel_of(1, CLOSES) as (kernel, _, pids):
            running(driver, pids)
            driver.mib[pids[0]] = 300 if phase else 400

            def grow(now: str, driver: Driver = driver, pid: int = pids[0]) -> None:
                if now == phase:
                    driver.mib[pid] = 400

            effect = suspend_of(kernel, host_mib=300)
            outcome, mib, sentence = await swaps_of(driver).suspend(kernel, effect, journal([], grow), reserve)
        assert (outcome, mib) == expected
        assert set(asked) == {400}
        assert len(asked) <= 2
        if outcome is SuspendOutcome.ABORTED:
            assert "400 MiB must be saved, but only 399 MiB of host memory is reserved" in sentence
            assert not [name for name, _ in driver.calls if name == "checkpoint"]


@pytest.mark.promise("race-size")
async def test_a_kernel_that_grows_before_it_is_locked_is_let_go() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        write = journal([], lambda phase: driver.mib.update({pids[0]: 400}) if phase == "locking" else None)
        outcome, need_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel, host_mib=300), write)
    assert (outcome, need_mib) == (SuspendOutcome.ABORTED, 400)
    assert driver.calls == [("lock", pids[0]), ("unlock", pids[0])]


async def test_memory_on_a_device_that_is_not_the_leases_is_not_saved() -> None:
    """It would be restored there, where no room is reserved for it."""
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        driver.where[pids[1]], kernel.measurement.seen_on = OTHERS[0], frozenset({DEVICE, OTHERS[0]})
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])
    assert OTHERS[0] in sentence
