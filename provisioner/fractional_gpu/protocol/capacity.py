"""Messages about what a host could still give: read by node agents of Slurm and Kubernetes, and by people. They name no user."""

from msgspec import Struct


class PoolCapacity(Struct, frozen=True, kw_only=True):
    """What a pool has, has given, and could still give. Shares in milli-GPU (thousandths of a device), waits in seconds."""

    name: str
    devices: list[str]  # UUIDs, without those that are lost or being emptied
    total_milli: int  # 1000 for each of these devices
    held_milli: int  # seats, and leases without a seat
    # How much more is granted now such that the forecast wait stays within `wait_bound`, for any division of it into fractions on offer
    admissible_milli: int
    waiting: int  # leases in the queue for a device
    wait_p50_s: (
        float  # forecast for the cells of one more seat of `fraction_milli`: half of them wait so long at most ...
    )
    wait_p95_s: float  # ... and 95 of 100 so long
    fraction_milli: int  # the size of that seat: the default on offer
    fractions_milli: list[int]  # on offer; empty: any
    wait_target_ms: int  # what counts as waiting too long ...
    wait_bound_milli: int  # ... and how many of a thousand cells may
    device_mib: int = 0  # memory that leases may have of the smallest of these devices


class Capacity(Struct, frozen=True, kw_only=True):
    """What a host could still give. Memory in MiB."""

    version: str
    simulated: bool
    host_memory_total_mib: int  # of the machine
    host_memory_left_mib: int  # what saved state may still take
    pools: list[PoolCapacity] = []
