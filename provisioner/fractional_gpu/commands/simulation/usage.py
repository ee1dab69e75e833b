"""What the leases of a simulated run use: the options of the meter, and what it came to."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fractional_gpu.commands.simulation.load import percent
from fractional_gpu.commands.simulation.machine import MachineOptions
from fractional_gpu.commands.terminal.errors import UsageError
from fractional_gpu.commands.terminal.layout import table
from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR, Usage
from fractional_gpu.simulator.metering.run_meter import Metering, Power, RunMeter
from fractional_gpu.simulator.traces import Session

if TYPE_CHECKING:
    from rich.text import Text

_POWER = re.compile(r"(\d{1,4})-(\d{1,4})", re.ASCII)
_USUAL = Power()
NO_INPUT = frozenset(["meter", "usage", "power", "power_noise", "measured_use"])
"""Options by which none of a run's other figures changes."""


def configure_usage(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the meter."""
    group = parser.add_argument_group("what the leases use, as the broker meters it")
    group.add_argument(
        "--meter",
        action="store_true",
        help="count device time, energy and charges of each pool, by the prices of --policy",
    )
    group.add_argument(
        "--usage",
        type=Path,
        metavar="FILE",
        help="write all rows of the meter there, as JSON (with all that --meter does)",
    )
    group.add_argument(
        "--power",
        metavar="IDLE-PEAK",
        help=f"what each device draws, W (default: {_USUAL.idle_mw // 1000}-{_USUAL.peak_mw // 1000})",
    )
    group.add_argument(
        "--power-noise",
        type=percent,
        metavar="PERCENT",
        help="by which draws and measured uses differ from what they should be (default: 0)",
    )
    group.add_argument(
        "--measured-use",
        type=percent,
        metavar="PERCENT",
        help="of the kernels, whose use of their device is measured; of the others the share is known alone (default: 100)",
    )


def read_meter(options: argparse.Namespace, machine: MachineOptions) -> RunMeter | None:
    """Return the meter of the run, if one is asked for. Raises UsageError."""
    if not options.meter and options.usage is None:
        for name in ("power", "power_noise", "measured_use"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise UsageError(
                    f"{option} {getattr(options, name)} needs --meter or --usage FILE: without them nothing is metered"
                )
        return None
    asked = "--meter" if options.usage is None else "--usage"
    if options.find_devices:
        raise UsageError(f"{asked} meters one run, and --find-devices makes several; find first, then meter")
    if options.place is not None:
        raise UsageError(
            f"{asked} needs all hosts on one clock, and --place {options.place} has none; say --door, or nothing"
        )
    settings = machine.settings
    return RunMeter(
        Metering(
            tariffs={pool.name: pool.tariff for pool in settings.pools} if settings is not None else {},
            power=_power(options.power) if options.power is not None else _USUAL,
            noise_percent=options.power_noise or 0,
            measured_percent=100 if options.measured_use is None else options.measured_use,
            seed=options.seed,
        )
    )


def _power(text: str) -> Power:
    match = _POWER.fullmatch(text.strip())
    idle, peak = (int(match[1]), int(match[2])) if match else (1, 0)
    if idle > peak:
        raise UsageError(f"--power {text[:40]!r} is not allowed; IDLE-PEAK in W, such as 75-700, is")
    return Power(idle_mw=idle * 1000, peak_mw=peak * 1000)


def check_pools(options: argparse.Namespace, trace: list[Session]) -> None:
    """Refuse what runs all sessions in one pool where some name another. Raises UsageError."""
    pool = next((session.pool for session in trace if session.pool), None)
    if pool is None:
        return
    asked = {
        "--baseline": options.baseline and options.baseline[0],
        "--find-devices": options.find_devices,
        "--place": options.place,
    }
    for option, value in asked.items():
        if value:
            raise UsageError(
                f"{option} knows the default pool only, and sessions run in pool {pool!r}, too; leave one of the two out"
            )


def usage_figures(meter: RunMeter) -> dict[str, dict[str, Any]]:
    """Return what `--json` says under `usage`: the sums of each pool, and the part of them that no lease had."""
    found: dict[str, dict[str, Any]] = {}
    for pool, (currency, usage) in meter.totals().items():
        unheld = Usage()
        for row in meter.rows():
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
