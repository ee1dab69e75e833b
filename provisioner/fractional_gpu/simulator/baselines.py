"""What users do without this project, on the same trace, for comparison.

- `reservation`: a session takes its whole GPUs when it opens, and keeps them until it closes; if none are free it waits at the door.
- `cull`: the same, and a kernel that ran nothing for an hour is shut down: its variables are lost, its GPUs are free, and its next
  cell waits for GPUs as a new kernel would.
- `time-slice`: all sessions share all devices without limits. None waits; a cell that needs memory that its neighbours have taken fails,
  and busy neighbours slow each other down as in `machine`.

A wait at the door, and the wait of a culled kernel for GPUs, delay everything of the session that comes after.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.felt import Felt
from fractional_gpu.simulator.machine import UNSHARED, Running, SharedDevice
from fractional_gpu.simulator.result import Point, Result, begin_result
from fractional_gpu.simulator.traces import Session

BASELINES = ("reservation", "cull", "time-slice")
WAITING = frozenset({"reservation", "cull"})  # those in which more devices mean shorter waits
CULL_AFTER_MS = 3_600_000


def run_baseline(name: str, trace: Sequence[Session], device_mib: Sequence[int], *, slowdown: bool) -> Result:
    """Run one of `BASELINES` on devices of these sizes, MiB. Raises SimulationError for a name or a session that cannot be served."""
    if name == "time-slice":
        return _TimeSlice(name, trace, device_mib, slowdown=slowdown).result()
    if name in BASELINES:
        return _Whole(name, trace, device_mib, CULL_AFTER_MS if name == "cull" else None).result()
    raise SimulationError(f"there is no baseline {name!r}; allowed: {', '.join(BASELINES)}")


@dataclass(slots=True, eq=False)
class _Kernel:
    session: Session
    next_cell: int = 0
    held_gpus: int = 0
    asked_ms: int = 0  # when it began to wait for GPUs, or when its cell was asked for
    door_ms: int = 0  # waited at the door, and not yet counted in the lateness of a cell
    wait_ms: int = 0  # waited for GPUs since, and not yet counted as the wait of a cell
    visit: int = 0  # grows whenever the kernel does something: an older plan to cull it is void
    device: int = -1
    memory_mib: int = 0


class _Base:
    """Virtual time and the books that all baselines keep."""

    def __init__(self, name: str, trace: Sequence[Session], device_mib: Sequence[int]) -> None:
        self._moments: list[tuple[int, int, Callable[[], None]]] = []
        self._now_ms = self._order = self._accounted_ms = self._busy = self._waiting = 0
        self._felt = Felt()
        self._closed_ms = 0
        self._kernels = [_Kernel(session) for session in trace]
        self.figures = begin_result(name, trace, len(device_mib))

    def result(self) -> Result:
        """Run to the end."""
        for kernel in self._kernels:
            self._at(kernel.session.open_ms, partial(self._open, kernel))
        while self._moments:
            at_ms, _, act = heappop(self._moments)
            passed, held = at_ms - self._accounted_ms, self._held()
            if passed:
                self.figures.timeline.append(Point(self._accounted_ms, held, self._busy, self._waiting))
                self.figures.held += held * passed * 1000
                self.figures.busy += self._busy * passed * 1000
                self.figures.peak_devices_held = max(self.figures.peak_devices_held, held)
            self._accounted_ms = self._now_ms = at_ms
            act()
        self.figures.feel(self._felt)
        opened = (kernel.session.open_ms for kernel in self._kernels)
        self.figures.own(min(opened, default=0), self._closed_ms)
        return self.figures

    def _at(self, at_ms: int, act: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._moments, (max(self._now_ms, at_ms), self._order, act))

    def _think(self, kernel: _Kernel, act: Callable[[], None]) -> None:
        """Schedule the next step as long after the last one as in the trace."""
        cells, at = kernel.session.cells, kernel.next_cell
        before = cells[at - 1].start_ms + cells[at - 1].duration_ms if at else kernel.session.open_ms
        follows = cells[at].start_ms if at < len(cells) else kernel.session.close_ms
        self._at(self._now_ms + max(0, follows - before), act)

    def _open(self, kernel: _Kernel) -> None:
        raise NotImplementedError

    def _held(self) -> int:
        raise NotImplementedError


class _Whole(_Base):
    """Whole GPUs for each session."""

    def __init__(self, name: str, trace: Sequence[Session], device_mib: Sequence[int], cull_ms: int | None) -> None:
        super().__init__(name, trace, device_mib)
        self._free, self._cull_ms = len(device_mib), cull_ms
        self._door: deque[tuple[_Kernel, Callable[[_Kernel], None]]] = deque()
        for session in trace:
            if session.gpus > len(device_mib):
                raise SimulationError(
                    f"session {session.session_id!r} reserves {session.gpus} GPUs, and there are {len(device_mib)}; "
                    "simulate more with --devices"
                )

    def _held(self) -> int:
        return self.figures.devices - self._free

    def _open(self, kernel: _Kernel) -> None:
        self._ask(kernel, self._begin)

    def _begin(self, kernel: _Kernel) -> None:
        kernel.door_ms, kernel.wait_ms = kernel.wait_ms, 0
        self._felt.entered(kernel.door_ms)
        self._think(kernel, partial(self._next, kernel))

    def _ask(self, kernel: _Kernel, then: Callable[[_Kernel], None]) -> None:
        kernel.asked_ms = self._now_ms
        self._waiting += 1
        self._door.append((kernel, then))
        self._admit()

    def _admit(self) -> None:
        while self._door and self._door[0][0].session.gpus <= self._free:
            kernel, then = self._door.popleft()
            self._waiting -= 1
            self._free -= kernel.session.gpus
            kernel.held_gpus = kernel.session.gpus
            kernel.wait_ms += self._now_ms - kernel.asked_ms
            self._watch_idle(kernel)
            then(kernel)

    def _watch_idle(self, kernel: _Kernel) -> None:
        kernel.visit += 1
        if self._cull_ms is not None:
            self._at(self._now_ms + self._cull_ms, partial(self._cull, kernel, kernel.visit))

    def _cull(self, kernel: _Kernel, visit: int) -> None:
        if kernel.visit == visit and kernel.held_gpus:
            self.figures.lost += 1
            self._give_back(kernel)

    def _give_back(self, kernel: _Kernel) -> None:
        self._free += kernel.held_gpus
        kernel.held_gpus = 0
        self._admit()

    def _next(self, kernel: _Kernel) -> None:
        kernel.visit += 1
        if kernel.next_cell == len(kernel.session.cells):
            self._closed_ms = self._now_ms
            self._give_back(kernel)
        elif kernel.held_gpus < kernel.session.gpus:
            self._ask(kernel, self._run)
        else:
            self._run(kernel)

    def _run(self, kernel: _Kernel) -> None:
        cell = kernel.session.cells[kernel.next_cell]
        kernel.visit += 1
        if cell.gpus:
            self._felt.waited(kernel.wait_ms)
            self._felt.ended(kernel.session.user, kernel.door_ms + kernel.wait_ms)
            kernel.door_ms = kernel.wait_ms = 0
            self._busy += cell.gpus
        self._at(self._now_ms + cell.duration_ms, partial(self._done, kernel))

    def _done(self, kernel: _Kernel) -> None:
        self._busy -= kernel.session.cells[kernel.next_cell].gpus
        kernel.next_cell += 1
        self._watch_idle(kernel)
        self._think(kernel, partial(self._next, kernel))


class _TimeSlice(_Base):
    """All sessions share the devices."""

    def __init__(self, name: str, trace: Sequence[Session], device_mib: Sequence[int], *, slowdown: bool) -> None:
        super().__init__(name, trace, device_mib)
        self._sizes = list(device_mib)
        self._shared = [SharedDevice(slowdown=slowdown) for _ in device_mib]
        self._sessions = [0] * len(device_mib)
        self._used = [0] * len(device_mib)
        self._running: dict[str, _Kernel] = {}

    def _held(self) -> int:
        return sum(map(bool, self._used))

    def _open(self, kernel: _Kernel) -> None:
        if kernel.session.most_gpus > 1:
            raise SimulationError(
                f"session {kernel.session.session_id!r} uses {kernel.session.most_gpus} GPUs at once, and time-slicing is simulated for "
                "one; leave such sessions out with --one-gpu-only"
            )
        kernel.device = min(range(len(self._sizes)), key=lambda device: (self._sessions[device], device))
        self._sessions[kernel.device] += 1
        self._felt.entered(0)
        self._think(kernel, partial(self._next, kernel))

    def _next(self, kernel: _Kernel) -> None:
        if kernel.next_cell == len(kernel.session.cells):
            self._closed_ms = self._now_ms
            self._used[kernel.device] -= kernel.memory_mib
            self._sessions[kernel.device] -= 1
            return
        cell = kernel.session.cells[kernel.next_cell]
        if not cell.gpus:
            self._at(self._now_ms + cell.duration_ms, partial(self._done, kernel))
            return
        self._felt.waited(0)
        kernel.asked_ms = self._now_ms
        more = cell.gpu_mib - kernel.memory_mib
        if more > 0 and self._used[kernel.device] + more > self._sizes[kernel.device]:
            self.figures.out_of_memory += 1
            self._done(kernel)
            return
        self._used[kernel.device] += more
        kernel.memory_mib = cell.gpu_mib
        self._busy += 1
        self._running[kernel.session.session_id] = kernel
        running = Running(kernel.session.session_id, cell.util_percent, cell.duration_ms * UNSHARED, self._now_ms)
        self._plan(self._shared[kernel.device].begin(running))

    def _plan(self, ends: Sequence[tuple[int, Running]]) -> None:
        for at_ms, running in ends:
            self._at(at_ms, partial(self._ends, running, running.version))

    def _ends(self, running: Running, version: int) -> None:
        if running.version != version:
            return
        kernel = self._running.pop(running.session_id)
        self._busy -= 1
        cell = kernel.session.cells[kernel.next_cell]
        self._felt.ended(kernel.session.user, self._now_ms - kernel.asked_ms - cell.duration_ms)
        self._plan(self._shared[kernel.device].finish(running.session_id, self._now_ms)[1])
        self._done(kernel)

    def _done(self, kernel: _Kernel) -> None:
        kernel.next_cell += 1
        self._think(kernel, partial(self._next, kernel))
