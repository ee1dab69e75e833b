"""Runs the action given in `jupyter gpu node ACTION`, such as `agent` or `install`.

Each action imports what it needs only when it runs, because the Slurm Prolog must be fast. The Prolog and Epilog always exit with 0,
because Slurm drains a node on which either fails.
"""

import argparse
import logging
import os
import sys
import syslog
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fractional_gpu.commands.node import agent, install
from fractional_gpu.commands.node.options import add_node_options, hook_settings
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.text import CommandError

EPILOG = """\
examples:
  jupyter gpu node install --devices 4      write Slurm's scripts and the agent's unit, and say what to add to slurm.conf
  jupyter gpu node doctor                   check this node, and say how to fix problems
  jupyter gpu node agent --engine slurm     what the unit runs

docs/clusters.md is a step-by-step guide for administrators. `jupyter gpu node ACTION --help` explains each action.
"""
_WORKER_EPILOG = """\
examples:
  jupyter gpu node worker --socket /run/jupyter-gpu-worker/worker.sock
  jupyter gpu broker --worker-socket /run/jupyter-gpu-worker/worker.sock       the broker that uses it
  jupyter gpu node worker --socket PATH --backend simulated                    for a broker with --simulate

The service starts the worker when a broker that runs as root or as the service's own user connects. It must own the socket's folder, and no
other user may be able to write to it. On SIGTERM, the worker finishes its operation. Suspended kernels then wait for the service to return.
"""
_HOOK_EPILOG = """\
Slurm runs this through the script that `jupyter gpu node install` writes. The exit code is always 0, because any other code would drain the
node. Errors go to the system log (`journalctl -t jupyter-gpu-slurm`), or to the file given with --log.
"""
_DOCTOR_EPILOG = """\
examples:
  jupyter gpu node doctor
  jupyter gpu node doctor --json        one object: {"ok": ..., "worst": ..., "findings": [...]}
  jupyter gpu node doctor --everywhere  run a short job on each node to check for the wrapper; do this before slurm.conf names it

Exit code 0: everything works, perhaps with warnings. 1: something does not work. Run it as root on a node. It changes nothing.
"""


def _add_worker_arguments(parser: Parser) -> None:
    parser.describe(
        "Start the checkpoint worker for a broker in another container, so that the broker needs no privileges.",
        _WORKER_EPILOG,
    )
    parser.argument("--socket", "PATH", "where the broker connects", required=True)
    parser.argument(
        "--backend",
        "KIND",
        "the kind of device: nvidia, simulated (the connecting broker's), or one that another package provides, as in device_kind "
        "(default: nvidia)",
        default="nvidia",
    )


def _run_worker(options: argparse.Namespace) -> int:
    from fractional_gpu.gpu.worker_service import run_service  # noqa: PLC0415 - needed here only

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        run_service(options.socket, options.backend)
    except OSError as error:
        raise CommandError(f"the checkpoint worker service cannot listen on {options.socket}: {error}") from error
    return 0


def _add_hook_arguments(parser: Parser) -> None:
    begins = parser.prog.endswith("prolog")
    parser.describe(
        "Slurm's Prolog: register a starting job's share as a seat with this node's broker."
        if begins
        else "Slurm's Epilog: end a finished job's seat, and remove its files.",
        _HOOK_EPILOG,
    )
    add_node_options(parser)
    parser.flag("--check", "only check that Slurm's commands work in this environment")
    parser.argument("--log", "FILE", "the file to log to (default: the system log)", type=Path)


def _run_hook(options: argparse.Namespace) -> int:
    from fractional_gpu.engines import hooks  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.slurm import Slurm  # noqa: PLC0415 - as above

    if options.check:
        Slurm(os.environ.get("SLURMD_NODENAME", "")).jobs()  # raises EngineError
        return 0
    hook = hooks.begin if options.action == "prolog" else hooks.end
    hook(hook_settings(options), os.environ, _logger(options.action, options.log))
    return 0


def _logger(name: str, file: Path | None) -> Callable[[str], None]:
    """Return a function that writes to the log. It never raises or blocks, because a full disk must not cause the node to be drained."""

    def to_system(line: str) -> None:
        syslog.openlog("jupyter-gpu-slurm", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_INFO, f"{name}: {line}")

    def to_file(line: str) -> None:
        with suppress(OSError):
            # O_NONBLOCK, because a pipe without a reader would hold up the job. O_NOFOLLOW, because this runs as root.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(file or os.devnull, flags, 0o600)
            try:
                os.write(descriptor, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {name}: {line}\n".encode(errors="replace"))
            finally:
                os.close(descriptor)

    return to_system if file is None else to_file


def _add_doctor_arguments(parser: Parser) -> None:
    parser.describe("Check Slurm's configuration, and this node's scripts, broker and agent.", _DOCTOR_EPILOG)
    parser.flag("--json", "print one JSON object")
    parser.flag("--everywhere", "only check that every node has the wrapper")
    parser.argument(
        "--folder", "DIR", f"the folder with the scripts (default: {install.FOLDER})", type=Path, default=install.FOLDER
    )
    parser.argument("--node", "NAME", "the node's name in Slurm (default: the host's short name)")
    add_node_options(parser)


def _run_doctor(options: argparse.Namespace) -> int:
    from fractional_gpu.commands.doctor.doctor import run_node  # noqa: PLC0415 - not for help texts, nor for the Prolog

    return run_node(options)


class _Action(NamedTuple):
    configure: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    summary: str


ACTIONS: dict[str, _Action] = {
    "agent": _Action(
        agent.configure, agent.run, "a service that tells the cluster's engine what this node's broker would grant"
    ),
    "prolog": _Action(_add_hook_arguments, _run_hook, "Slurm's Prolog: register a job's share as a seat"),
    "epilog": _Action(_add_hook_arguments, _run_hook, "Slurm's Epilog: end the job's seat"),
    "worker": _Action(
        _add_worker_arguments,
        _run_worker,
        "the checkpoint worker as a service, for a broker in an unprivileged container",
    ),
    "install": _Action(
        install.configure,
        install.run,
        "write or print a node's files, and print the lines for Slurm's configuration",
    ),
    "doctor": _Action(
        _add_doctor_arguments,
        _run_doctor,
        "check Slurm's configuration, and this node's scripts, broker and agent",
    ),
}


def configure(parser: Parser) -> None:
    parser.describe("Run and set up what cluster nodes need in addition to the broker. For administrators.", EPILOG)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, entry in ACTIONS.items():
        entry.configure(actions.add_parser(name, help=entry.summary))


def run(options: argparse.Namespace) -> int:
    return ACTIONS[options.action].run(options)
