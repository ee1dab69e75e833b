"""Samples of what a broker says, for tests of what is shown."""

from fractional_gpu.protocol.messages import DeviceStatus, HostStatus, LeaseStatus, Neighbour, UsagePoint

__all__ = ["DEVICE", "EVIL", "LEASE", "NOW_MS", "host", "points"]

EVIL = "<script>alert('x')</script>"
NOW_MS = 1_790_000_000_000

LEASE = LeaseStatus(
    lease_id="lease-1",
    state="resident",
    pool="default",
    owner="me",
    label="train.ipynb",
    kernel_id="k",
    pid=1,
    fraction_milli=250,
    reserve_mib=20480,
    used_mib=10240,
    saved_mib=0,
    device_id="GPU-0",
    device_name="NVIDIA H200",
    simulated=False,
    busy=True,
    gated=True,
    age_ms=60_000,
    reason="resumed",
    sentence="Resumed: its turn came.",
    device_ids=["GPU-0"],
    reserved_mib=20480,
    pinned_ms=1_500_000,
    neighbours=[
        Neighbour(fraction_milli=500, reserved_mib=40960, state="resident", busy=True),
        Neighbour(fraction_milli=125, reserved_mib=10240, state="resident", busy=False, label="eval.ipynb"),
    ],
)

DEVICE = DeviceStatus(
    device_id="GPU-0",
    index=0,
    name="NVIDIA H200",
    pool="default",
    memory_mib=143_360,
    leasable_mib=143_000,
    used_mib=51_200,
    reserved_mib=71_680,
    stranger_mib=2048,
    over_committed=False,
    lost=False,
)


def host(*leases: LeaseStatus, devices: tuple[DeviceStatus, ...] = (DEVICE,)) -> HostStatus:
    """What a broker says of the machine."""
    return HostStatus(
        version="1",
        pid=1,
        simulated=False,
        socket="/run/broker.sock",
        host_budget_mib=1,
        host_saved_mib=0,
        devices=list(devices),
        leases=list(leases),
        pools={"default": [125, 300, 1000]},
    )


def points() -> list[UsagePoint]:
    """A kernel that was on the GPU for half of the last 100 s: 10 s of nothing, 40 s resident, 40 s suspended, 10 s resident."""
    return [
        UsagePoint(at_ms=NOW_MS - 100_000, state="unarmed", used_mib=0, saved_mib=0),
        UsagePoint(at_ms=NOW_MS - 90_000, state="resident", used_mib=10240, saved_mib=0),
        UsagePoint(at_ms=NOW_MS - 50_000, state="suspended", used_mib=0, saved_mib=10240),
        UsagePoint(at_ms=NOW_MS - 10_000, state="resident", used_mib=5120, saved_mib=0),
    ]
