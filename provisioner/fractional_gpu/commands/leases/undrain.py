"""`jupyter gpu undrain`: let a GPU take part again that was drained."""

import argparse
import json
from dataclasses import asdict

from fractional_gpu.commands.leases.drain import NO_DEVICES, configure_device
from fractional_gpu.commands.terminal.connection import running_broker

__all__ = ["configure", "run"]

EPILOG = """\
examples:
  jupyter gpu undrain 0                 kernels may come to GPU 0 again

A GPU that is not drained is no error. For administrators.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Let a GPU take part again that was drained."
    parser.epilog = EPILOG
    configure_device(parser)


def run(options: argparse.Namespace) -> int:
    """Undrain the device."""
    with running_broker(options.socket, without=NO_DEVICES) as client:
        device = client.undrain(options.device)
    print(json.dumps(asdict(device)) if options.json else f"GPU {device.index} ({device.name}): takes part again")
    return 0
