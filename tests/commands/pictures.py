"""Devices and leases as a broker would tell them, with plain defaults for what a test does not care about."""

from msgspec.structs import replace

from fractional_gpu.protocol.status import DeviceStatus, HostStatus, LeaseStatus
from tests.support.statuses import a_status, changed

_DEVICE = DeviceStatus(
    device_id="GPU-0001",
    index=0,
    name="NVIDIA L4",
    pool="default",
    memory_mib=24_576,
    leasable_mib=24_000,
    used_mib=0,
    reserved_mib=0,
    stranger_mib=0,
    over_committed=False,
    lost=False,
)
_LEASE = a_status(
    lease_id="3f2a9c1b77d0",
    state="resident",
    pool="default",
    owner="ada",
    label="",
    kernel_id="kernel-1",
    pid=4711,
    fraction_milli=250,
    reserve_mib=6000,
    used_mib=2048,
    saved_mib=0,
    device_id="GPU-0001",
    device_name="NVIDIA L4",
    simulated=False,
    busy=False,
    gated=True,
    age_ms=12_000,
    reason="",
    sentence="",
)
_HOST = HostStatus(
    version="0.1.0",
    pid=100,
    simulated=False,
    socket="/run/user/1000/broker.sock",
    host_budget_mib=32_768,
    host_saved_mib=0,
    devices=[],
    leases=[],
)


def a_device(**differences: object) -> DeviceStatus:
    return replace(_DEVICE, **differences)


def a_lease(**differences: object) -> LeaseStatus:
    return changed(_LEASE, **differences)


def a_host(**differences: object) -> HostStatus:
    return replace(_HOST, **differences)
