"""`jupyter gpu suspend`: save a kernel's GPU memory on the host and free the GPU. The next cell brings it back."""

import argparse

from fractional_gpu.commands.leases.lease_calls import Move, configure_move, run_move
from fractional_gpu.core.units import format_memory
from fractional_gpu.protocol.messages import LeaseStatus

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu suspend 3f2a              the beginning of the id is enough
  jupyter gpu suspend --all             free the GPUs, for instance before an update of the driver

A suspended kernel keeps every variable; its next cell brings it back by itself. A kernel that is busy is not suspended.
"""


def _done(lease: LeaseStatus) -> str:
    if lease.saved_mib:
        return f"suspended, {format_memory(lease.saved_mib)} saved in host memory"
    return "holds no GPU memory, so there was nothing to save"


MOVE = Move(
    verb="suspend",
    doing="suspending",
    interrupted="stops the waiting; a suspend that has begun goes on",
    call=lambda client, lease_id: client.suspend(lease_id),
    applies=lambda lease: lease.state == "resident",
    done=_done,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Save the GPU memory of idle kernels in host memory and free the GPU for others."
    parser.epilog = EPILOG
    configure_move(parser, MOVE.verb)


def run(options: argparse.Namespace) -> int:
    """Suspend what the command line names."""
    return run_move(options, MOVE)
