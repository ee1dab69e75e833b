"""`jupyter gpu unpin`: end a kernel's pin."""

import argparse

from fractional_gpu.commands.leases.lease_calls import configure_lease, steer
from fractional_gpu.commands.terminal.render import lease_name

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu unpin 3f2a                the kernel may be suspended again when it idles

What is left of the pin goes back to your budget. A kernel that is not pinned is no error.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "End a kernel's pin."
    parser.epilog = EPILOG
    configure_lease(parser)


def run(options: argparse.Namespace) -> int:
    """Unpin the kernel."""
    return steer(
        options,
        "unpinning",
        lambda client, lease_id: client.unpin(lease_id),
        lambda before, _: (
            f"{lease_name(before)}: no longer pinned" if before.pinned_ms else f"{lease_name(before)}: was not pinned"
        ),
    )
