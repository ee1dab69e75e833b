"""The driver tells what state a kernel is in, and half-done operations are finished or undone where that is safe."""

import pytest

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap.swap import Truth
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import GPUErrorCode, ProcessState
from tests.broker.driver import DEVICE, OTHERS, Driver, journal, kernel_of, suspend_of, swaps_of
from tests.broker.swap.kernels import CLOSES, SHORT, S, fails_to_look, running

pytestmark = pytest.mark.promise("driver-answers")


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


@pytest.mark.promise("race-half-done")
async def test_what_a_suspend_left_half_saved_comes_back_only_where_the_saved_half_has_room() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        await half_saved(driver, kernel, pids)
        driver.others_mib = 500  # 200 are left
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None
        assert driver.calls == []
        driver.others_mib = 400  # 300 are left: the other half is already there
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)


@pytest.mark.promise("race-half-done")
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


async def test_how_much_a_running_process_still_had_to_save_is_unknown() -> None:
    """A new broker knows only the sum: what runs next to the saved half may have come since."""
    driver = Driver()
    driver.others_mib = 200
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 600)
        driver.has_context(pids[1], S.RUNNING, 300)
        assert await swaps_of(driver).truth(kernel, DEVICE, 600) is None
        assert driver.calls == []


@pytest.mark.parametrize("state", [S.RUNNING, S.LOCKED])
async def test_state_that_another_program_saved_comes_back_only_to_a_device_without_others(state: ProcessState) -> None:
    """No record says how much it is."""
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(pids[1], state, 300)
        driver.has_context(1, S.RUNNING, 100)
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) is None
        assert driver.calls == []
        del driver.states[1], driver.mib[1]
        assert await swaps_of(driver).truth(kernel, DEVICE, 0) == Truth(state=LeaseState.RESIDENT, device_id=DEVICE)


async def test_state_that_another_program_saved_next_to_ours_has_an_unknown_size() -> None:
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
        driver.has_context(pids[0], S.CHECKPOINTED, 900)  # it grew, and then another program saved it
        driver.has_context(pids[1], S.RUNNING, 300)
        assert (await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([])))[0] is SuspendOutcome.REFUSED
        assert kernel.checkpoint.total_mib == 0


async def test_room_is_checked_again_before_a_half_saved_kernel_is_brought_back() -> None:
    """The look that a broker begins with is older than the first lease it brings back."""
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(pids[1], S.LOCKED, 300)
        swaps = swaps_of(driver)
        host = await swaps.inspector.take()
        driver.others_mib = 500
        assert await swaps.truth(kernel, DEVICE, 600, host) is None
        assert driver.calls == []


async def test_a_machine_that_cannot_be_looked_at_tells_no_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_to_look(monkeypatch, SHORT, {1, 3})
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
        assert f"an uncorrectable error in process {pids[0]}:" in truth.sentence
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
