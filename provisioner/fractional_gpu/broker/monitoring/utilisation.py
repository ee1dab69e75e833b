"""Measures how heavily each lease uses its devices while it runs a cell.

Utilisation is averaged over the time since the last sample. If the cell started later than that, the period begins once earlier use can no
longer affect the figure (`settle_us`). The lease must run a single cell throughout. There is no figure for cells waiting for input, work
outside cells, kernels whose messages cannot be read, or processes the device does not list. The figure is summed over the lease's processes
and averaged over its devices. If a device does not report figures per process, or the processes use the MPS server, the device's total is
used, provided that only this lease is computing on it.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.supervision.enforcement import Owner
from fractional_gpu.core.model import LeaseState, LeaseView
from fractional_gpu.gpu.interface import DeviceUse, DeviceUtilisation, GPUError, Monitor, ProcessKind, ProcessUse
from fractional_gpu.host.clock import since_boot_us

log = logging.getLogger(__name__)

_SHORTEST_US = 1_000_000  # the shortest period
_SETTLE_US = 1_000_000  # for a device that has not been read yet
_WHOLE = 1000


_Beginning = tuple[float, float, int]
"""When the cell's message arrived, the last grant was made, and the stay on the device began. No two cells have the same three times."""


@dataclass(frozen=True, slots=True)
class _Cell:
    beginning: _Beginning
    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reading:
    cells: Mapping[str, _Cell]  # by lease
    devices: dict[tuple[str, int], DeviceUtilisation | None] = field(default_factory=dict)


class UtilisationMeter:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._until_us: dict[str, int] = {}  # by device: the end of the last period
        self._settle_us: dict[str, int] = {}

    def begin(self) -> Reading:
        cells = {}
        for kernel, view in self._broker.views():
            beginning = _cell_of(kernel, view)
            if beginning is not None:
                message_s, granted_s, resident_ms = beginning
                now_us = since_boot_us()
                runs_us = int((time.monotonic() - max(message_s, granted_s)) * 1_000_000)
                since_us = now_us - min(runs_us, (now_ms() - resident_ms) * 1000)
                starts = {}
                for device_id in view.device_ids:
                    until_us = self._until_us.get(device_id, 0)
                    settled_us = since_us + self._settle_us.get(device_id, _SETTLE_US)
                    starts[device_id] = until_us if until_us >= since_us else settled_us
                if all(now_us - start_us >= _SHORTEST_US for start_us in starts.values()):
                    cells[kernel.lease_id] = _Cell(beginning, starts)
        return Reading(cells)

    @staticmethod
    def read(monitor: Monitor, reading: Reading) -> None:
        """Read the utilisation of the devices on which cells run. Blocks."""
        for device_id, start_us in {one for cell in reading.cells.values() for one in cell.devices.items()}:
            try:
                reading.devices[device_id, start_us] = monitor.utilisation(device_id, start_us)
            except GPUError as error:  # reading the memory detects a lost device
                log.debug("cannot read the utilisation of device %s: %s", device_id, error)

    def evaluate(
        self, reading: Reading, uses: Mapping[str, DeviceUse | None], owners: Mapping[int, Owner]
    ) -> dict[str, int]:
        """Return the utilisation of each lease whose cell is still running, in thousandths of a device.

        Call this on the loop. All arguments must be from the same sample.
        """
        found: dict[str, int] = {}
        for kernel, view in self._broker.views():
            cell = reading.cells.get(kernel.lease_id)
            if cell is None or _cell_of(kernel, view) != cell.beginning:
                continue
            figures = [
                self._on_device(view, uses.get(device_id), reading.devices.get((device_id, start_us)), owners)
                for device_id, start_us in cell.devices.items()
            ]
            known = [milli for milli in figures if milli is not None]
            if known and len(known) == len(figures):
                found[kernel.lease_id] = max(0, min(_WHOLE, sum(known) // len(known)))
        for (device_id, _), answer in reading.devices.items():
            if answer is not None:
                self._until_us[device_id] = max(answer.until_us, self._until_us.get(device_id, 0))
                self._settle_us[device_id] = answer.settle_us
        return found

    def _on_device(
        self,
        view: LeaseView,
        use: DeviceUse | None,
        answer: DeviceUtilisation | None,
        owners: Mapping[int, Owner],
    ) -> int | None:
        if use is None or answer is None:
            return None
        lease_id = view.spec.lease_id
        mine = [one for one in use.processes if one.pid in owners and owners[one.pid][0] == lease_id]
        if not mine:
            return None
        if answer.by_pid is not None and not any(one.kind is ProcessKind.MPS for one in mine):
            return sum(answer.by_pid.get(one.pid, 0) for one in mine)
        return answer.device_milli if self._is_alone(view, use.device_id, use.processes, owners) else None

    def _is_alone(
        self, view: LeaseView, device_id: str, processes: tuple[ProcessUse, ...], owners: Mapping[int, Owner]
    ) -> bool:
        if any(one.pid not in owners and one.kind is not ProcessKind.GRAPHICS for one in processes):
            return False
        others = (other for _, other in self._broker.views() if other.spec.lease_id != view.spec.lease_id)
        return not any(other.busy and other.reserved_mib and device_id in other.device_ids for other in others)


def _cell_of(kernel: Kernel, view: LeaseView) -> _Beginning | None:
    since_s = kernel.cell.executing_since_s
    if since_s is None or view.state is not LeaseState.RESIDENT or not view.busy or kernel.requests.waiters:
        return None
    return since_s, kernel.cell.granted_s, view.since_ms
