"""Devices, or whole hosts, leave a simulated run after transient servers' lifetimes, with notice, and are replaced.

Draws depend only on the seed, host and device. A kernel that is not saved by the deadline loses its process: its running cell fails, and
the user continues with the next one. The run follows the arbiter's order. What other orders would have saved is computed at each notice
(`saved_in`), with less knowledge: a save still running at the deadline is lost. docs/revocation.md has the lifetimes' source and the
assumptions.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heapreplace
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Final

from fractional_gpu.simulator import SimulationError

if TYPE_CHECKING:
    from fractional_gpu.simulator.one_host import HostRun

HOUR_MS: Final = 3_600_000
LONGEST_MS: Final = 24 * HOUR_MS
"""The longest lifetime of such a server."""
START_MS: Final = 87_000
"""From the request to a running server: the published average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    servers: int
    revoked: tuple[int, ...]

    def draw_ms(self, random: Random) -> int:
        until = list(accumulate(self.revoked))
        hour = bisect_right(until, random.randrange(self.servers))
        offset_ms = random.randrange(HOUR_MS)
        return LONGEST_MS if hour == len(until) else max(1, hour * HOUR_MS + offset_ms)


def _curve(servers: int, **hours: int) -> Lifetimes:
    """`h3=2`: two were revoked in the fourth hour, three to four hours after starting."""
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
    """Return the lifetimes of `v100` (all regions together) or `v100/us-west1`. Raises SimulationError for other kinds."""
    gpu, _, region = kind.strip().lower().partition("/")
    regions = PUBLISHED.get(gpu, {})
    if region in regions:
        return regions[region]
    if not regions or region:
        allowed = "; ".join(f"{name} in {', '.join(found)}" for name, found in PUBLISHED.items())
        raise SimulationError(
            f"no lifetimes of {kind[:40]!r} were published; choose one of: {', '.join(PUBLISHED)}, or one of these in a region such as "
            f"v100/us-west1 ({allowed})"
        )
    curves = regions.values()
    return Lifetimes(
        servers=sum(curve.servers for curve in curves),
        revoked=tuple(map(sum, zip(*(curve.revoked for curve in curves), strict=True))),
    )


OURS: Final = "ours"
NO_NOTICE: Final = "no-notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    lease_id: str
    mib: int  # on all of its devices
    swap_ms: int  # how long its save takes
    work: int  # its cells' GPU time since its process began: ms times GPUs
    value: int  # by the arbiter's count
    under_way_until_ms: int | None = None  # when its running save ends


Order = Callable[[Sequence[Holder], Random], list[Holder]]
OTHERS: Final[dict[str, Order]] = {
    "smallest-first": lambda there, _random: sorted(there, key=lambda one: (one.mib, one.lease_id)),
    "random": lambda there, random: random.sample(list(there), len(there)),
}
"""The other orders, by name."""


def saved_in(
    order: Sequence[Holder], *, free_ms: Sequence[int], deadline_ms: int, host_left_mib: int
) -> frozenset[str]:
    """Return the leases saved in this order. `free_ms`: when each swap channel is free, now at the earliest."""
    channels = list(free_ms)
    heapify(channels)
    saved = {one.lease_id for one in order if (one.under_way_until_ms or deadline_ms + 1) <= deadline_ms}
    for one in order:
        if one.under_way_until_ms is not None or one.mib > host_left_mib:
            continue
        if channels[0] >= deadline_ms:
            break
        ends_ms = channels[0] + one.swap_ms
        heapreplace(channels, ends_ms)
        host_left_mib -= one.mib
        if ends_ms <= deadline_ms:
            saved.add(one.lease_id)
    return frozenset(saved)


NOTICE_MS = 30_000
"""Google's notice, and by far not the longest one: AWS gives two minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """What leaves, after which lifetimes, with how much notice, and how long its replacement takes (ms)."""

    lifetimes: Lifetimes
    whole_hosts: bool = False
    notice_ms: int = NOTICE_MS
    replace_ms: int = START_MS
    seed: int = 1


@dataclass(slots=True)
class Loss:
    kernels: int = 0
    mib: int = 0
    work: int = 0
    value: int = 0

    def add(self, one: Holder) -> None:
        self.kernels += 1
        self.mib += one.mib
        self.work += one.work
        self.value += one.value

    def as_json(self, there: "Loss") -> dict[str, object]:
        return {
            "kernels": self.kernels,
            "gib": round(self.mib / 1024, 3),
            "busy_gpu_hours": round(self.work / HOUR_MS, 3),
            "value_percent": round(100 * self.value / there.value, 2) if there.value else 0.0,
        }


@dataclass(slots=True)
class RevocationFigures:
    whole_hosts: bool = False
    notices: int = 0
    devices: int = 0
    there: Loss = field(default_factory=Loss)
    unsaved: dict[str, Loss] = field(default_factory=lambda: {name: Loss() for name in (OURS, *OTHERS, NO_NOTICE)})
    saved_before: Loss = field(default_factory=Loss)  # already suspended, lost with the host

    def as_json(self) -> dict[str, object]:
        figures: dict[str, object] = {
            "notices": self.notices,
            "devices": self.devices,
            "on_them": self.there.as_json(self.there),
            "unsaved": {name: loss.as_json(self.there) for name, loss in self.unsaved.items()},
        }
        if self.whole_hosts:
            both = Loss(*(getattr(self.there, name) + getattr(self.saved_before, name) for name in Loss.__slots__))
            figures["lost_with_the_hosts"] = both.as_json(both)
        return figures


@dataclass(frozen=True, slots=True)
class HostRevocations:
    revocation: Revocation
    number: int
    host: "HostRun"
    figures: RevocationFigures
    goes_on: Callable[[], bool]

    def begin(self) -> None:
        devices = tuple(self.host.devices)
        for group in [devices] if self.revocation.whole_hosts else [(device_id,) for device_id in devices]:
            self._live(group, 0)

    def _random(self, group: tuple[str, ...], life: int, what: str) -> Random:
        return Random(f"{self.revocation.seed}/{what}/{self.number}/{group[0]}/{life}")  # noqa: S311 - a workload

    def _live(self, group: tuple[str, ...], life: int) -> None:
        ends_ms = self.host.now_ms + self.revocation.lifetimes.draw_ms(self._random(group, life, "lifetime"))
        notice_ms = max(self.host.now_ms, ends_ms - self.revocation.notice_ms)
        self.host.at(notice_ms, partial(self._notice, group, life, ends_ms))

    def _notice(self, group: tuple[str, ...], life: int, ends_ms: int) -> None:
        if not self.goes_on():
            return
        there = self.host.holders(group)
        free_ms, left_mib = self.host.swap_room()
        random, saved = self._random(group, life, "order"), dict[str, frozenset[str]]()
        for name, order in OTHERS.items():
            found = order(there, random)
            saved[name] = saved_in(found, free_ms=free_ms, deadline_ms=ends_ms, host_left_mib=left_mib)
        saved[NO_NOTICE] = frozenset()
        if self.revocation.notice_ms:
            self.host.announce(group, ends_ms)
        self.host.at(ends_ms, partial(self._gone, group, life, there, saved))

    def _gone(
        self, group: tuple[str, ...], life: int, there: Sequence[Holder], saved: dict[str, frozenset[str]]
    ) -> None:
        counted = [one for one in there if not self.host.kernels[one.lease_id].over]
        unsaved, lost_with_host = self.host.take_away(group, whole_host=self.revocation.whole_hosts)
        left = {one.lease_id for one in unsaved}
        saved[OURS] = frozenset(one.lease_id for one in counted if one.lease_id not in left)
        figures = self.figures
        figures.notices += 1
        figures.devices += len(group)
        for one in counted:
            figures.there.add(one)
            for name, loss in figures.unsaved.items():
                if one.lease_id not in saved[name]:
                    loss.add(one)
        known = {one.lease_id for one in counted}
        for one in lost_with_host:
            if one.lease_id not in known:
                figures.saved_before.add(one)
        self.host.at(self.host.now_ms + self.revocation.replace_ms, partial(self._back, group, life))

    def _back(self, group: tuple[str, ...], life: int) -> None:
        self.host.give_back(group)
        self._live(group, life + 1)
