"""`jupyter gpu node prolog` and `epilog`: Slurm's scripts call them as root. They end with 0: Slurm drains a node otherwise."""

import argparse
import os
import syslog
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fractional_gpu.commands.node.options import add_node_options, counts_of, seats_folder

_EPILOG = """\
Slurm runs it through the script that `jupyter gpu node install` writes. The exit code is 0 whatever happens: another one would drain the
node. What went wrong is in the system's log (`journalctl -t jupyter-gpu-slurm`), or in the file that --log names.
"""


class _Hook:
    def __init__(self, name: str, description: str) -> None:
        self._name = name
        self._description = description

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.description = self._description
        parser.epilog = _EPILOG
        add_node_options(parser)
        parser.add_argument(
            "--check", action="store_true", help="only say whether Slurm's commands answer in this environment"
        )
        parser.add_argument("--log", metavar="FILE", type=Path, help="write the log there (default: the system's log)")

    def run(self, options: argparse.Namespace) -> int:
        from fractional_gpu.engines import hooks  # noqa: PLC0415 - not for help texts
        from fractional_gpu.engines.slurm import Slurm  # noqa: PLC0415 - as above

        if options.check:
            Slurm(os.environ.get("SLURMD_NODENAME", "")).jobs()  # raises EngineError
            return 0
        settings = hooks.HookSettings(
            socket=options.socket,
            folder=seats_folder(options),
            pools={count: pool for pool, count in counts_of(options.pool).items()},
            shard_pool=options.shards,
            has_groups=not options.no_groups,
            short_memory=options.short_memory,
        )
        hook: Callable[[hooks.HookSettings, Mapping[str, str], Callable[[str], None]], None] = {
            "prolog": hooks.begin,
            "epilog": hooks.end,
        }[self._name]
        hook(settings, os.environ, _logger(self._name, options.log))
        return 0


def _logger(name: str, file: Path | None) -> Callable[[str], None]:
    """Return what writes a line to the log; it never raises and never blocks: a full disk must drain no node."""

    def to_system(line: str) -> None:
        syslog.openlog("jupyter-gpu-slurm", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_INFO, f"{name}: {line}")

    def to_file(line: str) -> None:
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(file or os.devnull, flags, 0o600)
            try:
                os.write(descriptor, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {name}: {line}\n".encode(errors="replace"))
            finally:
                os.close(descriptor)

    return to_system if file is None else to_file


ACTIONS = {
    "prolog": _Hook(
        "prolog", "Slurm's Prolog: register the share of the job that begins as a seat at this node's broker."
    ),
    "epilog": _Hook("epilog", "Slurm's Epilog: end the seat of the job that has ended, and remove its files."),
}
