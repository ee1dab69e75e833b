"""Defines the simulated machine (`Host`), a session's lease, and how cells on a device slow each other down (`core.time_slicing`)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fractional_gpu.core.model import DeviceSpec, LeaseSpec, PoolSpec
from fractional_gpu.core.time_slicing import WHOLE_MILLI, stretch_milli
from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.load import Signs
from fractional_gpu.simulator.traces import Session

UNSHARED = 1_000_000  # a cell's pace alone: nominal nanoseconds per millisecond
_PARTS = 100_000  # the unit of stretches


@dataclass(slots=True, eq=False)
class Running:
    """A running cell. Running alone, it would end `left_ns` after `at_ms`. `version` increases whenever its expected end changes."""

    session_id: str
    util_percent: int
    left_ns: int
    at_ms: int
    version: int = 0


@dataclass(slots=True)
class SharedDevice:
    """The cells running on one device. A cell uses the GPU only part of the time. When it does, it uses `fill_percent` of it."""

    slowdown: bool
    fill_percent: int = 100
    running: dict[str, Running] = field(default_factory=dict)
    _k_milli: int = WHOLE_MILLI  # how much slower cells run here than alone

    def begin(self, cell: Running) -> list[tuple[int, Running]]:
        self._advance(cell.at_ms)
        self.running[cell.session_id] = cell
        return self._ends(self.running.values() if self._share() else [cell])

    def finish(self, session_id: str, now_ms: int) -> tuple[Running, list[tuple[int, Running]]]:
        """Remove the session's cell. Return it, along with the new end times of all other cells whose end times have changed."""
        self._advance(now_ms)
        cell = self.running.pop(session_id)
        cell.version += 1
        return cell, self._ends(self.running.values() if self._share() else [])

    def used_milli(self, cell: Running) -> int:
        return cell.util_percent * 10 * _PARTS // self._stretch(cell)

    def _share(self) -> bool:
        before = self._k_milli
        if self.slowdown:
            wants = (cell.util_percent * 10 for cell in self.running.values())
            self._k_milli = stretch_milli(wants, WHOLE_MILLI * 100 // self.fill_percent)
        return self._k_milli != before

    def _stretch(self, cell: Running) -> int:
        return (100 - cell.util_percent) * WHOLE_MILLI + cell.util_percent * self._k_milli

    def _advance(self, now_ms: int) -> None:
        for cell in self.running.values():
            done_ns = (now_ms - cell.at_ms) * UNSHARED * _PARTS // self._stretch(cell)
            cell.left_ns, cell.at_ms = max(0, cell.left_ns - done_ns), now_ms

    def _ends(self, cells: Iterable[Running]) -> list[tuple[int, Running]]:
        ends = []
        for cell in cells:
            cell.version += 1
            takes_ms = -(-cell.left_ns * self._stretch(cell) // (UNSHARED * _PARTS))
            ends.append((cell.at_ms + takes_ms, cell))
        return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpeed:
    fixed_ms: int = 300
    save_mib_per_s: int = 1_800
    restore_mib_per_s: int = 4_000

    def save_ms(self, mib: int) -> int:
        return self.fixed_ms + -(-mib * 1000 // self.save_mib_per_s)

    def restore_ms(self, mib: int) -> int:
        return self.fixed_ms + -(-mib * 1000 // self.restore_mib_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A simulated machine and its policy. Sessions that name no pool run in `pools[0]`."""

    devices: tuple[DeviceSpec, ...]
    pools: tuple[PoolSpec, ...]
    host_memory_mib: int = 1 << 20
    swap: SwapSpeed = SwapSpeed()
    parallel_swaps: int = 1
    failed_swaps_percent: int = 0
    seed: int = 1  # for drawing failed swaps and false signs
    signs: Signs = field(default_factory=Signs)  # the signs that users give before cells
    slowdown: bool = True
    every_cell_asks: bool = False
    request_percent: int = 100  # the part of its cap that a session is guaranteed if the pool reserves by use
    patience_ms: int = 60_000  # a cell fails if it gets no more memory within this time

    @property
    def device_mib(self) -> int:
        return min(self.leasable_in(self.pools[0]), default=0)

    @property
    def leasable_mib(self) -> int:
        return sum(self.leasable_in(self.pools[0]))

    def leasable_in(self, pool: PoolSpec) -> list[int]:
        served = frozenset(pool.devices)
        return [device.leasable_mib for device in self.devices if device.device_id in served]

    def pool_of(self, session: Session) -> PoolSpec:
        if not session.pool:
            return self.pools[0]
        found = next((pool for pool in self.pools if pool.name == session.pool), None)
        if found is None:
            raise SimulationError(
                f"session {session.session_id!r} names pool {session.pool!r}, which does not exist; choose one of "
                f"{', '.join(pool.name for pool in self.pools)}, or configure it with --policy"
            )
        return found


def fraction_for(session: Session, pool: PoolSpec, device_mib: int) -> tuple[int, int]:
    """Return the smallest fraction on offer that covers the session's request on a device, in milli-GPU, and the fraction's cap in MiB.

    A session requests its peak memory, unless it states another amount. If no fraction covers the request, it gets the largest fraction.
    Raises SimulationError if no fraction covers the peak. `device_mib` is the device's memory.
    """
    peak, largest = max(1, session.peak_mib), max(pool.fractions_milli, default=1000)
    if peak <= device_mib * largest // 1000:
        asked = min(session.asked_mib or peak, device_mib * largest // 1000)
        if not pool.fractions_milli:
            milli = -(-asked * 1000 // device_mib)
            return milli, device_mib * milli // 1000
        milli = min(one for one in pool.fractions_milli if device_mib * one // 1000 >= asked)
        return milli, device_mib * milli // 1000
    most = format_fraction(largest)
    raise SimulationError(
        f"session {session.session_id!r} holds up to {format_memory(peak)}, but the largest fraction of pool {pool.name!r}, {most} of "
        f"{format_memory(device_mib)}, does not cover that; simulate larger devices with --devices or --hosts"
    )


def lease_for(host: Host, session: Session) -> LeaseSpec:
    pool, several = host.pool_of(session), session.most_gpus > 1
    device_mib = min(host.leasable_in(pool), default=0)
    kinds = [device.name for device in host.devices if device.device_id in pool.devices]
    most = min(pool.max_devices, max(map(kinds.count, kinds), default=0))  # a lease's devices are all of one kind
    if session.most_gpus > most:
        raise SimulationError(
            f"session {session.session_id!r} uses {session.most_gpus} GPUs at once, but a lease of pool {pool.name!r} may have {most}; "
            "simulate more in one host with --devices or --hosts, or leave such sessions out with --set one_gpu_only=true or, for "
            "synthetic users, with --set several_gpus=0"
        )
    whole = PoolSpec(name=pool.name, devices=pool.devices, fractions_milli=(1000,)) if several else pool
    milli, cap_mib = fraction_for(session, whole, device_mib)
    return LeaseSpec(
        lease_id=session.session_id,
        pool=pool.name,
        owner=session.user,
        fraction_milli=milli,
        reserve_mib=cap_mib,
        request_mib=max(1, cap_mib * host.request_percent // 100),
        devices=session.most_gpus if several else 1,
        priority=session.priority,
        group=session.group,
    )
