"""Devices or hosts that go away in a simulated run: the settings, and the table of what would be lost."""

from typing import TYPE_CHECKING, Any

from fractional_gpu.commands.simulation.scenario import Scenario
from fractional_gpu.commands.terminal.text import UsageError, fitted, table
from fractional_gpu.core.units import plural
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.revocation import Revocation, lifetimes_of

if TYPE_CHECKING:
    from rich.text import Text


def read_revocation(scenario: Scenario) -> Revocation | None:
    """Return what goes away; None: nothing does. Raises UsageError."""
    if scenario.revoke is None:
        return None
    try:
        lifetimes = lifetimes_of(scenario.revoke)
    except SimulationError as error:
        raise UsageError(f"revoke: {error}") from error
    return Revocation(
        lifetimes=lifetimes,
        whole_hosts=scenario.revoke_what == "hosts",
        notice_ms=scenario.revoke_notice,
        replace_ms=scenario.revoke_replace,
        seed=scenario.seed,
    )


def revocation_text(figures: dict[str, Any], width: int | None = None) -> "list[Text]":
    """Return the figures, with a table in which a way to use the notice is a row. `width`: of the terminal, in characters."""
    there = figures["on_them"]
    header = ("not saved by the deadline", "kernels", "GiB", "busy GPU hours", "value")
    rows = [
        (
            name,
            f"{loss['kernels']:,}",
            f"{loss['gib']:,.1f}",
            f"{loss['busy_gpu_hours']:,.2f}",
            f"{loss['value_percent']:.1f} %",
        )
        for name, loss in figures["unsaved"].items()
    ]
    before = (
        f"{plural(figures['devices'], 'device')} went away, after {plural(figures['notices'], 'notice')}; "
        f"on them were {plural(there['kernels'], 'kernel')} with "
        f"{there['gib']:,.1f} GiB and the work of {there['busy_gpu_hours']:,.2f} busy GPU hours"
    )
    after = []
    if (lost := figures.get("lost_with_the_hosts")) is not None:
        after.append(
            f"With the hosts' memory all of it is lost, in every order, and what was suspended before: "
            f"{plural(lost['kernels'], 'kernel')} with "
            f"{lost['gib']:,.1f} GiB and the work of {lost['busy_gpu_hours']:,.2f} busy GPU hours. A snapshot of the hosts would keep what "
            "is not in the table."
        )
    return [
        *fitted([before], width),
        *table(header, rows, indent="", width=width, figures_from=1),
        *fitted(after, width),
    ]
