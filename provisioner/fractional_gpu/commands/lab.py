"""`jupyter gpu lab` starts JupyterLab with kernels on fractions of a GPU, without installing kernelspecs.

The kernelspecs are in a private folder that only this JupyterLab reads. With `--simulate`, JupyterLab also gets its own broker, so that
experiments never touch the one that manages the real GPUs.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fractional_gpu.client.discovery import runtime_dir, socket_path
from fractional_gpu.commands.kernels import install_offers, simulated_devices
from fractional_gpu.commands.terminal.arguments import Parser, checked_simulate, require_packages
from fractional_gpu.commands.terminal.connection import LONGEST_SOCKET, started_broker
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.render import describe_device
from fractional_gpu.commands.terminal.text import CommandError, say
from fractional_gpu.protocol.status import HostStatus

EPILOG = """\
examples:
  jupyter gpu lab                              use this machine's GPUs
  jupyter gpu lab --simulate 1x2GiB            try it without a GPU
  jupyter gpu lab --no-browser --port 9999     all other arguments go to JupyterLab

This installs nothing: the kernels are in a private folder that only this JupyterLab sees. To add them to every
JupyterLab of this environment, run `jupyter gpu kernels install`.
"""


def configure(parser: Parser) -> None:
    parser.usage = "jupyter gpu lab [--help] [--simulate COUNTxMEMORY] [arguments of jupyter lab ...]"
    parser.describe("Start JupyterLab with kernels on fractions of a GPU.", EPILOG)
    parser.argument("--simulate", "COUNTxMEMORY", "use a separate broker with simulated GPUs, such as 1x2GiB")


def run(options: argparse.Namespace) -> int:
    require_packages("jupyterlab")
    simulate = checked_simulate(options.simulate)
    data, socket = _locate(simulate)
    if simulate:
        os.environ["JUPYTER_GPU_SIMULATE"] = simulate  # the broker that is started now reads it
    with started_broker(socket) as broker:
        status = broker.status()
    with Progress("preparing the kernels ...", silent=True):
        specs, _ = install_offers(
            status.pools,
            directory=str(data / "kernels"),
            simulated=status.simulated,
            simulate=simulated_devices(status),
        )
    for line in _announcement(status, [spec.display_name for spec in specs], socket):
        say(line, sys.stderr, flush=True)
    # With -P, a folder in the working directory cannot shadow our packages.
    command = [sys.executable, "-P", "-m", "jupyterlab", *options.passed_on]
    path = os.pathsep.join(part for part in (str(data), os.environ.get("JUPYTER_PATH", "")) if part)
    environment = {**os.environ, "JUPYTER_PATH": path, "JUPYTER_GPU_SOCKET": socket}
    os.execve(command[0], command, environment)  # noqa: S606 - no shell wanted


def _locate(simulate: str | None) -> tuple[Path, str]:
    if not simulate:
        return runtime_dir() / "lab", socket_path()
    folder = runtime_dir() / f"simulated-{re.sub('[^A-Za-z0-9]+', '-', simulate).lower()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    socket = str(folder / "broker.sock")
    if len(os.fsencode(socket)) > LONGEST_SOCKET:
        raise CommandError(
            f"{socket} is too long for a socket path; set JUPYTER_RUNTIME_DIR to a folder with a shorter path"
        )
    return folder / "lab", socket


def _announcement(status: HostStatus, kernels: Sequence[str], socket: str) -> list[str]:
    devices = "; ".join(
        describe_device(device.name, device.memory_mib, simulated=status.simulated) for device in status.devices
    )
    kind = "GPUs (simulated: no real GPU is involved)" if status.simulated else "GPUs"
    watch = f"jupyter gpu status --watch --socket {socket}"
    return [
        f"{kind}: {devices or 'none'}; broker process {status.pid} on {socket}",
        f"Kernels, for this JupyterLab only: {', '.join(kernels)}",
        f"Starting JupyterLab; `{watch}` in a terminal shows which kernels are on the GPU.",
    ]
