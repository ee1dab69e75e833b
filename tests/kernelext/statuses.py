"""Sample broker statuses, for tests of what is shown."""

from fractional_gpu.core.forecasts.advice import Advice, Risk, Verdict
from fractional_gpu.core.forecasts.habits import Share
from fractional_gpu.core.metering.usage import HOUR_MS, SHARE_HOUR, Usage
from fractional_gpu.protocol.accounts import BudgetStatus, Cost, UsageEntry
from fractional_gpu.protocol.status import DeviceStatus, HostStatus, LeaseStatus, Neighbour, ShareAdvice, UsagePoint
from tests.support.statuses import a_status

__all__ = ["ADVICE", "COST", "DEVICE", "EVIL", "LEASE", "NOW_MS", "UNPRICED", "host", "points"]

EVIL = "<script>alert('x')</script>"
NOW_MS = 1_790_000_000_000

LEASE = a_status(
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

_RISK = Risk(share=Share(125, 10240), short_days=0, unknown_days=0, days=12, short_milli=71, slowed_milli=1000)
ADVICE = ShareAdvice(
    pool="default",
    owner="me",
    notebook="train.ipynb",
    figures=Advice(
        verdict=Verdict.SMALLER,
        present=_RISK,
        risk=_RISK,
        smaller=None,
        days=12,
        peak_mib=8192,
        busy_ms=3_600_000,
        held_ms=7_200_000,
        gaps=20,
        use_milli=150,
        growth_milli=0,
    ),
    sentence="1/8 GPU (10 GiB) would suffice: at most 8 GiB of 20 GiB was used on 12 days",
    brief="1/8 GPU (10 GiB) would have been enough on 12 of 12 days",
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


def _used(hours: float, currency: str = "EUR", **more: int) -> UsageEntry:
    """A quarter of a GPU for this many hours, at 0.80 an hour: half of the time suspended, a fifth of it busy."""
    share = round(hours * SHARE_HOUR / 4)
    usage = Usage(
        reserved_ms=round(hours * HOUR_MS),
        reserved_share=share,
        held_share=share // 2,
        suspended_share=share // 2,
        busy_share=share // 5,
        charged_share=share // 2,
        charge_milli=round(hours * 100) if currency else 0,
        resident_milli=round(hours * 200) if currency else 0,
        whole_milli=round(hours * 800) if currency else 0,
        energy_mj=more.pop("energy_mj", 0),
    )
    return UsageEntry(of={}, currency=currency, usage=usage, **more)


COST = Cost(
    lease_id="lease-1",
    pool="default",
    simulated=False,
    lease=[_used(1.5, energy_mj=500_000_000, carbon_mg=48_600)],
    today=[_used(4, energy_mj=1_200_000_000, carbon_mg=116_667)],
    month=[_used(12_345.5, energy_mj=5_000_000_000_000, carbon_mg=486_000_000), _used(2, "USD")],
    terms="A whole GPU costs 0.80 EUR per hour; the time during which a kernel has memory on a GPU counts, and suspended time costs "
    "nothing.",
    now_milli=200,
    currency="EUR",
    carbon="350 g CO2 per kWh, as configured",
    budgets=[
        BudgetStatus(
            kind="user",
            name="me",
            text="40 GPU hours per month",
            unit="gpu-hours",
            currency="",
            amount=40 * SHARE_HOUR,
            spent=34 * SHARE_HOUR,
            left=6 * SHARE_HOUR,
            amount_text="40 GPU hours",
            spent_text="34 GPU hours",
            left_text="6 GPU hours",
            since_s=0,
            until_s=None,
            warned=True,
            used_up=False,
            sentence="Your budget of 40 GPU hours per month: 34 GPU hours spent (85 %); it resets on 1 December.",
        )
    ],
)
UNPRICED = Cost(
    lease_id="lease-1",
    pool="default",
    simulated=True,
    lease=[],
    today=[_used(0.75, "")],
    month=[_used(40, "")],
    terms="No price is set; the time during which a kernel has memory on a GPU counts, and suspended time costs nothing.",
)


def host(*leases: LeaseStatus, devices: tuple[DeviceStatus, ...] = (DEVICE,)) -> HostStatus:
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
