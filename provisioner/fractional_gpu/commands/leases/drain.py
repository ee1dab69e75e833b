"""`jupyter gpu drain`: empty a GPU, for instance before it is exchanged or its driver is updated."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.leases.lease_calls import parsed, patience
from fractional_gpu.commands.terminal.completers import DEVICES, completed
from fractional_gpu.commands.terminal.connection import RUN_ONE, add_socket_argument, running_broker
from fractional_gpu.commands.terminal.failure import CommandError
from fractional_gpu.core.units import format_duration, format_memory, parse_duration_ms
from fractional_gpu.protocol.messages import DeviceStatus, DrainRequest

__all__ = ["NO_DEVICES", "await_empty", "configure", "configure_device", "run"]

NO_DEVICES = f"and without one no GPU takes kernels or is drained; {RUN_ONE}"

INTERVAL_S = 0.5
EPILOG = """\
examples:
  jupyter gpu drain 0                   no kernel comes to GPU 0 any more; idle ones leave it now, busy ones after their cell
  jupyter gpu drain 0 --evict-busy      busy ones leave it at once, in the middle of their cell, and go on elsewhere or later
  jupyter gpu drain 0 --wait 10m        return when nobody is left; exit code 1 if somebody is after ten minutes
  jupyter gpu undrain 0                 the GPU takes part again

Nothing is lost: what leaves is saved in host memory. It stays drained, over restarts of the broker too. For administrators.
"""


def configure_device(parser: argparse.ArgumentParser) -> None:
    """Add the device, `--json` and `--socket`."""
    device = parser.add_argument(
        "device",
        metavar="DEVICE",
        help="a GPU by its number, its id, or the beginning of one (see `jupyter gpu status`)",
    )
    completed(device, DEVICES)
    parser.add_argument("--json", action="store_true", help="print the device as JSON")
    add_socket_argument(parser)


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Empty a GPU: it admits no kernel any more, and those on it are suspended."
    parser.epilog = EPILOG
    configure_device(parser)
    parser.add_argument("--evict-busy", action="store_true", help="do not wait for the cells that run there")
    parser.add_argument("--wait", metavar="DURATION", help="return when the GPU is empty, after so long at the latest")


def run(options: argparse.Namespace) -> int:
    """Drain the device. Exit code 1 if it was to be waited for and did not become empty."""
    wait_ms = None if options.wait is None else parsed(parse_duration_ms, options.wait)
    with running_broker(options.socket, without=NO_DEVICES) as client:
        device = client.drain(options.device, DrainRequest(evict_busy=options.evict_busy))
        if wait_ms is not None:
            with patience(f"waiting until GPU {device.index} is empty ... (Ctrl-C stops the waiting)", sys.stderr):
                device = await_empty(client, device, wait_ms)
    print(json.dumps(asdict(device)) if options.json else _said(device))
    if wait_ms is not None and device.reserved_mib:
        raise CommandError(
            f"GPU {device.index} was not empty after {format_duration(wait_ms)}: {format_memory(device.reserved_mib)} are still held; "
            "wait longer, or add --evict-busy"
        )
    return 0


def await_empty(
    client: BrokerClient,
    device: DeviceStatus,
    wait_ms: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> DeviceStatus:
    """Return the device when no lease holds anything there, or as it is after `wait_ms`."""
    end_s = clock() + wait_ms / 1000
    while device.reserved_mib and clock() < end_s:
        pause(min(INTERVAL_S, max(0.0, end_s - clock())))
        device = next((one for one in client.status().devices if one.device_id == device.device_id), device)
    return device


def _said(device: DeviceStatus) -> str:
    left = f"{format_memory(device.reserved_mib)} are still held there" if device.reserved_mib else "nobody is there"
    return f"GPU {device.index} ({device.name}): draining, {left}"
