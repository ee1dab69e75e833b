"""Feeds lease events and device energy to the meter, and writes its figures to the ledger every minute.

- A broker that is killed loses at most the last minute of figures, or the last ten minutes if there are no leases.
- The next broker charges the time since the last write to the leases that are still alive, as if they had been idle and in their current
  state throughout. A lease that ended in the meantime is counted only up to the last write. The energy used in that time is read from the
  devices' own counters and divided among the surviving leases.
- Nothing is counted between the last write before a reboot and the start of the first broker after it, because no kernel survives a reboot.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from fractional_gpu.broker.clock import CLOCKS, Clocks
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect, Granted, LeaseEnded, StateChanged
from fractional_gpu.core.events import BusyChanged, Event, Expected, LeaseRecovered, Wanted
from fractional_gpu.core.metering.meter import Meter
from fractional_gpu.core.metering.tariffs import SLICE_MS, LocalTime, Tariff
from fractional_gpu.core.metering.turns import TurnRecorder
from fractional_gpu.core.metering.usage import UsageRow
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import DeviceSensors
from fractional_gpu.host.process import boot_id
from fractional_gpu.ledger.ledger import METER, Ledger

log = logging.getLogger(__name__)

_WRITE_S: Final = 60.0
_LEAST_TURN_MS: Final = 100
_REST_WRITES: Final = 10  # without leases, only one in this many writes takes place
_MOVED = {
    (LeaseState.SUSPENDING, LeaseState.SUSPENDED),
    (LeaseState.RESUMING, LeaseState.RESIDENT),
}


def local_time(number: int) -> LocalTime:
    """Convert quarter hours since 1970 to the machine's local time."""
    at_s = number * SLICE_MS // 1000
    local = time.localtime(at_s)
    minute = (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min
    return LocalTime(at_s - local.tm_min * 60 - local.tm_sec, minute)


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker's meter saves for the next broker: energy in mJ, power in mW, and the time of the last write in ms since boot."""

    boot_id: str = ""
    written_ms: int = 0
    counters: dict[str, int] = {}
    idle_mw: dict[str, int] = {}


class Metering:
    """One broker's meter, for use on its event loop. `kernels` maps lease ids to live kernels."""

    def __init__(
        self, arbiter: Arbiter, writer: LedgerWriter, kernels: Mapping[str, Kernel], clocks: Clocks = CLOCKS
    ) -> None:
        self.meter = Meter(local_time)
        self._arbiter = arbiter
        self._writer = writer
        self._kernels = kernels
        self._clocks = clocks
        self._began_ms = self._clocks.now()
        self._boot_id = boot_id()  # read now, because the broker may be out of descriptors later
        self._saved_mib: dict[str, int] = {}  # by suspended lease
        self._writes = 0
        self.followers: list[Callable[[Sequence[UsageRow]], None]] = []  # called with the figures of each write

    def begin(self, ledger: Ledger, tariffs: Mapping[str, Tariff]) -> None:
        """Start counting from the previous broker's last write. The arbiter must already know the devices and pools. Raises LedgerError."""
        state = ledger.kept_as(METER, _State, _State())
        same_boot = state.boot_id == self._boot_id
        if same_boot:
            self._began_ms -= max(0, self._clocks.boot() - state.written_ms)
        for view in self._arbiter.devices():
            idle_mw = state.idle_mw.get(view.device_id)
            counter_mj = state.counters.get(view.device_id) if same_boot else None
            self.meter.add_device(
                self._began_ms, view.device_id, view.pool or "", idle_mw=idle_mw, counter_mj=counter_mj
            )
        for pool, tariff in tariffs.items():
            self.set_tariff(pool, tariff)

    def set_tariff(self, pool: str, tariff: Tariff) -> None:
        self.meter.set_tariff(self._clocks.now(), self._clocks.wall(), pool, tariff)

    def saw(self, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, LeaseRecovered):
            self._recovered(event.spec.lease_id)
        touched = set() if isinstance(event, Expected) else set(event.lease_ids)
        for effect in effects:
            if isinstance(effect, StateChanged | LeaseEnded | Granted):
                touched.add(effect.lease_id)
            if isinstance(effect, StateChanged) and (effect.old, effect.new) in _MOVED:
                self._moved(effect)
        for lease_id in touched:
            self._observe(lease_id, self._clocks.now())

    def read_energy(self, sensors: Mapping[str, DeviceSensors], utilisation: Mapping[str, int]) -> None:
        """Divide the energy used since the last sample among the leases.

        For leases that were busy too briefly to be in `utilisation`, the learned utilisation is used.
        """
        at_ms, wall_ms = self._clocks.now(), self._clocks.wall()
        learnt = {view.spec.lease_id: view.demand_milli for view in self._arbiter.leases() if view.demand_milli}
        work = learnt | dict(utilisation)
        for device_id, one in sensors.items():
            self.meter.read_energy(
                at_ms,
                wall_ms,
                device_id,
                counter_mj=one.energy_mj,
                power_mw=one.power_mw,
                quiet=not one.busy_percent,
                utilisation=work,
            )

    def _observe(self, lease_id: str, at_ms: int, *, busy: bool | None = None) -> None:
        holding = self._arbiter.holding(lease_id)
        if holding is not None and busy is not None:
            holding = replace(holding, busy=busy)
        wall_ms = self._clocks.wall() - (self._clocks.now() - at_ms)
        self.meter.set_lease(at_ms, wall_ms, lease_id, holding)
        if holding is None or not holding.host_mib:
            self._saved_mib.pop(lease_id, None)
        else:
            self._saved_mib[lease_id] = holding.host_mib

    def _recovered(self, lease_id: str) -> None:
        """Count a lease from an earlier broker. Start from that broker's last write or the lease's creation, whichever is later."""
        if lease_id in self._kernels and not self.meter.knows(lease_id):
            age_ms = max(0, self._clocks.wall() - self._kernels[lease_id].created_ms)
            self._observe(lease_id, max(self._began_ms, self._clocks.now() - age_ms), busy=False)
            self._observe(lease_id, self._clocks.now())

    def _moved(self, change: StateChanged) -> None:
        view = self._arbiter.lease(change.lease_id)
        before_mib = self._saved_mib.get(change.lease_id, 0)
        mib = before_mib if change.new is LeaseState.RESIDENT else view.saved_mib if view is not None else 0
        self.meter.moved(self._clocks.wall(), change.lease_id, mib)

    def uncollected(self) -> Iterable[UsageRow]:
        """Return the figures collected since the last write. Consume them immediately, because they keep changing."""
        return self.meter.rows(self._clocks.now(), self._clocks.wall())

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(_WRITE_S)
                self._writes += 1
                if self._kernels or not self._writes % _REST_WRITES:
                    self.write()
        finally:
            self.write()

    def write(self) -> asyncio.Future[None]:
        """Write the figures collected since the last write. The returned future completes once they are on disk."""
        fresh = self.meter.take(self._clocks.now(), self._clocks.wall())
        for follower in self.followers:
            follower(fresh)
        state = _State(
            boot_id=self._boot_id,
            written_ms=self._clocks.boot(),
            counters=self.meter.counters(),
            idle_mw=self.meter.idle_draws(),
        )
        add = partial(self._writer.ledger.add_metered, fresh, msgspec.json.encode(state).decode())
        return self._writer.submit(add, again=True)


class Turns:
    """Records leases' turns (when they waited for a GPU and when they used it) for `jupyter gpu simulate --from-ledger`.

    Turns that took less than `_LEAST_TURN_MS`, wait included, are left out.
    """

    def __init__(self, arbiter: Arbiter, writer: LedgerWriter, clocks: Clocks = CLOCKS) -> None:
        self._recorder = TurnRecorder()
        self._arbiter = arbiter
        self._writer = writer
        self._clocks = clocks

    def saw(self, event: Event, effects: Sequence[Effect]) -> None:
        touched = {one.lease_id for one in effects if isinstance(one, StateChanged | LeaseEnded | Granted)}
        for lease_id in touched.union(event.lease_ids):
            view = self._arbiter.lease(lease_id)
            holding = self._arbiter.holding(lease_id)
            use, busy = (view.demand_milli, view.busy) if view is not None else (0, False)
            asks = lease_id in event.lease_ids and (
                isinstance(event, Wanted) or (isinstance(event, BusyChanged) and event.busy)
            )
            waits = busy or self._arbiter.waits(lease_id)
            self._recorder.saw(event.at_ms, lease_id, holding, asks=asks, busy=waits, use_milli=use)

    def write(self) -> None:
        shift = self._clocks.wall() - self._clocks.now()  # from the arbiter's clock to wall time
        fresh, self._recorder.turns = self._recorder.turns, []
        rows = [
            replace(one, asked_ms=one.asked_ms + shift, begun_ms=one.begun_ms + shift, ended_ms=one.ended_ms + shift)
            for one in fresh
            if one.ended_ms - one.asked_ms >= _LEAST_TURN_MS
        ]
        if rows:
            self._writer.submit(partial(self._writer.ledger.add_turns, rows), again=True)
