"""`jupyter gpu move`: have an idle kernel go to another GPU of its pool. For administrators."""

import argparse

from fractional_gpu.commands.leases.lease_calls import configure_lease, steer
from fractional_gpu.commands.terminal.render import lease_name
from fractional_gpu.protocol.messages import MoveRequest

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu move 3f2a                 to any other GPU of its pool that has room
  jupyter gpu move 3f2a --to 1          to GPU 1 (a number, an id or the beginning of one)

The kernel keeps every variable: its state goes through host memory. One that runs a cell is not moved. A pin ends.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Have an idle kernel go to another GPU of its pool. For administrators."
    parser.epilog = EPILOG
    configure_lease(parser)
    parser.add_argument("--to", metavar="DEVICE", help="the GPU; without it, the one of the pool that has most room")


def run(options: argparse.Namespace) -> int:
    """Move the kernel."""
    return steer(
        options,
        "moving",
        lambda client, lease_id: client.move(lease_id, MoveRequest(device=options.to)),
        lambda before, after: f"{lease_name(before)}: is on {after.device_id} now",
    )
