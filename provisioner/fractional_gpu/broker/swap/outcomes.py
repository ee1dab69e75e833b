"""Decides what a driver error means for the lease, depending on the phase. `docs/driver-errors.md` shows this as a table.

- If an error occurs before the checkpoint, nothing is lost. The suspend is retried soon (ABORTED), later (REFUSED) or never (IMPOSSIBLE).
- A failed checkpoint may leave the process in an unsound state. It is retried only if the error is temporary and the driver reports that
  nothing moved. Without that report, the outcome is UNKNOWN.
- After a failed restore, the lease counts as saved only if the driver reports that everything is still saved. A restore that runs out of
  memory kills the process, so after such an error the outcome is UNKNOWN whatever the driver reports, and the lease is examined again.
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

    `states` contains the states that the driver reported after the failure, and may be empty.
    """
    if not states or any(state not in (ProcessState.LOCKED, ProcessState.RUNNING) for state in states):
        return SuspendOutcome.UNKNOWN
    return SuspendOutcome.ABORTED if code in _MOMENT else SuspendOutcome.IMPOSSIBLE


def after_restore(code: GPUErrorCode, states: Collection[ProcessState]) -> ResumeOutcome:
    still_saved = bool(states) and all(state is ProcessState.CHECKPOINTED for state in states)
    if code is GPUErrorCode.OUT_OF_MEMORY or not still_saved:
        return ResumeOutcome.UNKNOWN
    return ResumeOutcome.NOT_STARTED
