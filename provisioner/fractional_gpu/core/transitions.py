"""Defines the legal state changes of a lease as a table.

The arbiter makes no other changes. The diagram in the documentation is generated from the table
(`python -m fractional_gpu.core.transitions`).
"""

from collections.abc import Mapping
from enum import StrEnum

from fractional_gpu.core.model import LeaseState


class Cause(StrEnum):
    """The reason a lease changes state."""

    ADMITTED = "admitted"
    ATTACHED = "attached"
    ATTACHED_RESERVED = "attached with a reservation"
    RESERVED = "reserved before its start"
    LAPSED = "not started in time"
    GRANTED = "granted"
    SUSPEND = "suspend"
    SAVED = "saved"
    NOTHING_TO_SAVE = "nothing to save"
    ROLLED_BACK = "rolled back"
    LOST_TRACK = "lost track"
    RESUME = "resume"
    RESTORED = "restored"
    NOT_STARTED = "not started"
    EXITED = "process exited"
    RELEASED = "released"
    EXPIRED = "expired"
    FOUND_UNATTACHED = "found without a process"
    FOUND_NO_CONTEXT = "found without a context"
    FOUND_RESIDENT = "found resident"
    FOUND_SUSPENDED = "found suspended"
    FOUND_UNKNOWN = "not known yet"


class IllegalTransitionError(AssertionError):
    """The arbiter tried to make a change that is not in the table. This is always a bug in the arbiter, never the caller's fault."""


_S = LeaseState
_FOUND = {
    Cause.FOUND_UNATTACHED: _S.UNATTACHED,
    Cause.FOUND_NO_CONTEXT: _S.NO_CONTEXT,
    Cause.FOUND_RESIDENT: _S.RESIDENT,
    Cause.FOUND_SUSPENDED: _S.SUSPENDED,
}
_END = {Cause.EXITED: _S.UNATTACHED, Cause.RELEASED: _S.ENDED}

TABLE: Mapping[LeaseState | None, Mapping[Cause, LeaseState]] = {
    None: {Cause.ADMITTED: _S.UNATTACHED, **_FOUND, Cause.FOUND_UNKNOWN: _S.QUARANTINED},
    _S.UNATTACHED: {
        Cause.ATTACHED: _S.NO_CONTEXT,
        Cause.ATTACHED_RESERVED: _S.RESIDENT,
        Cause.RESERVED: _S.UNATTACHED,
        Cause.LAPSED: _S.UNATTACHED,
        Cause.RELEASED: _S.ENDED,
        Cause.EXPIRED: _S.ENDED,
    },
    _S.NO_CONTEXT: {Cause.GRANTED: _S.RESIDENT, **_END},
    _S.RESIDENT: {Cause.SUSPEND: _S.SUSPENDING, **_END},
    _S.SUSPENDING: {
        Cause.SAVED: _S.SUSPENDED,
        Cause.NOTHING_TO_SAVE: _S.NO_CONTEXT,
        Cause.ROLLED_BACK: _S.RESIDENT,
        Cause.LOST_TRACK: _S.QUARANTINED,
        **_END,
    },
    _S.SUSPENDED: {Cause.RESUME: _S.RESUMING, **_END},
    _S.RESUMING: {
        Cause.RESTORED: _S.RESIDENT,
        Cause.NOT_STARTED: _S.SUSPENDED,
        Cause.LOST_TRACK: _S.QUARANTINED,
        **_END,
    },
    _S.QUARANTINED: {**_FOUND, **_END},
    _S.ENDED: {},
}
"""Maps each state and cause to the next state. The key None is for a lease that is new to the arbiter."""


def next_state(old: LeaseState | None, cause: Cause) -> LeaseState:
    """Return the next state. Raise IllegalTransitionError if the table has no such change."""
    try:
        return TABLE[old][cause]
    except KeyError:
        raise IllegalTransitionError(f"a lease that is {old} cannot change state because of {cause.value!r}") from None


def diagram() -> str:
    """Return the table as a mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for old, moves in TABLE.items():
        by_target: dict[LeaseState, list[str]] = {}
        for cause, new in moves.items():
            by_target.setdefault(new, []).append(cause.value)
        source = "[*]" if old is None else old.value
        for new, causes in by_target.items():
            lines.append(f"    {source} --> {'[*]' if new is LeaseState.ENDED else new.value}: {', '.join(causes)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(diagram(), end="")  # noqa: T201 - a command
