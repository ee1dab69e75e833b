"""`jupyter gpu evict`: end somebody's kernel and free what it holds. For administrators."""

import argparse

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.leases.lease_calls import configure_lease, steer
from fractional_gpu.commands.terminal.failure import UsageError
from fractional_gpu.commands.terminal.render import lease_name
from fractional_gpu.protocol.messages import Done, EvictRequest

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu suspend 3f2a              frees the GPU just as well, and loses nothing: try this first
  jupyter gpu evict 3f2a --confirm      ends the kernel's processes; all its variables are lost

Its notebook shows that the kernel died; a Jupyter server may start a fresh one in its place, which says who ended the last one and why.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "End a kernel and its lease. All its variables are lost. For administrators."
    parser.epilog = EPILOG
    configure_lease(parser)
    parser.add_argument("--confirm", action="store_true", help="say that the kernel's state may be lost")
    parser.add_argument("--why", metavar="TEXT", default="", help="the reason; the kernel's user is told it")


def run(options: argparse.Namespace) -> int:
    """Evict the kernel. Raises UsageError without --confirm."""
    if not options.confirm:
        raise UsageError(
            "evicting ends the kernel, and all its variables are lost: add --confirm if that is meant "
            "(`jupyter gpu suspend` frees the GPU and keeps them)"
        )

    def evict(client: BrokerClient, lease_id: str) -> Done:
        client.evict(lease_id, EvictRequest(confirm=True, why=options.why))
        return Done()

    return steer(options, "evicting", evict, lambda before, _: f"{lease_name(before)}: ended")
