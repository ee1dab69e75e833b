"""Each cell of the table of errors is what really happens to the lease, and the document shows that table."""

import pytest

from fractional_gpu.broker.swap import suspend as suspend_module
from fractional_gpu.broker.swap.outcomes import after_checkpoint, after_restore, before_checkpoint
from fractional_gpu.core.effects import Resume
from fractional_gpu.core.events import ResumeOutcome, SuspendOutcome
from fractional_gpu.gpu.interface import GPUErrorCode, ProcessState
from tests.broker.driver import DEVICE, Driver, journal, kernel_of, suspend_of, swaps_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.promise("driver-answers")

S = ProcessState
CLOSES = {"close": "closed", "shrink": "done"}
CODES = list(GPUErrorCode)
RESUME = Resume(
    lease_id="lease-of-tests",
    operation_id=1,
    generation=1,
    device_ids=(DEVICE,),
    from_device_ids=(DEVICE,),
    reserve_mib=300,
)


@pytest.fixture(autouse=True)
def _plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_module, "shortage", lambda _needs: None)


async def suspend(step: str, code: GPUErrorCode, leaves: ProcessState | None = None) -> tuple[SuspendOutcome, Driver]:
    """Suspend a kernel whose step fails and leaves its process in that state."""
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, (pid,)):
        driver.has_context(pid, S.RUNNING, 300)
        driver.failures[step, pid] = code
        if leaves is not None:
            driver.leaves[step, pid] = leaves
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    worded = {
        GPUErrorCode.NOT_READY: "is still working on the GPU",
        GPUErrorCode.NOT_INITIALIZED: "is unknown to the driver",
    }
    assert (worded.get(code, "failed as told") if step == "lock" else "failed as told") in sentence
    return outcome, driver


@pytest.mark.parametrize("code", CODES)
async def test_an_error_of_the_lock_leaves_the_kernel_running(code: GPUErrorCode) -> None:
    outcome, driver = await suspend("lock", code)
    assert outcome is before_checkpoint(code)
    assert set(driver.states.values()) == {S.RUNNING}


@pytest.mark.parametrize("code", CODES)
async def test_an_error_of_the_checkpoint_that_changed_nothing_is_undone(code: GPUErrorCode) -> None:
    outcome, driver = await suspend("checkpoint", code)
    assert outcome is after_checkpoint(code, (S.LOCKED,))
    assert set(driver.states.values()) == {S.RUNNING}


@pytest.mark.parametrize("left", [S.CHECKPOINTED, S.FAILED, S.CHECKPOINTING, S.UNKNOWN])
@pytest.mark.parametrize("code", CODES)
async def test_an_error_of_the_checkpoint_that_left_something_else_is_not_guessed_at(
    code: GPUErrorCode, left: ProcessState
) -> None:
    outcome, driver = await suspend("checkpoint", code, left)
    assert outcome is after_checkpoint(code, (left,)) is SuspendOutcome.UNKNOWN
    assert set(driver.states.values()) == {left}, "nothing was tried"


@pytest.mark.parametrize("code", CODES)
async def test_a_checkpoint_after_which_the_driver_says_nothing_is_unknown(code: GPUErrorCode) -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES) as (kernel, _, (pid,)):
        driver.has_context(pid, S.RUNNING, 300)
        driver.failures["checkpoint", pid] = code

        def fall_silent(phase: str) -> None:
            if phase == "checkpointing":
                driver.silent_after_a_step = True

        outcome, _, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([], fall_silent))
    assert outcome is after_checkpoint(code, ()) is SuspendOutcome.UNKNOWN


@pytest.mark.parametrize("left", [None, S.FAILED, S.RESTORING, S.LOCKED])
@pytest.mark.parametrize("code", CODES)
async def test_an_error_of_the_restore_leaves_it_saved_only_if_the_driver_says_so(
    code: GPUErrorCode, left: ProcessState | None
) -> None:
    driver = Driver()
    async with kernel_of(1) as (kernel, _, (pid,)):
        driver.has_context(pid, S.CHECKPOINTED, 300)
        driver.failures["restore", pid] = code
        if left is not None:
            driver.leaves["restore", pid] = left
        outcome, _ = await swaps_of(driver).resume(kernel, RESUME, 300)
    assert outcome is after_restore(code, (left or S.CHECKPOINTED,))
    saved = left is None and code is not GPUErrorCode.OUT_OF_MEMORY
    assert outcome is (ResumeOutcome.NOT_STARTED if saved else ResumeOutcome.UNKNOWN)


def test_what_cannot_be_done_is_not_tried_again_and_what_may_have_hurt_neither() -> None:
    assert before_checkpoint(GPUErrorCode.NOT_SUPPORTED) is SuspendOutcome.IMPOSSIBLE
    assert before_checkpoint(GPUErrorCode.OUT_OF_MEMORY) is SuspendOutcome.REFUSED
    assert after_checkpoint(GPUErrorCode.OUT_OF_MEMORY, (S.LOCKED,)) is SuspendOutcome.IMPOSSIBLE
    assert after_checkpoint(GPUErrorCode.WORKER_HUNG, (S.LOCKED,)) is SuspendOutcome.ABORTED


SAYS = {
    SuspendOutcome.ABORTED: "retry soon",
    SuspendOutcome.REFUSED: "retry later",
    SuspendOutcome.IMPOSSIBLE: "do not retry",
}


@pytest.mark.parametrize("code", CODES)
def test_the_document_has_the_row_of_each_error(code: GPUErrorCode) -> None:
    row = f"| `{code.value}` | {SAYS[before_checkpoint(code)]} | {SAYS[after_checkpoint(code, (S.LOCKED,))]} |"
    assert row in (ROOT / "docs" / "driver-errors.md").read_text().splitlines()
