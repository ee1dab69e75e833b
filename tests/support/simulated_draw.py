"""A meter of a simulated run that also adds up what each lease's cells have really drawn, which no meter knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fractional_gpu.core.metering.meter import Meter
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering import DAY_MS, HostMeter, Metering, RunMeter, _Device


@dataclass(slots=True)
class Draw:
    """What was really drawn, in nJ, by day (counted from 0) and lease; the pool's part under an empty name.

    The idle draw belongs to no lease, so it is divided in two ways: among leases that hold the device, by their shares, and evenly among
    leases whose cells run there.
    """

    work: dict[tuple[int, str], int] = field(default_factory=dict)
    idle_by_share: dict[tuple[int, str], int] = field(default_factory=dict)
    idle_by_work: dict[tuple[int, str], int] = field(default_factory=dict)


class TruthfulMeter(RunMeter):
    """Meters one run and keeps the truth. `make` creates each host's meter."""

    def __init__(self, settings: Metering, make: Callable[[], Meter] = Meter) -> None:
        super().__init__(settings)
        self.truth, self._make = Draw(), make

    def begin(self, hosts: Sequence[Host]) -> None:
        self.hosts = [
            _TruthfulHost(number, host, self._make(), self.settings, self.truth) for number, host in enumerate(hosts)
        ]


class _TruthfulHost(HostMeter):
    def __init__(self, number: int, host: Host, meter: Meter, settings: Metering, truth: Draw) -> None:
        self._truth = truth
        super().__init__(number, host, meter, settings)

    def _advance(self, device: _Device, at_ms: int) -> None:
        began_ms = device.at_ms
        super()._advance(device, at_ms)
        if at_ms > began_ms:
            _keep(self._truth, began_ms // DAY_MS, device, at_ms - began_ms)


def _keep(truth: Draw, day: int, device: _Device, passed_ms: int) -> None:
    """Add what was drawn in a time in which nothing changed; a time within a day, because counters are read at its end."""
    for lease_id, work in device.work.items():
        _add(truth.work, (day, lease_id), work.mw * passed_ms * 1000)
    idle_nj = device.idle_mw * passed_ms * 1000
    for weights, into in (
        (device.holders, truth.idle_by_share),
        (dict.fromkeys(device.work, 1), truth.idle_by_work),
    ):
        whole = sum(weights.values())
        for lease_id, weight in weights.items():
            _add(into, (day, lease_id), idle_nj * weight // whole)
        if not whole:
            _add(into, (day, ""), idle_nj)


def _add(into: dict[tuple[int, str], int], key: tuple[int, str], value: int) -> None:
    into[key] = into.get(key, 0) + value
