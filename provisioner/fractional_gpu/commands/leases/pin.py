"""`jupyter gpu pin`: keep a kernel on its GPU for a while, whoever waits."""

import argparse

from fractional_gpu.commands.leases.lease_calls import configure_lease, steer
from fractional_gpu.commands.terminal.completers import DURATIONS, completed
from fractional_gpu.commands.terminal.failure import UsageError
from fractional_gpu.commands.terminal.render import lease_name
from fractional_gpu.core.units import format_duration, parse_duration_ms
from fractional_gpu.protocol.messages import LeaseStatus, PinRequest

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
    duration = parser.add_argument("duration", metavar="DURATION", nargs="?", help="how long, for example 30m or 2h")
    completed(duration, DURATIONS)


def run(options: argparse.Namespace) -> int:
    """Pin the kernel."""
    request = PinRequest(duration_ms=_duration_ms(options.lease, options.duration))
    return steer(options, "pinning", lambda client, lease_id: client.pin(lease_id, request), _said)


def _duration_ms(lease: str, text: str | None) -> int:
    """Return how long the pin is to last, milliseconds. Raises UsageError: a pin lasts for more than no time, and not for ever."""
    if text is None:
        raise UsageError(
            f"say for how long: `jupyter gpu pin LEASE 30m`; given: {lease[:80]!r} alone (`jupyter gpu status` lists the leases)"
        )
    try:
        duration_ms = parse_duration_ms(text)
    except ValueError:
        duration_ms = 0
    if duration_ms:
        return duration_ms
    raise UsageError(
        f"{text[:80]!r} is not how long a pin can last; allowed: a duration such as 30m or 2h. `jupyter gpu unpin` ends a pin; "
        "`%gpu pin always` in the notebook renews one until it is ended"
    )


def _said(_: LeaseStatus, answer: LeaseStatus) -> str:
    stays = "stays on the GPU" if answer.state == "resident" else "will stay on the GPU once it is there,"
    return f"{lease_name(answer)}: {stays} for {format_duration(answer.pinned_ms)} from now"
