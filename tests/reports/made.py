"""Random reports: rows of leases and pools over some days, and the broker's answer to the finest question that a command asks."""

from hypothesis import strategies as st

from fractional_gpu.core.metering.usage import FIGURES, Party, Usage, UsageKey, UsageRow
from fractional_gpu.protocol.accounts import UsageReport
from fractional_gpu.reports.sums import columns_of, summed

BEGINS_S = 1_767_571_200  # Monday, 5 January 2026, UTC
NAMES = ("ada", "grace", "=1+1", "Zoë, <b>")
POOLS = {"large": "EUR", "small": "credits", "free": ""}
FINEST = ("hour", "user", "group", "pool", "device", "notebook", "lease")

figures = st.builds(
    lambda values: Usage(**dict(zip(FIGURES, values, strict=True))),
    st.lists(st.integers(0, 10**12), min_size=len(FIGURES), max_size=len(FIGURES)),
)


@st.composite
def rows(draw: st.DrawFn) -> UsageRow:
    """A row of a lease, or of a pool: then without an owner."""
    pool, hour = draw(st.sampled_from(sorted(POOLS))), draw(st.integers(0, 24 * 40))
    usage, device = draw(figures), draw(st.sampled_from(("", "gpu-0", "gpu-1")))
    owner = draw(st.sampled_from(("", *NAMES)))
    lease, group, label = (
        (
            draw(st.sampled_from(("a1", "b2", "c3"))),
            draw(st.sampled_from(("", "physics"))),
            draw(st.sampled_from(NAMES)),
        )
        if owner
        else ("", "", "")
    )
    seated = bool(owner) and draw(st.booleans())
    if not POOLS[pool]:
        usage.charge_milli = usage.resident_milli = usage.whole_milli = 0
    key = UsageKey(BEGINS_S + 3600 * hour, lease, device, POOLS[pool])
    return UsageRow(key, Party(pool=pool, owner=owner, group=group, label=label, seated=seated), usage)


def report_of(found: list[UsageRow], by: tuple[str, ...] = FINEST) -> UsageReport:
    return UsageReport(
        by=list(by),
        since_s=BEGINS_S,
        until_s=BEGINS_S + 41 * 86_400,
        entries=summed([(columns_of(row), row.usage) for row in found], by, carbon_of=lambda mj, _: mj // 7),
        simulated=False,
        scope="all",
        devices={"gpu-0": "NVIDIA H100"},
        carbon="as configured",
    )


reports = st.lists(rows(), max_size=8).map(report_of)
