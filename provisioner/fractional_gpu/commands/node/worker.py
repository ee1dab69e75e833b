"""`jupyter gpu node worker`: the checkpoint worker as a service of its own, the one part that needs privileges in a container."""

import argparse
import logging
import sys

from fractional_gpu.commands.terminal.text import CommandError

EPILOG = """\
examples:
  jupyter gpu node worker --socket /run/jupyter-gpu-worker/worker.sock
  jupyter gpu broker --worker-socket /run/jupyter-gpu-worker/worker.sock       the broker that uses it
  jupyter gpu node worker --socket PATH --backend simulated                    for a broker with --simulate

It starts the worker when the broker connects, for root and its own user only. The folder of the socket must be its own, and writable by no
other user. SIGTERM lets the worker finish its operation; a kernel that is suspended then stays so, and resumes when the service is back.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start the checkpoint worker for a broker in another container, which then needs no privileges."
    )
    parser.epilog = EPILOG
    parser.add_argument("--socket", metavar="PATH", required=True, help="where the broker connects")
    parser.add_argument(
        "--backend",
        metavar="KIND",
        default="nvidia",
        help="the devices: nvidia, simulated (those of the broker that connects), or the kind of another package, as the broker's "
        "device_kind (default: nvidia)",
    )


def run(options: argparse.Namespace) -> int:
    from fractional_gpu.gpu.worker_service import run_service  # noqa: PLC0415 - needed here only

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        run_service(options.socket, options.backend)
    except OSError as error:
        raise CommandError(f"the checkpoint worker's service cannot listen on {options.socket}: {error}") from error
    return 0
