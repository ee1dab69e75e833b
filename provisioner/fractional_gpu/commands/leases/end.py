"""`jupyter gpu end`: end the processes that a kernel left on a device when it ended."""

import argparse
from dataclasses import replace

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.leases.lease_calls import configure_lease, steer
from fractional_gpu.commands.terminal.connection import running_broker
from fractional_gpu.commands.terminal.failure import CommandError
from fractional_gpu.commands.terminal.render import lease_name
from fractional_gpu.protocol.messages import Done, LeaseStatus

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu status                    lists them: "its kernel has ended, and process 4242 (python train.py) ..."
  jupyter gpu end 3f2a                  end all that the kernel of this lease left behind
  jupyter gpu end 4242                  the same, by one of its processes

  jupyter gpu end 3f2a                  on a hub: end a kernel of yours whose own server has ended

They are asked to end (SIGTERM), and made to 5 seconds later (SIGKILL). What other kernels run is left alone.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "End processes with GPU memory that outlived the kernel that started them, or a kernel that outlived its hub server. "
        "Your own; administrators: anybody's."
    )
    parser.epilog = EPILOG
    configure_lease(parser)


def run(options: argparse.Namespace) -> int:
    """End what the kernel left behind. Raises CommandError where there is nothing."""
    with running_broker(options.socket) as client:
        options.lease = _lease_of(options.lease, client.status().leases)

    def end(client: BrokerClient, lease_id: str) -> Done:
        client.end_left(lease_id)
        return Done()

    return steer(options, "ending what is left of", end, _told)


def _lease_of(word: str, leases: list[LeaseStatus]) -> str:
    """Return the lease that left the process of this number behind; what names none is a lease, or the beginning of one."""
    for lease in leases:
        if any(str(process.pid) == word for process in lease.left):
            return lease.lease_id
    if word.isdecimal() and not any(
        lease.lease_id.startswith(word) or lease.kernel_id.startswith(word) for lease in leases
    ):
        left = ", ".join(str(process.pid) for lease in leases for process in lease.left) or "none"
        raise CommandError(
            f"process {word} is none that a kernel of yours left behind; there are: {left} (see `jupyter gpu status`)"
        )
    return word


def _told(before: LeaseStatus, _: Done) -> str:
    if not before.left:
        return f"{lease_name(before)}: ended"
    processes = ", ".join(f"process {one.pid}" for one in before.left)
    return f"{lease_name(replace(before, left=[]))}: {processes} ended; the room is free"
