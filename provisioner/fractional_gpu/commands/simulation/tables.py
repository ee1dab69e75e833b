"""Additional tables for `jupyter gpu simulate`, showing what leases used, what could be lost, and what a ledger recorded."""

from typing import TYPE_CHECKING, Any

from fractional_gpu.commands.terminal.text import table
from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR, Usage
from fractional_gpu.simulator.experience import Spread
from fractional_gpu.simulator.metering import RunMeter

if TYPE_CHECKING:
    from rich.text import Text


def usage_figures(meter: RunMeter) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for pool, (currency, usage) in meter.totals().items():
        unheld = Usage()
        for row in meter.rows:
            if row.party.pool == pool and not row.key.lease_id:
                unheld.add(row.usage)
        found[pool] = {
            "device_hours": round(usage.occupied_us / 3.6e9, 3),
            "unheld_device_hours": round(unheld.occupied_us / 3.6e9, 3),
            "reserved_gpu_hours": round(usage.reserved_share / SHARE_HOUR, 3),
            "held_gpu_hours": round(usage.held_share / SHARE_HOUR, 3),
            "busy_gpu_hours": round(usage.busy_share / SHARE_HOUR, 3),
            "suspended_gpu_hours": round(usage.suspended_share / SHARE_HOUR, 3),
            "energy_kwh": round(usage.energy_mj / MJ_PER_KWH, 3),
            "unheld_energy_kwh": round(unheld.energy_mj / MJ_PER_KWH, 3),
            "charged": round(usage.charge_milli / 1000, 3),
            "charged_if_resident": round(usage.resident_milli / 1000, 3),
            "charged_for_whole_devices": round(usage.whole_milli / 1000, 3),
            "currency": currency,
        }
    return found


def usage_table(figures: dict[str, dict[str, Any]], width: int | None = None) -> "list[Text]":
    def shown(value: object) -> str:
        return f"{value:,.2f}" if isinstance(value, float) else str(value) or "-"

    names = list(next(iter(figures.values()), {}))
    rows = [[name, *(shown(pool[name]) for pool in figures.values())] for name in names]
    return table(["", *figures], rows, indent="", width=width, figures_from=1)


def compared(recorded: Spread, simulated: Spread) -> dict[str, object]:
    """Return a summary of the recorded waits in seconds, the percentage of cells that waited, and the simulation's mean error.

    `mean_error_s` is the mean distance between the quantiles of the recorded and simulated waits (the Wasserstein distance).
    """
    steps = range(1, 100)
    apart = [abs(recorded.percentile_ms(one) - simulated.percentile_ms(one)) for one in steps]
    return {
        "wait_s": recorded.summary(),
        "waited_percent": recorded.nonzero_percent(),
        "mean_error_s": round(sum(apart) / len(apart) / 1000, 3),
    }


def compared_text(recorded: Spread, simulated: Spread) -> list[str]:
    lines = [
        f"waits {name}: median {one.percentile_ms(50) / 1000:g} s, p95 {one.percentile_ms(95) / 1000:g} s, "
        f"p99 {one.percentile_ms(99) / 1000:g} s; {one.nonzero_percent():g} % of the cells waited"
        for name, one in (("recorded", recorded), ("simulated", simulated))
    ]
    off = compared(recorded, simulated)["mean_error_s"]
    return [*lines, f"{off:g} s apart, as the mean over the percentiles"]
