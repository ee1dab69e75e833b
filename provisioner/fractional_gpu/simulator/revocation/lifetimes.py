"""Published lifetimes of transient GPU servers.

Source: S. Li, R. J. Walls and T. Guo, "Characterizing and Modeling Distributed Training with Transient Cloud GPU Servers", ICDCS 2020
(arXiv 2004.03072). The numbers are those of its figures of lifetimes, from the authors' repository
(https://github.com/cake-lab/CM-DARE, `data/matplotlib_scripts/Sigmetrics2020_redraws.ipynb`): for each type and region the share of the
servers that Google Cloud had revoked so many hours after their start. Each share is a whole number of servers, which are given here.

Inferred, not published: the number of servers of each curve (the smallest with which its shares are whole numbers; those of the K80 add up
to the 156 that the repository names), and when within its hour a server was revoked (taken as uniform). A server that is not revoked ends
after 24 hours, the longest that Google gives such servers. A replacement takes as long as the repository's transient servers took to start
(`data/processed_data/startup_time`, 45 of them): 87 s on average.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

from fractional_gpu.simulator import SimulationError

HOUR_MS: Final = 3_600_000
LONGEST_MS: Final = 24 * HOUR_MS
"""The longest lifetime of such a server."""
START_MS: Final = 87_000
"""From the request to a running server: the published average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How many of `servers` were revoked in each of the 24 hours after their start."""

    servers: int
    revoked: tuple[int, ...]

    @property
    def revoked_milli(self) -> int:
        """The share that was revoked within 24 hours, thousandths."""
        return 1000 * sum(self.revoked) // self.servers

    def draw_ms(self, random: Random) -> int:
        """Return the lifetime of a server, ms: at most 24 hours."""
        until = list(accumulate(self.revoked))
        hour = bisect_right(until, random.randrange(self.servers))
        offset_ms = random.randrange(HOUR_MS)
        return LONGEST_MS if hour == len(until) else max(1, hour * HOUR_MS + offset_ms)


def _curve(servers: int, **hours: int) -> Lifetimes:
    """`h3=2`: two were revoked in the fourth hour, from three to four hours after their start."""
    return Lifetimes(servers=servers, revoked=tuple(hours.get(f"h{hour}", 0) for hour in range(24)))


PUBLISHED: Final[dict[str, dict[str, Lifetimes]]] = {
    "k80": {
        "us-central1": _curve(48, h0=5, h2=2, h5=1, h6=5, h13=1, h14=1, h15=7, h20=1, h23=4),
        "us-west1": _curve(48, h0=2, h2=5, h3=1, h11=1, h15=1, h20=1),
        "europe-west1": _curve(30, h0=12, h2=2, h6=1, h8=1, h12=2, h15=2),
        "us-east1": _curve(30, h0=14),
    },
    "p100": {
        "us-east1": _curve(30, h0=6, h1=6, h2=7, h6=1, h23=1),
        "europe-west1": _curve(30, h1=2, h2=2, h4=1, h6=1, h10=1, h19=1),
        "us-central1": _curve(30, h0=8, h1=2, h6=2, h7=2, h14=1, h15=1),
        "us-west1": _curve(30, h0=5, h1=4, h4=4, h9=2, h10=1, h14=4),
    },
    "v100": {
        "europe-west4": _curve(30, h0=2, h1=3, h3=1, h8=1, h12=4, h23=2),
        "asia-east1": _curve(30, h0=7, h1=2, h2=2, h3=1, h5=2),
        "us-central1": _curve(30, h0=20),
        "us-west1": _curve(30, h0=9, h1=6, h2=1, h3=6),
    },
}
"""By type of GPU and region."""


def lifetimes_of(kind: str) -> Lifetimes:
    """Return the lifetimes of `v100` (all regions together) or of `v100/us-west1`. Raises SimulationError for another kind."""
    gpu, _, region = kind.strip().lower().partition("/")
    regions = PUBLISHED.get(gpu, {})
    if region in regions:
        return regions[region]
    if not regions or region:
        allowed = "; ".join(f"{name} in {', '.join(found)}" for name, found in PUBLISHED.items())
        raise SimulationError(
            f"no lifetimes of {kind[:40]!r} were published; allowed: {', '.join(PUBLISHED)}, or one of these in a region such as "
            f"v100/us-west1 ({allowed})"
        )
    curves = regions.values()
    return Lifetimes(
        servers=sum(curve.servers for curve in curves),
        revoked=tuple(map(sum, zip(*(curve.revoked for curve in curves), strict=True))),
    )
