"""What an error of the driver means for the lease: a table, by the phase in which it came.

- Before the checkpoint nothing can be lost. What was only a bad moment is tried again soon (ABORTED), what may be better later is left
  alone for a while (REFUSED), what this process or this host cannot do is not tried again (IMPOSSIBLE).
- A checkpoint that failed may leave the process unsound: it is not tried again, even if the driver says that everything is still where it
  was. If the driver does not say so, the outcome is UNKNOWN.
- A restore that failed leaves the lease saved only if the driver says that everything still is. A restore without room is fatal, so after
  an out-of-memory error the driver's word is not enough: the outcome is UNKNOWN, and the lease is looked at again.

`docs/driver-errors.md` shows the table.
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
    """Return the outcome of a suspend whose look or lock failed, once everything is unlocked again."""
    if code in _MOMENT:
        return SuspendOutcome.ABORTED
    return SuspendOutcome.IMPOSSIBLE if code in _NEVER else SuspendOutcome.REFUSED


def after_checkpoint(code: GPUErrorCode, states: Collection[ProcessState]) -> SuspendOutcome:
    """Return the outcome of a suspend whose checkpoint failed; `states` are what the driver says then (empty: nothing)."""
    if not states or any(state not in (ProcessState.LOCKED, ProcessState.RUNNING) for state in states):
        return SuspendOutcome.UNKNOWN
    return SuspendOutcome.ABORTED if code in _MOMENT else SuspendOutcome.IMPOSSIBLE


def after_restore(code: GPUErrorCode, states: Collection[ProcessState]) -> ResumeOutcome:
    """Return the outcome of a resume whose restore failed; `states` as above."""
    still_saved = bool(states) and all(state is ProcessState.CHECKPOINTED for state in states)
    if code is GPUErrorCode.OUT_OF_MEMORY or not still_saved:
        return ResumeOutcome.UNKNOWN
    return ResumeOutcome.NOT_STARTED
