"""The states of a lease in words: one table for the terminal, the notebook, the hub's page and the demonstration.

JupyterLab's extension has the same words in `words.ts`; a test compares the two. Standard library only.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["STATES", "StateWords", "state_meaning", "state_words"]


class StateWords(NamedTuple):
    """A state: `words` for a column or a status line, `meaning` for the kernel's own user."""

    words: str
    meaning: str


STATES: Final[Mapping[str, StateWords]] = {
    "unattached": StateWords("no process", "the broker does not know this kernel's process yet"),
    "unarmed": StateWords("has not used the GPU", "not on a GPU; the next cell waits for one if it has to"),
    "resident": StateWords("on the GPU", "on the GPU"),
    "suspending": StateWords("being suspended", "being saved to host memory"),
    "suspended": StateWords("suspended", "saved in host memory; the next cell brings it back"),
    "resuming": StateWords("being resumed", "on its way back to the GPU"),
    "quarantined": StateWords(
        "unknown, under examination",
        "unknown: the broker examines what is true on the GPU, and touches nothing of this kernel meanwhile",
    ),
    "ended": StateWords("ended", "ended; a new share takes a restart of the kernel, which loses its variables"),
}


def state_words(state: str) -> str:
    """Return the state in a few words; a state of a newer broker as it is named."""
    return STATES[state].words if state in STATES else state


def state_meaning(state: str) -> str:
    """Return what the state means for the kernel's user; a state of a newer broker as it is named."""
    return STATES[state].meaning if state in STATES else state
