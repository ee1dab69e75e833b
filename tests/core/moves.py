"""The legal moves of a lease, restated from the design: from which state to which, and what must cause each."""

from fractional_gpu.core.events import (
    Attached,
    Event,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    ProcessExited,
    ResumeFinished,
    SuspendFinished,
    TruthFound,
)
from fractional_gpu.core.model import LeaseState

__all__ = ["ELIGIBLE", "HOLDERS", "MOVES", "OWN_EVENTS"]

S = LeaseState

_OVER = (LeaseReleased, ProcessExited, TruthFound)  # only a revoked lease ends with its process

MOVES: dict[LeaseState | None, dict[LeaseState, tuple[type[Event], ...]]] = {
    None: {
        S.UNATTACHED: (LeaseRequested, LeaseRecovered),
        S.NO_CONTEXT: (LeaseRecovered,),
        S.RESIDENT: (LeaseRecovered,),
        S.SUSPENDED: (LeaseRecovered,),
        S.QUARANTINED: (LeaseRecovered,),
    },
    S.UNATTACHED: {S.NO_CONTEXT: (Attached,), S.RESIDENT: (Attached,), S.UNATTACHED: (Event,), S.ENDED: (Event,)},
    S.NO_CONTEXT: {S.RESIDENT: (Event,), S.UNATTACHED: (ProcessExited,), S.ENDED: _OVER},
    S.RESIDENT: {S.SUSPENDING: (Event,), S.UNATTACHED: (ProcessExited,), S.ENDED: _OVER},
    S.SUSPENDING: {
        S.SUSPENDED: (SuspendFinished,),
        S.NO_CONTEXT: (SuspendFinished,),
        S.RESIDENT: (SuspendFinished,),
        S.QUARANTINED: (SuspendFinished,),
        S.UNATTACHED: (ProcessExited,),
        S.ENDED: _OVER,
    },
    S.SUSPENDED: {S.RESUMING: (Event,), S.UNATTACHED: (ProcessExited,), S.ENDED: _OVER},
    S.RESUMING: {
        S.RESIDENT: (ResumeFinished,),
        S.SUSPENDED: (ResumeFinished,),
        S.QUARANTINED: (ResumeFinished,),
        S.UNATTACHED: (ProcessExited,),
        S.ENDED: _OVER,
    },
    S.QUARANTINED: {
        S.RESIDENT: (TruthFound,),
        S.SUSPENDED: (TruthFound,),
        S.NO_CONTEXT: (TruthFound,),
        S.UNATTACHED: (TruthFound, ProcessExited),
        S.ENDED: _OVER,
    },
}
"""`Event`: the arbiter decides, at any event."""

OWN_EVENTS = (Attached, SuspendFinished, ResumeFinished, TruthFound, ProcessExited, LeaseReleased, LeaseRecovered)
"""These move only the lease they name."""

ELIGIBLE = frozenset({S.UNATTACHED, S.NO_CONTEXT, S.SUSPENDED})
HOLDERS = frozenset({S.RESIDENT, S.SUSPENDING, S.RESUMING, S.QUARANTINED})
