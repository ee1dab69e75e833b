"""`jupyter gpu broker`: the command line of the broker. What it does is in `provisioner.broker`, imported only when it is to run."""

import argparse
import sys

from provisioner.commands.failure import CommandError, UsageError
from provisioner.core.units import parse_duration_ms

__all__ = ["configure", "run"]

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

EPILOG = """\
examples:
  jupyter gpu broker                                  on your own socket, in the foreground
  jupyter gpu broker --detach                         in the background; returns when it serves
  jupyter gpu broker --simulate 2x80GiB               two simulated GPUs instead of real ones
  jupyter gpu broker --generate-config > jupyter_gpu_config.py
  jupyter gpu broker --config jupyter_gpu_config.py   pools and policies of your own

There is one broker for each machine or user. It starts by itself with the first kernel that wants a GPU, and stops by itself when
nobody needs it; it never stops while kernels hold or wait for a GPU. Ctrl-C or SIGTERM stops it: kernels live on without it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Run the broker: it decides which kernel is on which GPU, and suspends and resumes them."
    parser.epilog = EPILOG
    parser.add_argument(
        "--socket", metavar="PATH", help="where it listens (default: $JUPYTER_GPU_SOCKET, else your own socket)"
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration file (see --generate-config)")
    parser.add_argument(
        "--generate-config", action="store_true", help="print an example of a configuration file and exit"
    )
    parser.add_argument(
        "--simulate",
        metavar="COUNTxMEMORY",
        help="simulated GPUs instead of real ones, such as 2x80GiB (default: $JUPYTER_GPU_SIMULATE, else real GPUs)",
    )
    parser.add_argument(
        "--detach", action="store_true", help="run in the background; return 0 once a broker serves on the socket"
    )
    parser.add_argument(
        "--idle-exit", metavar="DURATION", help="stop after so long without kernels and questions, such as 10m or never"
    )
    parser.add_argument("--state-dir", metavar="DIR", help="where the ledger and the log are kept")
    parser.add_argument(
        "--settings", metavar="JSON", help="settings by their names, which win over the files: what a hub passes on"
    )
    parser.add_argument(
        "--stand-by",
        action="store_true",
        help="where another broker serves on the socket, wait until it ends and serve then (for a service)",
    )
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, type=str.upper, help="how much it writes to its log (default: INFO)"
    )


def _checked_idle_exit(text: str | None) -> str | None:
    if text is not None and text != "never":
        try:
            parse_duration_ms(text)
        except ValueError as error:
            raise UsageError(f"--idle-exit: {error}, or never") from error
    return text


def run(options: argparse.Namespace) -> int:
    """Print the example configuration, or run the broker until it stops and return its exit code."""
    from provisioner.config import ConfigError, example_config  # noqa: PLC0415 - heavy, and needed here only

    if options.generate_config:
        sys.stdout.write(example_config())
        return 0
    idle_exit = _checked_idle_exit(options.idle_exit)
    from provisioner.broker.app import BrokerOptions, run_broker  # noqa: PLC0415 - heavy, and needed here only

    try:
        return run_broker(
            BrokerOptions(
                socket=options.socket,
                config_file=options.config,
                simulate=options.simulate,
                detach=options.detach,
                idle_exit=idle_exit,
                state_dir=options.state_dir,
                log_level=options.log_level,
                settings=options.settings,
                stand_by=options.stand_by,
            )
        )
    except ConfigError as error:
        raise CommandError(str(error)) from error
