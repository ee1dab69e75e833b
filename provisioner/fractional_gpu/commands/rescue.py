"""`jupyter gpu rescue` brings suspended kernels back when no broker can run."""

import argparse
import sys
from typing import TYPE_CHECKING

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.connection import kernels_of, say_if_slow
from fractional_gpu.commands.terminal.render import short_id
from fractional_gpu.commands.terminal.text import CommandError, answer, say
from fractional_gpu.core.units import plural

if TYPE_CHECKING:
    from fractional_gpu.broker.process.rescue import Rescued

EPILOG = """\
examples:
  jupyter gpu rescue                    when the broker can no longer start
  jupyter gpu rescue --json

This briefly takes the broker's place: if a broker is running, use `jupyter gpu resume --all` instead. Kernels that do not fit on their
device stay saved; shut others down and run this again. Kernels whose records were lost with the broker's files get new records.

Cells still wait for a broker. Start a cell with %%cpu to run it anyway, and save what you need from there.
"""


def configure(parser: Parser) -> None:
    parser.describe("Bring suspended kernels back onto the GPU without a broker, and report what was done.", EPILOG)
    parser.argument("--socket", "PATH", "the broker's socket (default: $JUPYTER_GPU_SOCKET, else your own)")
    parser.argument("--config", "FILE", "the broker's configuration file (default: the last one it used)")
    parser.argument("--state-dir", "DIR", "the ledger's folder (default: the last broker's)")
    parser.argument("--simulate", "COUNTxMEMORY", "the broker's simulated GPUs (default: the last broker's)")
    parser.flag("--json", 'print {"ledger", "problem", "kernels": [...]}')


def run(options: argparse.Namespace) -> int:
    from fractional_gpu.broker.process.driver_start import BackendError, NoDeviceError  # noqa: PLC0415 - as above
    from fractional_gpu.broker.process.rescue import Rescue, rescue  # noqa: PLC0415 - as above
    from fractional_gpu.broker.process.restarting import BrokerOptions  # noqa: PLC0415 - heavy, and needed here only
    from fractional_gpu.config import ConfigError  # noqa: PLC0415 - as above
    from fractional_gpu.gpu.interface import GPUError  # noqa: PLC0415 - as above
    from fractional_gpu.host.claims import DeviceClaimedError  # noqa: PLC0415 - as above
    from fractional_gpu.ledger.records import LedgerError  # noqa: PLC0415 - as above

    def nothing(why: str) -> Rescue:
        """Return an empty result for a host without a GPU. Raises CommandError if there are kernels, because restoring them needs a GPU."""
        socket = options.socket or socket_path()
        if pids := kernels_of(socket):
            raise CommandError(
                f"no GPU was found: {why}. The saved state of {plural(len(pids), 'kernel')} needs a device. Do not end these kernels' "
                "processes. Get the driver working again (`jupyter gpu doctor` helps), then run this again"
            )
        return Rescue(ledger="", problem="", kernels=[])

    given = BrokerOptions(
        socket=options.socket, config_file=options.config, simulate=options.simulate, state_dir=options.state_dir
    )
    try:
        with say_if_slow("finding kernels and bringing them back ..."):
            result = rescue(given)
    except NoDeviceError as error:
        result = nothing(error.why)
    except (ConfigError, BackendError, DeviceClaimedError, GPUError, LedgerError, OSError) as error:
        raise CommandError(str(error)) from error
    if result.problem and not options.json:
        say(f"{result.problem}; searched /proc for the kernels instead", sys.stderr)
    answer(options, result, lambda _: [*map(_said, result.kernels)] or ["There are no kernels to rescue."])
    return 0 if all(one.is_well for one in result.kernels) else 1


def _said(one: "Rescued") -> str:
    name = f"{one.label} ({short_id(one.lease_id)})" if one.label else short_id(one.lease_id)
    return f"{name}, process {one.pid}: {one.outcome}: {one.sentence}"
