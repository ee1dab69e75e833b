"""`jupyter gpu resize`: give a running kernel another share of a GPU."""

import argparse

from fractional_gpu.commands.leases.lease_calls import configure_lease, parsed, steer
from fractional_gpu.commands.terminal.completers import FRACTIONS, completed
from fractional_gpu.commands.terminal.failure import UsageError
from fractional_gpu.commands.terminal.render import lease_name
from fractional_gpu.core.units import (
    format_fraction,
    format_memory,
    parse_duration_ms,
    parse_fraction_milli,
    parse_memory_mib,
)
from fractional_gpu.protocol.messages import LeaseStatus, ResizeRequest

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu resize 3f2a 1/2           half a GPU, and half of its memory
  jupyter gpu resize 3f2a --memory 30GiB
  jupyter gpu resize 3f2a 1/8 --wait 0  now or not at all

The kernel keeps running. A larger share waits until there is room beside its neighbours: idle ones step aside, and an idle kernel may
move to another GPU where the pool allows that. A smaller one must hold what the kernel uses.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Give a running kernel another share of a GPU, without a restart."
    parser.epilog = EPILOG
    configure_lease(parser)
    fraction = parser.add_argument(
        "fraction", metavar="FRACTION", nargs="?", help="the share, for example 1/2, 0.25 or 250m"
    )
    completed(fraction, FRACTIONS)
    parser.add_argument(
        "--memory", metavar="SIZE", help="device memory, for example 20GiB (default: the fraction's share)"
    )
    parser.add_argument("--wait", metavar="DURATION", default="10m", help="how long to wait for room (default: 10m)")


def run(options: argparse.Namespace) -> int:
    """Resize the kernel."""
    if options.fraction is None and options.memory is None:
        raise UsageError("say the new size: a FRACTION such as 1/2, --memory such as 20GiB, or both")
    request = ResizeRequest(
        fraction_milli=None if options.fraction is None else parsed(parse_fraction_milli, options.fraction),
        memory_mib=None if options.memory is None else parsed(parse_memory_mib, options.memory),
        wait_ms=parsed(parse_duration_ms, options.wait),
    )
    return steer(options, "resizing", lambda client, lease_id: client.resize(lease_id, request), _said)


def _said(before: LeaseStatus, after: LeaseStatus) -> str:
    return f"{lease_name(after)}: {_size(before)} before, {_size(after)} now"


def _size(lease: LeaseStatus) -> str:
    return f"{format_fraction(lease.fraction_milli)} of a GPU with {format_memory(lease.reserve_mib)}"
