"""`jupyter gpu pin`: keep a kernel on its GPU for a while, whoever waits."""

import argparse

from provisioner.commands.steering import configure_lease, parsed, steer
from provisioner.commands.words import lease_name
from provisioner.core.units import format_duration, parse_duration_ms
from provisioner.protocol.messages import LeaseStatus, PinRequest

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu pin 3f2a 30m              not suspended for others, nor for being idle, for half an hour
  jupyter gpu pin 3f2a 2h               a new pin replaces the one there was
  jupyter gpu unpin 3f2a                what is left of it goes back to your budget

A pool limits how long a pin may be, and how much pinned time each user has in a day. `jupyter gpu suspend` still works, and ends it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Keep a kernel on its GPU for a while: it is not suspended for others, nor for being idle."
    parser.epilog = EPILOG
    configure_lease(parser)
    parser.add_argument("duration", metavar="DURATION", help="how long, for example 30m or 2h")


def run(options: argparse.Namespace) -> int:
    """Pin the kernel."""
    duration_ms = parsed(parse_duration_ms, options.duration)
    request = PinRequest(duration_ms=duration_ms)
    return steer(options, "pinning", lambda client, lease_id: client.pin(lease_id, request), _said)


def _said(_: LeaseStatus, answer: LeaseStatus) -> str:
    stays = "stays on the GPU" if answer.state == "resident" else "will stay on the GPU once it is there,"
    return f"{lease_name(answer)}: {stays} for {format_duration(answer.pinned_ms)} from now"
