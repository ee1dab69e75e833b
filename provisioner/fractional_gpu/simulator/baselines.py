"""What users do without this project, on the same trace, for comparison.

- `reservation`: a session takes its whole GPUs when it opens, and keeps them until it closes; if none are free it waits at the door.
- `cull`: the same, and a kernel that ran nothing for an hour is shut down: its variables are lost, its GPUs are free, and its next
  cell waits for GPUs as a new kernel would.
- `static-fraction`: a session takes a fraction as it would here, by best fit, and keeps it until it closes; nothing is suspended.
  If no device has room it waits at the door, where a later session that fits passes it, as Kubernetes' scheduler does it.
  Busy neighbours slow each other down as in `machine`.
- `mps-pack`: the same with NVIDIA's Multi-Process Service. MPS runs kernels of several processes at the same time, without time slices,
  while they do not fill the device together (https://docs.nvidia.com/deploy/mps/). A utilisation says for how long any kernel runs, not
  how much of the device that kernel fills, so the model needs one more figure: a cell that uses the device fills `mps_fill_percent` of
  it. The sum of the utilisations counts by so much only; beyond a whole device the cells slow each other down as in `machine`. The
  default of 50 is an assumption, not a measurement; with 100 MPS gains nothing. A device serves at most `MPS_CLIENTS` sessions.
- `whole-gpu-suspend`: the arbiter, with whole devices only, that suspends an idle kernel when another one needs its device; a cell of the
  same priority is not preempted.
- `time-slice`: all sessions share all devices without limits. None waits; a cell that needs memory that its neighbours have taken fails,
  and busy neighbours slow each other down as in `machine`.

A wait at the door, and the wait of a culled kernel for GPUs, delay everything of the session that comes after.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush

from fractional_gpu.core.model import ReserveBy
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.felt import Felt, Goal
from fractional_gpu.simulator.machine import UNSHARED, Host, Running, SharedDevice, lease_for
from fractional_gpu.simulator.result import Point, Result, begin_result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session

BASELINES = ("reservation", "cull", "static-fraction", "mps-pack", "whole-gpu-suspend", "time-slice")
WAITING = frozenset(BASELINES) - {"time-slice"}  # those in which more devices mean shorter waits
CULL_AFTER_MS = 3_600_000
MPS_CLIENTS = 48  # CUDA contexts that one device's MPS server serves at the same time
MPS_FILL_PERCENT = 50


def run_baseline(
    name: str,
    host: Host,
    trace: Sequence[Session],
    *,
    mps_fill_percent: int = MPS_FILL_PERCENT,
    goal: Goal | None = None,
) -> Result:
    """Run one of `BASELINES` on a machine; a run that cannot reach the goal any more is given up there.

    Raises SimulationError for a name or a session that cannot be served.
    """
    match name:
        case "reservation" | "cull":
            return _Whole(name, host, trace, goal, CULL_AFTER_MS if name == "cull" else None).result()
        case "static-fraction":
            return _Fractions(name, host, trace, goal, fill_percent=100).result()
        case "mps-pack":
            return _Fractions(name, host, trace, goal, fill_percent=mps_fill_percent, clients=MPS_CLIENTS).result()
        case "whole-gpu-suspend":
            return _whole_gpu_suspend(name, host, trace, goal)
        case "time-slice":
            return _TimeSlice(name, host, trace, goal).result()
    raise SimulationError(f"there is no baseline {name!r}; allowed: {', '.join(BASELINES)}")


def _whole_gpu_suspend(name: str, host: Host, trace: Sequence[Session], goal: Goal | None) -> Result:
    served, *others = host.pools
    whole = replace(served, fractions_milli=(1000,), idle_after_ms=None, reserve_by=ReserveBy.CAP, preempt_equals=False)
    result = simulate(replace(host, pools=(whole, *others), request_percent=100), trace, goal=goal)
    result.name = name
    return result


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

    def __init__(self, name: str, host: Host, trace: Sequence[Session], goal: Goal | None) -> None:
        self._moments: list[tuple[int, int, Callable[[], None]]] = []
        self._now_ms = self._order = self._accounted_ms = self._busy = self._waiting = 0
        self._felt = Felt(trace, goal)
        self._closed_ms = 0
        self._kernels = [_Kernel(session) for session in trace]
        self.figures = begin_result(name, trace, len(host.devices))

    def result(self) -> Result:
        """Run to the end."""
        for kernel in self._kernels:
            self._at(kernel.session.open_ms, partial(self._open, kernel))
        while self._moments and not self._felt.hopeless:
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

    def __init__(self, name: str, host: Host, trace: Sequence[Session], goal: Goal | None, cull_ms: int | None) -> None:
        super().__init__(name, host, trace, goal)
        self._free, self._cull_ms = len(host.devices), cull_ms
        self._door: deque[tuple[_Kernel, Callable[[_Kernel], None]]] = deque()
        for session in trace:
            if session.gpus > self._free:
                raise SimulationError(
                    f"session {session.session_id!r} reserves {session.gpus} GPUs, and there are {self._free}; "
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


class _Sharing(_Base):
    """Sessions that share devices, and slow each other down there; a cell on several devices is slowed by the first of them."""

    def __init__(
        self, name: str, host: Host, trace: Sequence[Session], goal: Goal | None, *, fill_percent: int
    ) -> None:
        super().__init__(name, host, trace, goal)
        self._shared = [SharedDevice(slowdown=host.slowdown, fill_percent=fill_percent) for _ in host.devices]
        self._running: dict[str, _Kernel] = {}

    def _begin_cell(self, kernel: _Kernel) -> None:
        cell = kernel.session.cells[kernel.next_cell]
        kernel.asked_ms = self._now_ms
        if not cell.gpus:
            self._at(self._now_ms + cell.duration_ms, partial(self._done, kernel))
            return
        self._busy += cell.gpus
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
        cell = kernel.session.cells[kernel.next_cell]
        self._busy -= cell.gpus
        self._felt.ended(kernel.session.user, kernel.door_ms + self._now_ms - kernel.asked_ms - cell.duration_ms)
        kernel.door_ms = 0
        self._plan(self._shared[kernel.device].finish(running.session_id, self._now_ms)[1])
        self._done(kernel)

    def _done(self, kernel: _Kernel) -> None:
        kernel.next_cell += 1
        self._think(kernel, partial(self._next, kernel))

    def _next(self, kernel: _Kernel) -> None:
        raise NotImplementedError


class _Fractions(_Sharing):
    """A fraction for each session, from open to close."""

    def __init__(
        self,
        name: str,
        host: Host,
        trace: Sequence[Session],
        goal: Goal | None,
        *,
        fill_percent: int,
        clients: int | None = None,
    ) -> None:
        super().__init__(name, host, trace, goal, fill_percent=fill_percent)
        served = frozenset(host.pools[0].devices)
        self._free = [device.leasable_mib if device.device_id in served else 0 for device in host.devices]
        self._clients = [0] * len(host.devices)
        self._most_clients = clients
        self._leases = {session.session_id: lease_for(host, session) for session in trace}
        self._devices: dict[str, list[int]] = {}
        self._door: list[_Kernel] = []

    def _held(self) -> int:
        return sum(map(bool, self._clients))

    def _open(self, kernel: _Kernel) -> None:
        kernel.asked_ms = self._now_ms
        self._waiting += 1
        self._door.append(kernel)
        self._admit()

    def _admit(self) -> None:
        """Let the sessions begin that find room, in the order in which they came."""
        tried: set[tuple[int, int]] = set()  # sizes for which there is no room
        for kernel in list(self._door):
            lease = self._leases[kernel.session.session_id]
            if (lease.reserve_mib, lease.devices) in tried:
                continue
            devices = self._best_fit(lease.reserve_mib, lease.devices)
            if devices is None:
                tried.add((lease.reserve_mib, lease.devices))
                continue
            self._door.remove(kernel)
            self._waiting -= 1
            for device in devices:
                self._free[device] -= lease.reserve_mib
                self._clients[device] += 1
            self._devices[lease.lease_id], kernel.device = devices, devices[0]
            kernel.door_ms = self._now_ms - kernel.asked_ms
            self._felt.entered(kernel.door_ms)
            self._think(kernel, partial(self._next, kernel))

    def _best_fit(self, mib: int, count: int) -> list[int] | None:
        """Return the devices with the least room that is enough; None: too few have it."""
        most = self._most_clients
        fitting = [
            device
            for device, free in enumerate(self._free)
            if free >= mib and (most is None or self._clients[device] < most)
        ]
        fitting.sort(key=lambda device: (self._free[device], device))
        return fitting[:count] if len(fitting) >= count else None

    def _next(self, kernel: _Kernel) -> None:
        if kernel.next_cell < len(kernel.session.cells):
            cell = kernel.session.cells[kernel.next_cell]
            if cell.gpus:
                self._felt.waited(0)
                if cell.gpu_mib > self._leases[kernel.session.session_id].reserve_mib:
                    self.figures.out_of_memory += 1
                    self._done(kernel)
                    return
            self._begin_cell(kernel)
            return
        self._closed_ms = self._now_ms
        lease = self._leases[kernel.session.session_id]
        for device in self._devices.pop(lease.lease_id):
            self._free[device] += lease.reserve_mib
            self._clients[device] -= 1
        self._admit()


class _TimeSlice(_Sharing):
    """All sessions share the devices."""

    def __init__(self, name: str, host: Host, trace: Sequence[Session], goal: Goal | None) -> None:
        super().__init__(name, host, trace, goal, fill_percent=100)
        self._sizes = [device.memory_mib for device in host.devices]
        self._sessions = [0] * len(self._sizes)
        self._used = [0] * len(self._sizes)

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
        if cell.gpus:
            self._felt.waited(0)
            more = cell.gpu_mib - kernel.memory_mib
            if more > 0 and self._used[kernel.device] + more > self._sizes[kernel.device]:
                self.figures.out_of_memory += 1
                self._done(kernel)
                return
            self._used[kernel.device] += more
            kernel.memory_mib = cell.gpu_mib
        self._begin_cell(kernel)
