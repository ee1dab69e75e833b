"""What a run comes to, kept up to date moment by moment: GPU time, devices that somebody holds, memory counted a second time.

Memory is counted from what kernels hold, not from what they reserve, so that `out_of_memory` is what a real driver would have refused.
"""

from collections.abc import Iterable, Sequence

from provisioner.core.model import DeviceSpec
from provisioner.simulator.result import Point, Result
from provisioner.simulator.traces import Session

__all__ = ["Accounts", "begin_result"]


def begin_result(name: str, trace: Sequence[Session], devices: int) -> Result:
    """Return a result with what is known before anything has run."""
    return Result(
        name=name,
        sessions=len(trace),
        cells=sum(len(session.cells) for session in trace),
        gpu_cells=sum(cell.gpus > 0 for session in trace for cell in session.cells),
        devices=devices,
        reserved=sum(session.gpus * (session.close_ms - session.open_ms) * 1000 for session in trace),
    )


class Accounts:
    """The books of one run. `running_gpus` and `waiting` are kept by the run."""

    def __init__(self, result: Result, devices: Iterable[DeviceSpec]) -> None:
        self.result = result
        self.running_gpus = self.waiting = 0
        self._sizes = {device.device_id: device.memory_mib for device in devices}
        self._used = dict.fromkeys(self._sizes, 0)
        self._holders = dict.fromkeys(self._sizes, 0)
        self._devices_held = self._accounted_ms = self._host_mib = 0

    def advance(self, now_ms: int) -> None:
        """Account for the time up to now: nothing has changed since the last call."""
        passed = now_ms - self._accounted_ms
        if passed <= 0:
            return
        result, timeline = self.result, self.result.timeline
        result.busy += self.running_gpus * passed * 1000
        result.held += self._devices_held * passed * 1000
        result.peak_devices_held = max(result.peak_devices_held, self._devices_held)
        now = (self._devices_held, self.running_gpus, self.waiting)
        if not timeline or (timeline[-1].devices_held, timeline[-1].busy, timeline[-1].waiting) != now:
            timeline.append(Point(self._accounted_ms, *now))
        self._accounted_ms = now_ms

    def finish(self) -> None:
        """Close the timeline at its end."""
        self.result.timeline.append(Point(self._accounted_ms, self._devices_held, self.running_gpus, self.waiting))

    def hold(self, device_ids: Iterable[str]) -> None:
        """Somebody has a reservation on the devices from now on."""
        for device_id in device_ids:
            self._devices_held += self._holders[device_id] == 0
            self._holders[device_id] += 1

    def let_go(self, device_ids: Iterable[str]) -> None:
        """Somebody gives them back."""
        for device_id in device_ids:
            self._holders[device_id] -= 1
            self._devices_held -= self._holders[device_id] == 0

    def use(self, device_ids: Iterable[str], mib: int) -> None:
        """A kernel takes so much more of each device; negative: gives it back."""
        for device_id in device_ids:
            self._used[device_id] += mib
            if mib > 0 and self._used[device_id] > self._sizes[device_id]:
                self.result.out_of_memory += 1

    def save(self, mib: int) -> None:
        """So much was moved to the host; negative: back to devices."""
        self.drop_saved(-mib)
        self.result.moved_mib += abs(mib)

    def drop_saved(self, mib: int) -> None:
        """So much of the host's memory is free again."""
        self._host_mib -= mib
        self.result.host_peak_mib = max(self.result.host_peak_mib, self._host_mib)
