"""What an error of the driver means for the lease: a table, by the phase in which it came.

- Before the checkpoint nothing can be lost. What was only a bad moment is tried again soon (ABORTED), what may be better later is left
  alone for a while (REFUSED), what this process or this host cannot do is not tried again (IMPOSSIBLE).
- A checkpoint that failed may leave the process unsound: it is not tried again, even if the driver says that everything is still where it
  was. If the driver does not say so, the outcome is UNKNOWN.
- A restore that failed leaves the lease saved only if the driver says that everything still is. A restore without room is fatal, so after
  an out-of-memory error the driver's word is not enough: the outcome is UNKNOWN, and the lease is looked at again.

`python -m fractional_gpu.broker.swap.outcomes` draws `docs/driver-errors.md` from it.
"""

from collections.abc import Callable, Collection, Mapping

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

BEFORE: Mapping[GPUErrorCode, SuspendOutcome] = {
    code: SuspendOutcome.ABORTED
    if code in _MOMENT
    else SuspendOutcome.IMPOSSIBLE
    if code in _NEVER
    else SuspendOutcome.REFUSED
    for code in GPUErrorCode
}
"""The outcome of a suspend when the error comes before the checkpoint, once everything is unlocked again."""


def before_checkpoint(code: GPUErrorCode) -> SuspendOutcome:
    """Return the outcome of a suspend whose look or lock failed."""
    return BEFORE[code]


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


_BECOMES: Mapping[SuspendOutcome | ResumeOutcome, str] = {
    SuspendOutcome.ABORTED: "resident, tried again soon",
    SuspendOutcome.REFUSED: "resident, left alone for a while",
    SuspendOutcome.NO_MEMORY: "resident, left alone for a while",
    SuspendOutcome.IMPOSSIBLE: "resident, not tried again",
    SuspendOutcome.UNKNOWN: "quarantined",
    ResumeOutcome.NOT_STARTED: "suspended, tried again",
    ResumeOutcome.UNKNOWN: "quarantined",
}
_AS_BEFORE = (ProcessState.LOCKED,)
_OTHERWISE = (ProcessState.FAILED,)
_COLUMNS: Mapping[str, Callable[[GPUErrorCode], SuspendOutcome | ResumeOutcome]] = {
    "look, lock": before_checkpoint,
    "checkpoint, and all is still on the device": lambda code: after_checkpoint(code, _AS_BEFORE),
    "checkpoint, and it is not, or is unknown": lambda code: after_checkpoint(code, _OTHERWISE),
    "restore, and all is still saved": lambda code: after_restore(code, (ProcessState.CHECKPOINTED,)),
    "restore, and it is not, or is unknown": lambda code: after_restore(code, _OTHERWISE),
}
_TEXT = """\
# What an error of the driver does to a kernel

Each call of the driver can fail. What becomes of the lease depends on the error and on the step in which it came, and after a
checkpoint or a restore on what the driver then says of every process of the kernel. This table is drawn from the code that decides
(`python -m fractional_gpu.broker.swap.outcomes`), and a test goes through each of its cells.

{table}
- *Tried again soon*: after a second, then after twice as long each time. *Left alone for a while*: for the pool's `retry_refused`.
  *Not tried again*: as long as the process lives; it stays resident, and status, `%gpu` and refusals say why.
- *Quarantined*: what is true is unknown. What the kernel may hold stays reserved, and the driver is asked again until it says.
  Where it says `failed`, a cell that needs the GPU ends with that sentence instead of waiting; status and `%gpu explain` have it, too.
  What the kernel had on the GPU is lost then, its other variables can be saved in `%%cpu` cells, and a restart makes it sound.
- Whatever was locked is unlocked before a kernel counts as resident again. If that fails, it is quarantined.
- `worker-hung` and `worker-died` are the checkpoint worker's: it is replaced, and the driver is asked what it left behind.
- `out-of-memory` at a restore is fatal to the process, as far as is known. That is why a restore is never tried before the room is
  seen to be free.
"""


def document() -> str:
    """Return the document with the table."""
    lines = ["| error | " + " | ".join(_COLUMNS) + " |", "|---" * (1 + len(_COLUMNS)) + "|"]
    for code in GPUErrorCode:
        cells = " | ".join(_BECOMES[decide(code)] for decide in _COLUMNS.values())
        lines.append(f"| `{code.value}` | {cells} |")
    return _TEXT.format(table="\n".join(lines) + "\n")


if __name__ == "__main__":
    print(document(), end="")  # noqa: T201 - a command
