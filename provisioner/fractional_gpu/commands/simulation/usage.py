"""What the leases of a simulated run use: the meter, and what it came to."""

import re
from typing import TYPE_CHECKING, Any

from fractional_gpu.commands.simulation.machine import MachineOptions
from fractional_gpu.commands.simulation.scenario import Scenario
from fractional_gpu.commands.terminal.text import UsageError, table
from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR, Usage
from fractional_gpu.simulator.metering import Metering, Power, RunMeter
from fractional_gpu.simulator.traces import Session

if TYPE_CHECKING:
    from rich.text import Text

_POWER = re.compile(r"(\d{1,4})-(\d{1,4})", re.ASCII)


def read_meter(scenario: Scenario, machine: MachineOptions) -> RunMeter | None:
    """Return the meter of the run, if one is asked for. Raises UsageError."""
    if not scenario.meter and scenario.usage is None:
        return None
    settings = machine.settings
    return RunMeter(
        Metering(
            tariffs={pool.name: pool.tariff for pool in settings.pools} if settings is not None else {},
            power=_power(scenario.power),
            noise_percent=scenario.power_noise,
            measured_percent=scenario.measured_use,
            seed=scenario.seed,
        )
    )


def _power(text: str) -> Power:
    match = _POWER.fullmatch(text.strip())
    idle, peak = (int(match[1]), int(match[2])) if match else (1, 0)
    if idle > peak:
        raise UsageError(f"power={text[:40]!r} is not allowed; IDLE-PEAK in W, such as 75-700, is")
    return Power(idle_mw=idle * 1000, peak_mw=peak * 1000)


def check_pools(scenario: Scenario, trace: list[Session]) -> None:
    """Refuse what runs all sessions in one pool if some name another. Raises UsageError."""
    pool = next((session.pool for session in trace if session.pool), None)
    for name in ("baselines", "find_devices", "place"):
        if pool is not None and getattr(scenario, name):
            raise UsageError(
                f"{name} knows the default pool only, and sessions run in pool {pool!r}, too; leave one of the two out"
            )


def usage_figures(meter: RunMeter) -> dict[str, dict[str, Any]]:
    """Return what `--json` says under `usage`: the sums of each pool, and the part of them that no lease had."""
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
    """Return the same as a table, a pool a column. `width`: of the terminal, in characters."""
    names = list(next(iter(figures.values()), {}))
    rows = [[name, *(_shown(pool[name]) for pool in figures.values())] for name in names]
    header = ["", *figures]
    return table(header, rows, indent="", width=width, figures_from=1)


def _shown(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value) or "-"
