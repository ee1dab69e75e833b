"""Devices or hosts that go away in a simulated run: the options, and the table of what would be lost."""

import argparse
from typing import TYPE_CHECKING, Any

from fractional_gpu.commands.simulation.machine import parsed
from fractional_gpu.commands.terminal.errors import UsageError
from fractional_gpu.commands.terminal.layout import fitted, table
from fractional_gpu.core.units import parse_duration_ms, plural
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.revocation.lifetimes import PUBLISHED, lifetimes_of
from fractional_gpu.simulator.revocation.revocations import Revocation

if TYPE_CHECKING:
    from rich.text import Text

_USUAL_KIND = "v100"
_USUAL = {"revoke_what": "devices", "revoke_notice": "30s", "revoke_replace": "87s"}
_LONGEST_NOTICE_MS = 3_600_000


def configure_revocation(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    group = parser.add_argument_group("devices or hosts that go away")
    group.add_argument(
        "--revoke",
        nargs="?",
        const=_USUAL_KIND,
        metavar="KIND",
        help="devices leave after published lifetimes of transient servers, and others take their places; KIND: "
        f"{', '.join(PUBLISHED)}, or one of these in a region such as v100/us-west1 (default: {_USUAL_KIND})",
    )
    group.add_argument(
        "--revoke-what",
        choices=["devices", "hosts"],
        help="devices leave, each by itself, and the host's memory stays (default), or hosts with all their devices and memory",
    )
    group.add_argument(
        "--revoke-notice", metavar="TIME", help="so long before, it is known (default: 30s; 0: it is not known before)"
    )
    group.add_argument("--revoke-replace", metavar="TIME", help="until another is there (default: 87s)")


def read_revocation(options: argparse.Namespace) -> Revocation | None:
    """Return what goes away; None: nothing does. Raises UsageError."""
    given = [name for name in _USUAL if getattr(options, name) is not None]
    if options.revoke is None:
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} needs --revoke, without which nothing goes away")
        return None
    others = {"--find-devices": options.find_devices, "--baseline": options.baseline, "--place": options.place}
    for option, value in others.items():
        if value:
            raise UsageError(
                f"--revoke is for one run with the arbiter on one clock, and not for {option}; leave one out"
            )
    try:
        lifetimes = lifetimes_of(options.revoke)
    except SimulationError as error:
        raise UsageError(f"--revoke: {error}") from error
    said = {name: getattr(options, name) or usual for name, usual in _USUAL.items()}
    notice_ms = parsed("--revoke-notice", parse_duration_ms, said["revoke_notice"])
    if notice_ms > _LONGEST_NOTICE_MS:
        raise UsageError(f"--revoke-notice {said['revoke_notice']} is not allowed; a time up to 1h is, or 0")
    return Revocation(
        lifetimes=lifetimes,
        whole_hosts=said["revoke_what"] == "hosts",
        notice_ms=notice_ms,
        replace_ms=parsed("--revoke-replace", parse_duration_ms, said["revoke_replace"]),
        seed=options.seed,
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
