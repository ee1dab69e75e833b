"""The machine that is simulated, and what a session asks of it."""

from dataclasses import dataclass

from provisioner.core.model import DeviceSpec, LeaseSpec, PoolSpec
from provisioner.core.units import format_fraction, format_memory
from provisioner.simulator.errors import SimulationError
from provisioner.simulator.traces import Session

__all__ = ["Host", "SwapSpeed", "fraction_for", "lease_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpeed:
    """What a suspend or resume takes: ms of its own, and MiB per second in either direction."""

    fixed_ms: int = 300
    save_mib_per_s: int = 1_800
    restore_mib_per_s: int = 4_000

    def save_ms(self, mib: int) -> int:
        """Return how long a checkpoint of so many MiB takes, ms."""
        return self.fixed_ms + -(-mib * 1000 // self.save_mib_per_s)

    def restore_ms(self, mib: int) -> int:
        """Return how long a restore of so many MiB takes, ms."""
        return self.fixed_ms + -(-mib * 1000 // self.restore_mib_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine and its policy. The sessions run in `pools[0]`."""

    devices: tuple[DeviceSpec, ...]
    pools: tuple[PoolSpec, ...]
    host_memory_mib: int = 1 << 20
    swap: SwapSpeed = SwapSpeed()
    parallel_swaps: int = 1
    slowdown: bool = True
    every_cell_asks: bool = False
    request_percent: int = 100  # of its cap, what a session is guaranteed where the pool reserves by use
    patience_ms: int = 60_000  # a cell that finds no more memory for so long fails

    @property
    def device_mib(self) -> int:
        """What the smallest device of the sessions' pool gives to leases, MiB; 0 if it has none."""
        served = frozenset(self.pools[0].devices)
        return min((device.leasable_mib for device in self.devices if device.device_id in served), default=0)


def fraction_for(session: Session, pool: PoolSpec, device_mib: int) -> tuple[int, int]:
    """Return the smallest fraction on offer (milli-GPU) of a device of that size that covers the session's peak memory, and its cap in MiB.

    Raises SimulationError where none does.
    """
    peak = max(1, session.peak_mib)
    if not pool.fractions_milli and peak <= device_mib:
        milli = -(-peak * 1000 // device_mib)
        return milli, device_mib * milli // 1000
    for milli in pool.fractions_milli:
        if device_mib * milli // 1000 >= peak:
            return milli, device_mib * milli // 1000
    most = format_fraction(max(pool.fractions_milli, default=1000))
    raise SimulationError(
        f"session {session.session_id!r} holds up to {format_memory(peak)}, but the largest fraction of pool {pool.name!r}, {most} of "
        f"{format_memory(device_mib)}, does not cover that; simulate larger devices with --devices"
    )


def lease_for(host: Host, session: Session) -> LeaseSpec:
    """Return what the session asks for: a fraction, or as many whole devices as it uses at once. Raises SimulationError."""
    pool, device_mib, several = host.pools[0], host.device_mib, session.most_gpus > 1
    if session.most_gpus > min(pool.max_devices, len(pool.devices)):
        most = min(pool.max_devices, len(pool.devices))
        raise SimulationError(
            f"session {session.session_id!r} uses {session.most_gpus} GPUs at once, but a lease of pool {pool.name!r} may have {most}; "
            "simulate more with --devices, or leave such sessions out with --one-gpu-only"
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
    )
