"""`jupyter gpu resume`: bring a suspended kernel back onto a GPU ahead of its next cell."""

import argparse

from fractional_gpu.commands.leases.lease_calls import Move, configure_move, run_move

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu resume 3f2a               the beginning of the id is enough
  jupyter gpu resume --all              bring everything back, for instance before removing this package

Nothing needs this in daily use: the next cell of a kernel brings it back by itself. Without room it waits for its turn.
"""

MOVE = Move(
    verb="resume",
    doing="resuming",
    interrupted="gives its place in the queue up",
    call=lambda client, lease_id: client.resume(lease_id),
    applies=lambda lease: lease.state == "suspended",
    done=lambda lease: f"on the GPU ({lease.device_name})" if lease.device_name else "on the GPU",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Bring suspended kernels back onto a GPU; waits until there is room."
    parser.epilog = EPILOG
    configure_move(parser, MOVE.verb)


def run(options: argparse.Namespace) -> int:
    """Resume what the command line names."""
    return run_move(options, MOVE)
