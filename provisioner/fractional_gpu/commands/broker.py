"""`jupyter gpu broker`: the command line of the broker. `fractional_gpu.broker` is imported only to run one."""

import argparse
import sys

from fractional_gpu.broker.process.detaching import start_detached
from fractional_gpu.broker.process.restarting import BrokerOptions
from fractional_gpu.commands.terminal.errors import CommandError, UsageError
from fractional_gpu.core.units import parse_duration_ms

__all__ = ["configure", "run"]

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

EPILOG = """\
examples:
  jupyter gpu broker                                  on your own socket, in the foreground
  jupyter gpu broker --detach                         in the background; returns when it serves
  jupyter gpu broker --simulate 2x80GiB               two simulated GPUs instead of real ones
  jupyter gpu broker --generate-config > jupyter_gpu_config.py
  jupyter gpu broker --config jupyter_gpu_config.py   pools and policies of your own
  jupyter gpu broker --restart                        end the one that runs and start it with the same options, in the background
  jupyter gpu broker --stop --json

There is one broker for each machine or user. It starts by itself with the first kernel that wants a GPU, and stops by itself when
it is no longer needed; it never stops while kernels hold or wait for a GPU. Ctrl-C, SIGTERM or --stop stops it: kernels live on without it.
Resident ones work as before; suspended ones wait until a broker is started, which their next cell does by itself.

--stop and --restart find a broker that does not answer, too, and one whose socket was deleted. They send SIGTERM, and SIGKILL after
30 s; neither loses anything of a kernel. What runs under a supervisor is restarted there: a system service with systemctl, the hub's
own broker by the hub, which starts it again by itself.
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
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="where the ledger is kept: an absolute path on a local disk (default: a folder of this host in your state folder)",
    )
    parser.add_argument(
        "--settings", metavar="JSON", help="settings by their names, which win over the files: what a hub passes on"
    )
    parser.add_argument(
        "--stand-by",
        action="store_true",
        help="where another broker serves on the socket, wait until it ends and serve then (for a service)",
    )
    ending = parser.add_mutually_exclusive_group()
    ending.add_argument("--stop", action="store_true", help="end the broker that runs on the socket; kernels live on")
    ending.add_argument(
        "--restart", action="store_true", help="end it and start it in the background, with the options that it had"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --stop and --restart: print what was done as one JSON object"
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


def _check_ending(options: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together with ending a broker."""
    if not (options.stop or options.restart):
        if options.json:
            raise UsageError(
                "--json goes with --stop and --restart; a running broker is shown by `jupyter gpu status --json`"
            )
        return
    what = "--stop" if options.stop else "--restart"
    others = {
        "--config": options.config,
        "--generate-config": options.generate_config,
        "--simulate": options.simulate,
        "--detach": options.detach,
        "--idle-exit": options.idle_exit,
        "--state-dir": options.state_dir,
        "--settings": options.settings,
        "--stand-by": options.stand_by,
        "--log-level": options.log_level,
    }
    if given := [name for name, value in others.items() if value]:
        raise UsageError(
            f"{what} takes --socket and --json only, not {', '.join(given)}: a broker that is restarted has the options that it had; "
            "to give it others, stop it and start it with them"
        )


def run(options: argparse.Namespace) -> int:
    """Print the example configuration, end a broker, or run one until it stops; return the exit code."""
    _check_ending(options)
    if options.stop or options.restart:
        from fractional_gpu.commands.broker_stop import run_stop  # noqa: PLC0415 - needed here only

        return run_stop(options.socket, restart=options.restart, as_json=options.json)
    if options.generate_config:
        from fractional_gpu.config import example_config  # noqa: PLC0415 - heavy, and needed here only

        sys.stdout.write(example_config())
        return 0
    given = BrokerOptions(
        socket=options.socket,
        config_file=options.config,
        simulate=options.simulate,
        detach=options.detach,
        idle_exit=_checked_idle_exit(options.idle_exit),
        state_dir=options.state_dir,
        log_level=options.log_level,
        settings=options.settings,
        stand_by=options.stand_by,
    )
    if options.detach:
        return start_detached(given)
    from fractional_gpu.broker.process.app import run_broker  # noqa: PLC0415 - heavy, and needed here only
    from fractional_gpu.config import ConfigError  # noqa: PLC0415 - as above

    try:
        return run_broker(given)
    except ConfigError as error:
        raise CommandError(str(error)) from error
