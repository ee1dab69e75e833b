"""Simulates how the same trace would run without this project. docs/simulator.md describes these baselines.

If a session waits for a host, or its culled kernel waits for GPUs, the rest of the session is delayed. Among hosts with enough room, the
best fit is chosen: whole GPUs come from the host with the fewest free GPUs, and a fraction comes from the device with the least room.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fractional_gpu.core.model import LeaseSpec, ReserveBy
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.hosts import Door, DoorRule, Leases, Machine, Moments, hosts_of
from fractional_gpu.simulator.machine import UNSHARED, Host, Running, SharedDevice
from fractional_gpu.simulator.result import Result, begin_result
from fractional_gpu.simulator.simulation import Progress, simulate
from fractional_gpu.simulator.traces import Cell, Session

BASELINES = ("reservation", "cull", "static-fraction", "mps-pack", "whole-gpu-suspend", "time-slice")
WAITING = frozenset(BASELINES) - {"time-slice"}  # baselines in which more devices mean shorter waits
CULL_AFTER_MS = 3_600_000
MPS_CLIENTS = 48  # CUDA contexts that a device's MPS server serves at once
MPS_FILL_PERCENT = 50  # how much of a device a cell fills while it uses the device; assumed, not measured


def run_baseline(
    name: str,
    machine: Machine,
    trace: Sequence[Session],
    *,
    rule: DoorRule = DoorRule.FIT,
    seed: int = 1,
    mps_fill_percent: int = MPS_FILL_PERCENT,
    goal: Goal | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run one of `BASELINES` on a machine. `rule` and `seed` are only for baselines that use the arbiter.

    `progress` is called with the number of ended sessions and the total. The run stops if it can no longer meet the goal. Raises
    SimulationError for an unknown name or a session that cannot be served.
    """
    if name not in BASELINES:
        raise SimulationError(f"there is no baseline named {name!r}; choose one of: {', '.join(BASELINES)}")
    hosts = hosts_of(machine)
    if name == "whole-gpu-suspend":
        whole = tuple(_whole_devices(host) for host in hosts)
        return simulate(whole, trace, name=name, door=Door(whole, trace, rule, seed), goal=goal, progress=progress)
    facts = _Rules(
        fill_percent=mps_fill_percent if name == "mps-pack" else 100,
        clients=MPS_CLIENTS if name == "mps-pack" else None,
        cull_after_ms=CULL_AFTER_MS if name == "cull" else None,
    )
    return _KINDS[name](name, hosts, trace, facts, goal, progress).result()


def _whole_devices(host: Host) -> Host:
    served, *others = host.pools
    whole = replace(served, fractions_milli=(1000,), idle_after_ms=None, reserve_by=ReserveBy.CAP, preempt_equals=False)
    return replace(host, pools=(whole, *others), request_percent=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    fill_percent: int
    clients: int | None
    cull_after_ms: int | None


@dataclass(slots=True, eq=False)
class _Kernel:
    session: Session
    next_cell: int = 0
    asked_ms: int = 0  # when it began to wait for GPUs, or its cell was requested
    door_ms: int = 0  # its wait at the door, if not yet counted in a cell's lateness
    wait_ms: int = 0  # its wait for GPUs since then, if not yet counted as a cell's wait
    visit: int = 0  # grows whenever the kernel acts, which makes older plans to cull it void
    host: int = 0
    devices: tuple[int, ...] = ()  # its devices, as numbers on its host
    memory_mib: int = 0  # on each of them

    @property
    def cell(self) -> Cell:
        return self.session.cells[self.next_cell]

    @property
    def first(self) -> tuple[int, int]:
        return self.host, self.devices[0]


@dataclass(eq=False)
class _Base:
    name: str
    hosts: Sequence[Host]
    trace: Sequence[Session]
    facts: _Rules
    goal: Goal | None
    progress: Progress | None

    def __post_init__(self) -> None:
        self._moments = Moments()
        self._busy = self._waiting = self._ended = 0
        self.figures = begin_result(self.name, self.trace, self.hosts, self.goal)
        self._experience = self.figures.experience

    def result(self) -> Result:
        for session in self.trace:
            self._moments.at(session.open_ms, partial(self._open, _Kernel(session)))
        self._moments.run(self._account, until=lambda: bool(self._experience.hopeless))
        self.figures.finish(self.trace)
        return self.figures

    def _account(self, at_ms: int) -> None:
        passed, held = at_ms - self._now_ms, self._held()
        if passed:
            self.figures.timeline.add(self._now_ms, held, self._busy, self._waiting)
            self.figures.held += held * passed * 1000
            self.figures.busy += self._busy * passed * 1000
            self.figures.peak_devices_held = max(self.figures.peak_devices_held, held)

    @property
    def _now_ms(self) -> int:
        return self._moments.now_ms

    def _after(self, wait_ms: int, act: Callable[[], None]) -> None:
        self._moments.at(self._now_ms + wait_ms, act)

    def _closes(self) -> None:
        self.figures.closed_ms = self._now_ms
        self._ended += 1
        if self.progress is not None:
            self.progress(self._ended, self.figures.sessions)

    def _think(self, kernel: _Kernel, act: Callable[[], None]) -> None:
        cells, at = kernel.session.cells, kernel.next_cell
        before = cells[at - 1].start_ms + cells[at - 1].duration_ms if at else kernel.session.open_ms
        follows = cells[at].start_ms if at < len(cells) else kernel.session.close_ms
        self._after(max(0, follows - before), act)

    def _open(self, kernel: _Kernel) -> None:
        raise NotImplementedError

    def _held(self) -> int:
        raise NotImplementedError


class _WholeGPUs(_Base):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._free = [list(range(len(host.devices))) for host in self.hosts]
        self._door: deque[tuple[_Kernel, Callable[[_Kernel], None]]] = deque()
        most = max(map(len, self._free))
        for session in self.trace:
            if session.gpus > most:
                raise SimulationError(
                    f"session {session.session_id!r} reserves {session.gpus} GPUs, but a host has {most}; simulate more with --devices or "
                    "--hosts"
                )

    def _held(self) -> int:
        return self.figures.devices - sum(map(len, self._free))

    def _open(self, kernel: _Kernel) -> None:
        self._ask(kernel, self._begin)

    def _begin(self, kernel: _Kernel) -> None:
        kernel.door_ms, kernel.wait_ms = kernel.wait_ms, 0
        self._experience.entered(kernel.door_ms)
        self._think(kernel, partial(self._next, kernel))

    def _ask(self, kernel: _Kernel, then: Callable[[_Kernel], None]) -> None:
        kernel.asked_ms = self._now_ms
        self._waiting += 1
        self._door.append((kernel, then))
        self._admit()

    def _admit(self) -> None:
        while self._door:
            kernel, then = self._door[0]
            gpus = kernel.session.gpus
            enough = [(len(free), host) for host, free in enumerate(self._free) if len(free) >= gpus]
            if not enough:
                return
            self._door.popleft()
            self._waiting -= 1
            host = min(enough)[1]
            taken, self._free[host] = self._free[host][:gpus], self._free[host][gpus:]
            kernel.host, kernel.devices = host, tuple(taken)
            kernel.wait_ms += self._now_ms - kernel.asked_ms
            self._watch_idle(kernel)
            then(kernel)

    def _watch_idle(self, kernel: _Kernel) -> None:
        kernel.visit += 1
        if (cull_ms := self.facts.cull_after_ms) is not None:
            self._after(cull_ms, partial(self._cull, kernel, kernel.visit))

    def _cull(self, kernel: _Kernel, visit: int) -> None:
        if kernel.visit == visit and kernel.devices:
            self.figures.lost += 1
            self._give_back(kernel)

    def _give_back(self, kernel: _Kernel) -> None:
        free = self._free[kernel.host]
        free[:] = sorted([*free, *kernel.devices])
        kernel.devices = ()
        self._admit()

    def _next(self, kernel: _Kernel) -> None:
        kernel.visit += 1
        if kernel.next_cell == len(kernel.session.cells):
            self._closes()
            self._give_back(kernel)
            return
        if len(kernel.devices) < kernel.session.gpus:
            self._ask(kernel, self._run)
        else:
            self._run(kernel)

    def _run(self, kernel: _Kernel) -> None:
        cell = kernel.cell
        kernel.visit += 1
        if cell.gpus:
            self._experience.waited(kernel.wait_ms, host=kernel.host)
            self._experience.ended(kernel.session.user, kernel.door_ms + kernel.wait_ms, cell.duration_ms)
            kernel.door_ms = kernel.wait_ms = 0
            self._busy += cell.gpus
        self._after(cell.duration_ms, partial(self._done, kernel))

    def _done(self, kernel: _Kernel) -> None:
        self._busy -= kernel.cell.gpus
        kernel.next_cell += 1
        self._watch_idle(kernel)
        self._think(kernel, partial(self._next, kernel))


class _Sharing(_Base):
    def __post_init__(self) -> None:
        super().__post_init__()
        fill = self.facts.fill_percent
        self._shared = [
            [SharedDevice(slowdown=host.slowdown, fill_percent=fill) for _ in host.devices] for host in self.hosts
        ]
        self._running: dict[str, _Kernel] = {}

    def _device(self, kernel: _Kernel) -> SharedDevice:
        host, device = kernel.first
        return self._shared[host][device]

    def _plan(self, ends: Sequence[tuple[int, Running]]) -> None:
        for at_ms, running in ends:
            self._moments.at(at_ms, partial(self._ends, running, running.version))

    def _ends(self, running: Running, version: int) -> None:
        if running.version != version:
            return
        kernel = self._running.pop(running.session_id)
        cell = kernel.cell
        self._busy -= cell.gpus
        late_ms = kernel.door_ms + self._now_ms - kernel.asked_ms - cell.duration_ms
        self._experience.ended(kernel.session.user, late_ms, cell.duration_ms)
        kernel.door_ms = 0
        self._plan(self._device(kernel).finish(running.session_id, self._now_ms)[1])
        self._done(kernel)

    def _done(self, kernel: _Kernel) -> None:
        kernel.next_cell += 1
        self._think(kernel, partial(self._next, kernel))

    def _next(self, kernel: _Kernel) -> None:
        if kernel.next_cell == len(kernel.session.cells):
            self._closes()
            self._close(kernel)
            return
        cell = kernel.cell
        kernel.asked_ms = self._now_ms
        if not cell.gpus:
            self._after(cell.duration_ms, partial(self._done, kernel))
            return
        self._experience.waited(0, host=kernel.host)
        if not self._may_use(kernel, cell.gpu_mib):
            self.figures.out_of_memory += 1
            self._done(kernel)
            return
        kernel.memory_mib = cell.gpu_mib
        self._busy += cell.gpus
        self._running[kernel.session.session_id] = kernel
        running = Running(kernel.session.session_id, cell.util_percent, cell.duration_ms * UNSHARED, self._now_ms)
        self._plan(self._device(kernel).begin(running))

    def _may_use(self, kernel: _Kernel, mib: int) -> bool:
        raise NotImplementedError

    def _close(self, kernel: _Kernel) -> None:
        raise NotImplementedError


class _Fractions(_Sharing):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._free = [
            [device.leasable_mib if device.device_id in host.pools[0].devices else 0 for device in host.devices]
            for host in self.hosts
        ]
        self._clients = [[0] * len(free) for free in self._free]
        self._asked = Leases(self.hosts, self.trace)
        self._leases: dict[str, LeaseSpec] = {}
        self._door: list[_Kernel] = []

    def _held(self) -> int:
        return sum(sum(map(bool, clients)) for clients in self._clients)

    def _open(self, kernel: _Kernel) -> None:
        kernel.asked_ms = self._now_ms
        self._waiting += 1
        self._door.append(kernel)
        self._admit()

    def _admit(self) -> None:
        tried: set[tuple[tuple[int, int] | None, ...]] = set()  # sizes that have no room
        for kernel in list(self._door):
            size = self._asked.size(kernel.session)
            if size in tried:
                continue
            found = self._best_fit(kernel.session)
            if found is None:
                tried.add(size)
                continue
            host, lease, devices = found
            self._door.remove(kernel)
            self._waiting -= 1
            for device in devices:
                self._free[host][device] -= lease.reserve_mib
                self._clients[host][device] += 1
            kernel.host, kernel.devices = host, tuple(devices)
            self._leases[lease.lease_id] = lease
            kernel.door_ms = self._now_ms - kernel.asked_ms
            self._experience.entered(kernel.door_ms)
            self._think(kernel, partial(self._next, kernel))

    def _best_fit(self, session: Session) -> tuple[int, LeaseSpec, list[int]] | None:
        most, best = self.facts.clients, None
        for host, room in enumerate(self._free):
            lease, clients = self._asked.on(host, session), self._clients[host]
            if lease is None:
                continue
            fitting = sorted(
                (free, device)
                for device, free in enumerate(room)
                if free >= lease.reserve_mib and (most is None or clients[device] < most)
            )
            if len(fitting) < lease.devices:
                continue
            taken = fitting[: lease.devices]
            left = (sum(free for free, _ in taken), len(fitting))
            if best is None or left < best[0]:
                best = (left, (host, lease, [device for _, device in taken]))
        return best[1] if best is not None else None

    def _may_use(self, kernel: _Kernel, mib: int) -> bool:
        return mib <= self._leases[kernel.session.session_id].reserve_mib

    def _close(self, kernel: _Kernel) -> None:
        lease = self._leases[kernel.session.session_id]
        for device in kernel.devices:
            self._free[kernel.host][device] += lease.reserve_mib
            self._clients[kernel.host][device] -= 1
        self._admit()


class _TimeSlice(_Sharing):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes = [[device.memory_mib for device in host.devices] for host in self.hosts]
        self._sessions = [[0] * len(sizes) for sizes in self._sizes]
        self._used = [[0] * len(sizes) for sizes in self._sizes]

    def _held(self) -> int:
        return sum(sum(map(bool, used)) for used in self._used)

    def _open(self, kernel: _Kernel) -> None:
        if kernel.session.most_gpus > 1:
            raise SimulationError(
                f"session {kernel.session.session_id!r} uses {kernel.session.most_gpus} GPUs at once, but time-slicing supports only one "
                "GPU for each session; leave such sessions out with --set one_gpu_only=true"
            )
        each = [
            (count, host, device) for host, counts in enumerate(self._sessions) for device, count in enumerate(counts)
        ]
        _, host, device = min(each)
        self._sessions[host][device] += 1
        kernel.host, kernel.devices = host, (device,)
        self._experience.entered(0)
        self._think(kernel, partial(self._next, kernel))

    def _may_use(self, kernel: _Kernel, mib: int) -> bool:
        host, device = kernel.first
        more = mib - kernel.memory_mib
        if more > 0 and self._used[host][device] + more > self._sizes[host][device]:
            return False
        self._used[host][device] += more
        return True

    def _close(self, kernel: _Kernel) -> None:
        host, device = kernel.first
        self._used[host][device] -= kernel.memory_mib
        self._sessions[host][device] -= 1


_KINDS: dict[str, type[_Base]] = {
    "reservation": _WholeGPUs,
    "cull": _WholeGPUs,
    "static-fraction": _Fractions,
    "mps-pack": _Fractions,
    "time-slice": _TimeSlice,
}
