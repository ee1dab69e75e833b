"""A simulated host in virtual time."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import DeviceSensors
from fractional_gpu.gpu.simulated import load as load_module
from fractional_gpu.gpu.simulated import monitor as monitor_module
from fractional_gpu.gpu.simulated.load import Load, Piece, used_milli
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.processes import WORK, find_process, forget
from fractional_gpu.gpu.simulated.store import Store

MS = 1_000_000
SECOND = 1000 * MS
_NO_PID = 5_000_000  # Linux gives no process such a pid


class Machine:
    """A host whose clock the test sets, with processes that work when the test decides."""

    monitor: SimulatedMonitor

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ns = 1000 * SECOND
        self.devices = [device.device_id for device in store.devices()]
        self.loads: dict[str, Load] = {}
        self.killed: list[Load] = []
        self.pids: dict[str, int] = {}

    def clock(self) -> int:
        return self.now_ns

    def process(self, key: str, device: int = 0) -> Load:
        """Begin a process; its lease has the same name."""
        with self.store.transaction() as db:
            row = (key, self.pids.setdefault(key, _NO_PID + len(self.pids)), key, self.devices[device], 0)
            db.execute(
                "INSERT INTO processes (key, pid, lease, device, phase, bytes) VALUES (?, ?, ?, ?, 'device', ?)", row
            )
        folder = self.store.process_folder(key)
        folder.mkdir()
        (folder / WORK).touch()
        self.loads[key] = Load(self.store, key)
        return self.loads[key]

    def works(self, key: str, milli: int, seconds: float = 600, device: int = 0) -> Piece:
        """Begin a piece of work of a new process."""
        return self.process(key, device).begin(seconds, milli, self.devices[device])

    def passes(self, ms: int, *, step_ms: int = 50) -> None:
        """Let time pass; processes share their devices again at every step, as they do in `launch`."""
        for _ in range(ms // step_ms):
            self.now_ns += step_ms * MS
            for key, load in self.loads.items():
                process = find_process(self.store, key)
                assert process is not None
                load.share_again(process.device)

    def kill(self, key: str) -> None:
        """Kill a process. Nothing has noticed that it is dead."""
        self.killed.append(self.loads.pop(key))

    def end(self, key: str) -> None:
        """End a process in order."""
        self.loads.pop(key).close()
        forget(self.store, [key])

    def move(self, key: str, device: int) -> None:
        """Bring a process that does no work back on another device, as the end of a restore does."""
        with self.store.transaction() as db:
            db.execute("UPDATE processes SET device=? WHERE key=?", (self.devices[device], key))

    def sensors(self, device: int = 0) -> DeviceSensors:
        """Return what the monitor reads that was opened with the machine."""
        return self.monitor.sensors(self.devices[device])

    def counter(self, device: int = 0) -> int:
        """Return what the energy counter says, mJ."""
        energy_mj = self.sensors(device).energy_mj
        assert energy_mj is not None
        return energy_mj

    def used_milli(self, key: str, last_ms: int) -> int:
        """What a process used in the last milliseconds."""
        process = find_process(self.store, key)
        assert process is not None
        return used_milli(self.store, process, self.now_ns - last_ms * MS, self.now_ns)


@contextmanager
def virtual(directory: Path) -> Iterator[Machine]:
    """Let the host's clock be the test's."""
    with closing(Store(directory)) as store, pytest.MonkeyPatch.context() as patch:
        made = Machine(store)
        patch.setattr(load_module, "since_boot_ns", made.clock)
        patch.setattr(monitor_module, "since_boot_us", lambda: made.now_ns // 1000)
        made.monitor = SimulatedMonitor(directory)
        yield made
        made.monitor.close()
        for load in [*made.loads.values(), *made.killed]:
            load.close()
