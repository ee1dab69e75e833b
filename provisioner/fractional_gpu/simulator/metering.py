"""Meters a run in virtual time: how much GPU time the leases use and how much power the devices draw.

Each host uses the same meter as the broker (`core.metering.meter`), which reads the arbiter's views without affecting its decisions. A
device draws its idle power plus a part of the difference between peak and idle power, in proportion to its cells' use. With n percent of
noise, each power and each measured use is multiplied by a random factor of at least `_LEAST`, which is normally distributed around 1 with a
standard deviation of n percent. The factors depend only on the seed. The power drawn by swaps is not included.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Event
from fractional_gpu.core.metering.meter import Meter
from fractional_gpu.core.metering.tariffs import SLICE_MS, Tariff
from fractional_gpu.core.metering.usage import FIGURES, HOUR_MS, Usage, UsageRow
from fractional_gpu.simulator.machine import Host

BEGINS_MS = 1_767_571_200_000
"""The wall-clock time at which a simulation begins: Monday, 5 January 2026, 0:00 UTC."""
DAY_MS = 24 * HOUR_MS
_READ_MS = 60_000
_MILLI = 1000
_LEAST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    idle_mw: int = 75_000
    peak_mw: int = 700_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Metering:
    tariffs: Mapping[str, Tariff] = field(default_factory=dict)  # by pool
    power: Power = Power()
    noise_percent: int = 0
    seed: int = 1


class RunMeter:
    def __init__(self, settings: Metering) -> None:
        self.settings = settings
        self.hosts: list[HostMeter] = []
        self.ended_ms = 0
        self._read_ms = 0
        self.rows: list[UsageRow] = []  # after the run

    def begin(self, hosts: Sequence[Host]) -> None:
        self.hosts = [HostMeter(number, host, Meter(), self.settings) for number, host in enumerate(hosts)]

    def advance(self, at_ms: int) -> None:
        while self._read_ms + _READ_MS <= at_ms:
            self._read_ms += _READ_MS
            for host in self.hosts:
                host.read(self._read_ms)

    def finish(self, at_ms: int) -> None:
        self.ended_ms = -(-at_ms // DAY_MS) * DAY_MS
        self.advance(self.ended_ms)
        for host in self.hosts:
            for row in host.meter.take(self.ended_ms, BEGINS_MS + self.ended_ms):
                key = row.key
                if len(self.hosts) > 1 and key.device_id:  # device names are unique per host only
                    key = key._replace(device_id=f"host-{host.number}/{key.device_id}")
                self.rows.append(UsageRow(key, row.party, row.usage))

    def totals(self) -> dict[str, tuple[str, Usage]]:
        found: dict[str, tuple[str, Usage]] = {}
        for row in self.rows:
            found.setdefault(row.party.pool, (row.key.currency, Usage()))[1].add(row.usage)
        return dict(sorted(found.items()))


@dataclass(slots=True)
class _Work:
    milli: int
    mw: int


@dataclass(slots=True)
class _Device:
    idle_mw: int
    at_ms: int = 0
    drawn_uj: int = 0
    work: dict[str, _Work] = field(default_factory=dict)  # by lease
    holders: dict[str, int] = field(default_factory=dict)  # share by lease
    ran_ms: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)  # thousandths times ms


class HostMeter:
    def __init__(self, number: int, host: Host, meter: Meter, settings: Metering) -> None:
        self.number, self.meter = number, meter
        self._settings = settings
        power = settings.power
        self._swing_mw = max(0, power.peak_mw - power.idle_mw)
        self._devices: dict[str, _Device] = {}
        self._held: dict[str, tuple[str, ...]] = {}  # devices by lease
        for pool in host.pools:
            tariff = settings.tariffs.get(pool.name)
            if tariff is not None:
                meter.set_tariff(0, BEGINS_MS, pool.name, tariff)
            for device_id in pool.devices:
                meter.add_device(0, device_id, pool.name)
        for device_id in sorted({device_id for pool in host.pools for device_id in pool.devices}):
            self._devices[device_id] = _Device(power.idle_mw)
            self._set_idle(0, device_id)
            meter.read_energy(0, BEGINS_MS, device_id, counter_mj=0)

    def saw(self, at_ms: int, arbiter: Arbiter, event: Event, effects: Iterable[Effect]) -> None:
        """Tell the meter what the leases affected by an event now hold. Call this after the arbiter has handled the event."""
        named = dict.fromkeys(getattr(effect, "lease_id", None) for effect in effects)
        for lease_id in dict.fromkeys(event.lease_ids) | named:
            if lease_id is not None:
                self._observe(at_ms, arbiter, lease_id)

    def _observe(self, at_ms: int, arbiter: Arbiter, lease_id: str) -> None:
        holding = arbiter.holding(lease_id)
        now: tuple[str, ...] = holding.devices if holding is not None else ()
        milli = holding.milli if holding is not None else 0
        self.meter.set_lease(at_ms, BEGINS_MS + at_ms, lease_id, holding)
        before = self._held.get(lease_id, ())
        for device_id in {*before, *now}:
            device = self._devices[device_id]
            self._advance(device, at_ms)
            if device_id in now:
                device.holders[lease_id] = max(1, milli)
            else:
                device.holders.pop(lease_id, None)
        self._held[lease_id] = now
        if not now:
            del self._held[lease_id]

    def moved(self, at_ms: int, lease_id: str, mib: int) -> None:
        self.meter.moved(BEGINS_MS + at_ms, lease_id, mib)

    def works(self, at_ms: int, device_ids: Iterable[str], used: Mapping[str, tuple[int, int]]) -> None:
        """Record which cells are now running. `used` maps each lease to its cell's number and the cell's use per device, in thousandths."""
        cells = {lease_id: self._work(lease_id, *cell) for lease_id, cell in used.items()}
        for device_id in device_ids:
            device = self._devices[device_id]
            self._advance(device, at_ms)
            device.work = cells

    def _work(self, lease_id: str, cell: int, milli: int) -> _Work:
        factor = self._factor("cell", f"{lease_id}/{cell}")
        return _Work(milli, round(self._swing_mw * milli * factor) // _MILLI)

    def drawn_uj(self, device_id: str) -> int:
        return self._devices[device_id].drawn_uj

    def read(self, at_ms: int) -> None:
        """Read all counters. This is called at every full minute, so no interval between readings crosses an hour boundary."""
        wall = BEGINS_MS + at_ms
        if not wall % HOUR_MS:
            wall -= 1  # the interval that ends now belongs to the past hour
        for device_id, device in self._devices.items():
            self._advance(device, at_ms)
            utilisation = {
                lease_id: self._use(at_ms, device_id, device, lease_id)
                for lease_id in (device.ran_ms.keys() | device.holders.keys())
            }
            quiet = not any(device.used.values())
            counter_mj = device.drawn_uj // _MILLI
            self.meter.read_energy(at_ms, wall, device_id, counter_mj=counter_mj, quiet=quiet, utilisation=utilisation)
            device.ran_ms, device.used = {}, {}
            self._set_idle(at_ms, device_id)

    def _use(self, at_ms: int, device_id: str, device: _Device, lease_id: str) -> int:
        ran_ms = device.ran_ms.get(lease_id, 0)
        if not ran_ms:
            return 0
        factor = self._factor("use", f"{self.number}/{device_id}/{at_ms}/{lease_id}")
        return min(_MILLI, round(device.used[lease_id] * factor) // ran_ms)

    def _set_idle(self, at_ms: int, device_id: str) -> None:
        if self._settings.noise_percent and not at_ms % SLICE_MS:
            factor = self._factor("idle", f"{self.number}/{device_id}/{at_ms}")
            self._devices[device_id].idle_mw = round(self._settings.power.idle_mw * factor)

    def _advance(self, device: _Device, at_ms: int) -> None:
        passed_ms = at_ms - device.at_ms
        if passed_ms <= 0:
            return
        device.at_ms = at_ms
        mw = device.idle_mw
        for lease_id, work in device.work.items():
            mw += work.mw
            device.ran_ms[lease_id] = device.ran_ms.get(lease_id, 0) + passed_ms
            device.used[lease_id] = device.used.get(lease_id, 0) + work.milli * passed_ms
        device.drawn_uj += mw * passed_ms

    def _factor(self, what: str, which: str) -> float:
        percent = self._settings.noise_percent
        if not percent:
            return 1.0
        rng = random.Random(f"{self._settings.seed}/{what}/{which}")  # noqa: S311 - a workload, not a secret
        return max(_LEAST, rng.gauss(1.0, percent / 100))


_FORMAT, _VERSION = "jupyter-gpu-usage", 1


def write_usage(path: Path, meter: RunMeter, hosts: Sequence[Host]) -> None:
    """Write the rows of a finished run, omitting zero figures. Identical runs produce byte-for-byte identical files. Raises OSError."""
    pools: dict[str, dict[str, Any]] = {}
    for number, host in enumerate(hosts):
        prefix = f"host-{number}/" if len(hosts) > 1 else ""
        for pool in host.pools:
            tariff = asdict(meter.settings.tariffs.get(pool.name, Tariff()))
            known = pools.setdefault(pool.name, {"devices": [], "tariff": tariff})
            known["devices"] += [prefix + device_id for device_id in pool.devices]
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "begins_s": BEGINS_MS // 1000,
        "ends_s": (BEGINS_MS + meter.ended_ms) // 1000,
        "pools": pools,
    }
    rows = []
    for row in meter.rows:
        figures = {name: value for name in FIGURES if (value := getattr(row.usage, name))}
        rows.append(json.dumps({"key": row.key._asdict(), "party": asdict(row.party), "figures": figures}))
    lines = ",\n".join(rows)
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
