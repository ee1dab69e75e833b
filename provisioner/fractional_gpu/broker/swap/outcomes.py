"""The consequences of a driver error for the lease, as a table by phase. `docs/driver-errors.md` shows it.

- Before the checkpoint nothing can be lost. The suspend is tried again soon (ABORTED), later (REFUSED) or never (IMPOSSIBLE).
- A failed checkpoint may leave the process in an unsound state. It is not tried again, even if the driver reports that nothing moved.
  Without that report the outcome is UNKNOWN.
- A failed restore leaves the lease saved only if the driver reports that everything is still saved. A restore without room is fatal, so
  after an out-of-memory error this report is not enough. The outcome is then UNKNOWN, and the lease is examined again.
"""

from collections.abc import Collection

from fractional_gpu.core.events import ResumeOutcome, SuspendOutcome
from fractional_gpu.gpu.interface import GPUErrorCode, ProcessState

_MOMENT = frozenset(
    {
        GPUErrorCode.NOT_READY,
        GPUErrorCode.SYSTEM_NOT_READY,
        GPUErrorCode.NO_SUCH_PROCESS,
        GPUErrorCode.WRONG_IDENTITY,
        GPUErrorCode.WORKER_HUNG,
        GPUErrorCode.WORKER_DIED,
        GPUErrorCode.WORKER_BUSY,
    }
)
_NEVER = frozenset({GPUErrorCode.NOT_SUPPORTED, GPUErrorCode.NOT_PERMITTED})


def before_checkpoint(code: GPUErrorCode) -> SuspendOutcome:
    if code in _MOMENT:
        return SuspendOutcome.ABORTED
    return SuspendOutcome.IMPOSSIBLE if code in _NEVER else SuspendOutcome.REFUSED


def after_checkpoint(code: GPUErrorCode, states: Collection[ProcessState]) -> SuspendOutcome:
    """Return the outcome of a suspend whose checkpoint failed.

    `states` has the driver's answers after the failure, and can be empty.
    """
    if not states or any(state not in (ProcessState.LOCKED, ProcessState.RUNNING) for state in states):
        return SuspendOutcome.UNKNOWN
    return SuspendOutcome.ABORTED if code in _MOMENT else SuspendOutcome.IMPOSSIBLE


def after_restore(code: GPUErrorCode, states: Collection[ProcessState]) -> ResumeOutcome:
    still_saved = bool(states) and all(state is ProcessState.CHECKPOINTED for state in states)
    if code is GPUErrorCode.OUT_OF_MEMORY or not still_saved:
        return ResumeOutcome.UNKNOWN
    return ResumeOutcome.NOT_STARTED
