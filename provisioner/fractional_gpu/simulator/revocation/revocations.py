"""Devices, or whole hosts, leave a simulated run after lifetimes of transient servers, with a notice, and are replaced.

- Each device (or each host with all of its devices) lives for a time that is drawn for it. So long before its end the notice comes: the
  arbiter drains the devices by that deadline. At the end their memory is gone. After some time a new device takes the place of each, with a
  lifetime of its own. Draws depend on the seed, the host and the device alone, so that every run has the same.
- A kernel that is not saved by then has lost its process: a cell that ran has failed, the person goes on with the next one, in a new
  process. What is lost counts as work (GPU time of its cells since the process began); no one does it again.
- The run goes on as the arbiter decides. What the other orders would have saved is worked out for each notice from the kernels that were
  there then, with the same times (`orders`). Kernels whose notebook was closed before the end count for none of them.
- Where whole hosts leave, all that is in their memory is lost with them, in every order. What an order has brought into host memory by
  then is what a snapshot of the host, or its hibernation, would keep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from fractional_gpu.simulator.revocation.lifetimes import START_MS, Lifetimes
from fractional_gpu.simulator.revocation.orders import NO_NOTICE, OTHERS, OURS, Holder, saved_in

if TYPE_CHECKING:
    from fractional_gpu.simulator.one_host import HostRun

_HOUR_MS = 3_600_000
NOTICE_MS = 30_000
"""Google's notice, and by far not the longest one: AWS gives two minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """What leaves, after which lifetimes, how long before its end that is known, and how long its replacement takes, ms."""

    lifetimes: Lifetimes
    whole_hosts: bool = False
    notice_ms: int = NOTICE_MS
    replace_ms: int = START_MS
    seed: int = 1


@dataclass(slots=True)
class Loss:
    """What was not saved."""

    kernels: int = 0
    mib: int = 0
    work: int = 0
    value: int = 0

    def add(self, one: Holder) -> None:
        """Count a kernel."""
        self.kernels += 1
        self.mib += one.mib
        self.work += one.work
        self.value += one.value

    def as_json(self, there: "Loss") -> dict[str, object]:
        """Return the figures, with their share of what was there."""
        return {
            "kernels": self.kernels,
            "gib": round(self.mib / 1024, 3),
            "busy_gpu_hours": round(self.work / _HOUR_MS, 3),
            "value_percent": round(100 * self.value / there.value, 2) if there.value else 0.0,
        }


@dataclass(slots=True)
class RevocationFigures:
    """What left, what was there, and what each order would not have saved by the deadlines."""

    whole_hosts: bool = False
    notices: int = 0
    devices: int = 0
    there: Loss = field(default_factory=Loss)
    unsaved: dict[str, Loss] = field(default_factory=lambda: {name: Loss() for name in (OURS, *OTHERS, NO_NOTICE)})
    saved_before: Loss = field(default_factory=Loss)  # suspended already, and lost with the host

    def as_json(self) -> dict[str, object]:
        """Return what `--json` prints under `revocation`."""
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


class HostRevocations:
    """Takes the devices of one host away, one by one or all at once, for as long as `goes_on` says."""

    def __init__(
        self,
        revocation: Revocation,
        number: int,
        host: "HostRun",
        figures: RevocationFigures,
        goes_on: Callable[[], bool],
    ) -> None:
        self._revocation, self._number, self._host = revocation, number, host
        self._figures, self._goes_on = figures, goes_on
        self._groups = [tuple(host.devices)] if revocation.whole_hosts else [(device_id,) for device_id in host.devices]

    def begin(self) -> None:
        """Let all devices begin their lives now."""
        for group in self._groups:
            self._live(group, 0)

    def _random(self, group: tuple[str, ...], life: int, what: str) -> Random:
        return Random(f"{self._revocation.seed}/{what}/{self._number}/{group[0]}/{life}")  # noqa: S311 - a workload

    def _live(self, group: tuple[str, ...], life: int) -> None:
        ends_ms = self._host.now_ms + self._revocation.lifetimes.draw_ms(self._random(group, life, "lifetime"))
        notice_ms = max(self._host.now_ms, ends_ms - self._revocation.notice_ms)
        self._host.at(notice_ms, partial(self._notice, group, life, ends_ms))

    def _notice(self, group: tuple[str, ...], life: int, ends_ms: int) -> None:
        if not self._goes_on():
            return
        there = self._host.holders(group)
        free_ms, left_mib = self._host.swap_room()
        random, saved = self._random(group, life, "order"), dict[str, frozenset[str]]()
        for name, order in OTHERS.items():
            found = order(there, random)
            saved[name] = saved_in(found, free_ms=free_ms, deadline_ms=ends_ms, host_left_mib=left_mib)
        saved[NO_NOTICE] = frozenset()
        if self._revocation.notice_ms:
            self._host.announce(group, ends_ms)
        self._host.at(ends_ms, partial(self._gone, group, life, there, saved))

    def _gone(
        self, group: tuple[str, ...], life: int, there: Sequence[Holder], saved: dict[str, frozenset[str]]
    ) -> None:
        counted = [one for one in there if not self._host.kernels[one.lease_id].over]
        unsaved, lost_with_host = self._host.take_away(group, whole_host=self._revocation.whole_hosts)
        left = {one.lease_id for one in unsaved}
        saved[OURS] = frozenset(one.lease_id for one in counted if one.lease_id not in left)
        figures = self._figures
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
        self._host.at(self._host.now_ms + self._revocation.replace_ms, partial(self._back, group, life))

    def _back(self, group: tuple[str, ...], life: int) -> None:
        self._host.give_back(group)
        self._live(group, life + 1)
