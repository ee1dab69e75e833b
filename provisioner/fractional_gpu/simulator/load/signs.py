"""Signs that people give before they run a cell, as a front end tells them: for simulations of foresight.

A sign comes `foresight_ms` before each cell that uses a GPU, or at once where the person is quicker than that. So many percent of all
signs are false: they come at any time of a gap, and no cell follows them within the time that a sign lasts, unless by chance. Each gap
of each session draws from random numbers of its own, so one seed gives the same signs whatever else happens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

SIGN_MS = 60_000
"""How long a sign of a front end lasts."""
_MOST_FALSE = 50  # in one gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """How early signs come, and how many of 100 are false. 0 ms: there are none."""

    foresight_ms: int = 0
    false_percent: int = 0

    def before(self, seed: int, session_id: str, cell: int, gap_ms: int, *, uses_gpu: bool) -> Sequence[int]:
        """Return when signs come in the gap before a cell (its number), in ms after the gap's beginning."""
        if not self.foresight_ms:
            return ()
        true = [max(0, gap_ms - self.foresight_ms)] if uses_gpu else []
        rng = random.Random(f"{seed}/signs/{session_id}/{cell}")  # noqa: S311 - a workload, not a secret
        false = list[int]()
        while len(false) < _MOST_FALSE and rng.random() * 100 < self.false_percent:
            false.append(rng.randrange(max(1, gap_ms)))
        return sorted(true + false)
