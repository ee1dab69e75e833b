"""One step: tenants are started on one device, work side by side for a while, and are ended; what they did in that time is the sample."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.measuring.study import Sample
from fractional_gpu.commands.measuring.tenants import Tenant, disturbance, others_mib, others_work
from fractional_gpu.commands.measuring.ticks import Tick, overlap, pace, read_ticks, units_between
from fractional_gpu.commands.terminal.errors import CommandError
from fractional_gpu.protocol.limits import MAX_LAST_MS
from fractional_gpu.protocol.status import DeviceStatus, HostStatus

ENOUGH_UNITS: Final = 12  # reports of all measured tenants, of which each has
LEAST_UNITS: Final = 4  # at least, and the shortest time of a step
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 10.0  # a step in which tenants have worked together for so long needs only one unit of each
_LOOK_S: Final = 0.05
_STATUS_S: Final = 0.5
_LEAST_LAST_MS: Final = 1000
_CHANGE_PARTS: Final = 100  # what others have may change by so small a part of the device: a desktop redraws itself


class DisturbedError(CommandError):
    """Something else used the device, or waited for it, so the step says nothing."""


class TooSlowError(CommandError):
    """The step's time was over before there was a unit of work to measure."""


class SilentError(CommandError):
    """The program ended successfully and reported nothing: its whole run is the unit of work."""


@dataclass(slots=True)
class Step:
    """Tenants that have their places, of which the first `measured` ones count. One use."""

    client: BrokerClient
    pool: str
    tenants: Sequence[Tenant]
    measured: int
    limit_s: float  # by `time.monotonic`
    long_s: float = LONGEST_S
    bystander: str = ""  # the lease of the kernel whose cell measures
    _looks: list[tuple[int, DeviceStatus]] = field(default_factory=list)
    _memory_mib: int = 0
    _others_mib: int | None = None
    _using_ns: dict[str, int] = field(default_factory=dict)  # since when each lease is seen to use the device
    _looked_s: float = 0.0
    _is_company_unknown: bool = False

    def run(self) -> Sample:
        """Run the step.

        Raises TenantError if a program fails, SilentError, DisturbedError, TooSlowError, TickError, and the errors of the protocol.
        """
        if why := self._look(fresh=False):  # the places were found by a fresh sample
            raise DisturbedError(why)
        for tenant in self.tenants:
            tenant.go()
        while not (is_over := self._is_over()) and not self._is_enough() and time.monotonic() < self.limit_s:
            if time.monotonic() - self._looked_s >= _STATUS_S:
                self._look_beside_programs()
            time.sleep(_LOOK_S)
        if not is_over:
            self._look_beside_programs()
        return self._sample(is_over=self._is_over())

    def _is_over(self) -> bool:
        """Whether a program has ended well. Raises TenantError if one has failed."""
        return any(self._has_ended(tenant) for tenant in self.tenants)

    def _has_ended(self, tenant: Tenant) -> bool:
        if tenant.running is None or not tenant.running.has_ended():
            return False
        if tenant.running.end(0):
            raise tenant.failure()
        return True

    def _look_beside_programs(self) -> None:
        """Raise DisturbedError for what is not of the tenants' own: a program that has just ended has left its lease's state behind."""
        if (why := self._look()) and not self._is_over():
            raise DisturbedError(why)

    def _ticks(self) -> list[list[Tick]]:
        return [read_ticks(tenant.ticks) for tenant in self.tenants[: self.measured]]

    def _span(self, ticks: Sequence[Sequence[Tick]]) -> tuple[int, int] | None:
        """Return when all tenants work, ns; None if one of them has not begun."""
        others = [self._using_ns.get(one.lease.lease_id) for one in self.tenants[self.measured :]]
        begun = [one for one in others if one is not None]
        if not all(ticks) or len(begun) < len(others):
            return None
        since_ns, until_ns = overlap(ticks)
        return max([since_ns, *begun]), until_ns

    def _is_enough(self) -> bool:
        ticks = self._ticks()
        span = self._span(ticks)
        if span is None:
            return False
        seconds = (span[1] - span[0]) / 1e9
        least = 1 if seconds >= self.long_s else max(LEAST_UNITS, -(-ENOUGH_UNITS // self.measured))
        inside = (sum(span[0] <= one.at_ns <= span[1] for one in each) for each in ticks)
        return seconds >= SHORTEST_S and min(inside) > least

    def _look(self, *, fresh: bool = True) -> str:
        """Note what the broker says of the device now; return what disturbs the tenants there, a sentence, or nothing."""
        status = self.client.status(fresh=fresh)
        seen_ns, device_id = time.monotonic_ns(), self.tenants[0].device_id
        if why := disturbance(status, self.tenants, device_id, self.pool) or self._others_work(status, device_id):
            return why
        mib = others_mib(status, self.tenants, device_id)
        device = next(one for one in status.devices if one.device_id == device_id)
        if self._others_mib is not None and abs(mib - self._others_mib) > device.memory_mib // _CHANGE_PARTS:
            return "others on the device came, went or changed"
        self._others_mib = mib
        self._looks.append((seen_ns, device))
        measured = {one.lease.lease_id for one in self.tenants[: self.measured]}
        for lease in status.leases:
            if lease.lease_id in measured:
                self._memory_mib = max(self._memory_mib, lease.lease.used_mib)
            if lease.lease.used_mib:
                self._using_ns.setdefault(lease.lease_id, seen_ns)
        return ""

    def _others_work(self, status: HostStatus, device_id: str) -> str:
        """Return who else has worked on the device since the last look, for a second at least; empty: nothing that is known."""
        now_s = time.monotonic()
        last_ms = min(MAX_LAST_MS, max(_LEAST_LAST_MS, round((now_s - self._looked_s) * 1000)))
        self._looked_s = now_s
        lease_id, *beside = (one.lease.lease_id for one in self.tenants)
        used_milli = self.client.others(lease_id, last_ms, beside).used_milli
        busy = 0
        if used_milli is None:  # what the device does not count, the leases' cells must say
            busy = sum(one.busy for one in self.client.lease(lease_id).neighbours)
            self._is_company_unknown |= others_mib(status, self.tenants, device_id) > 0
        return others_work(status, self.tenants, device_id, used_milli, busy, bystander=self.bystander)

    def _sample(self, *, is_over: bool) -> Sample:
        ticks = self._ticks()
        if is_over and not all(ticks):
            raise SilentError("the program ended and reported no unit of work")
        span = self._span(ticks)
        paces = [pace(each, *span) for each in ticks] if span is not None else []
        known = [one for one in paces if one is not None]
        if len(known) < self.measured:
            if self.measured < len(self.tenants) and span is None and all(ticks):
                raise TooSlowError("a program beside it did not use the device in the time of a step")
            what = "ended" if is_over else "had reported too little when the step's time was over"
            raise TooSlowError(f"a program {what} before two units of work were done beside the others")
        cost = self.tenants[0].cost()
        busy = [one.busy_percent for at_ns, one in self._looks if span and at_ns >= span[0]]
        percents = [one for one in busy if one is not None]
        return Sample(
            unit_s=self.measured / sum(1 / one.unit_s for one in known),
            latencies_s=[time_s for one in known for time_s in one.latencies_s],
            measured=self.measured,
            memory_mib=self._memory_mib or None,
            busy_percent=sum(percents) / len(percents) if percents else None,
            unit_mj=self._unit_mj(ticks, span[0] if span else 0),
            hour_milli=cost.now_milli,
            currency=cost.currency,
            is_company_unknown=self._is_company_unknown,
        )

    def _unit_mj(self, ticks: Sequence[Sequence[Tick]], since_ns: int) -> float | None:
        """Return the device's energy between the first and the last look within the span, for each unit; None where it is unknown."""
        inside = [(at_ns, one.energy_mj) for at_ns, one in self._looks if at_ns >= since_ns]
        if len(inside) < 2:
            return None
        (from_ns, before_mj), (to_ns, after_mj) = inside[0], inside[-1]
        units = sum(units_between(each, from_ns, to_ns) for each in ticks)
        if before_mj is None or after_mj is None or not units:
            return None
        return (after_mj - before_mj) / units
