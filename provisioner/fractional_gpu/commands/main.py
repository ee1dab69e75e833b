"""The `jupyter gpu` command. It imports only the module of the chosen subcommand, and reports an error as one line and an exit code.

Exit codes are 0 for success, 1 for failure, 2 for an invalid command line, and 130 for an interrupt. An expected error is printed as one
line on stderr, so a traceback means a bug in this package. Help must be fast, so nothing heavy is imported until a subcommand is chosen.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from fractional_gpu import __version__
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.text import CommandError, say
from fractional_gpu.protocol.errors import FractionalGPUError

INTERRUPTED = 130
FAILED = 1
_COMPLETING = "_ARGCOMPLETE"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Entry(NamedTuple):
    """A command. Its module defines `configure(parser)` and `run(options)`. With `passes_on`, unknown arguments go to another program."""

    module: str
    summary: str
    passes_on: bool = False


_LEASES = "lease_commands"
COMMANDS: dict[str, _Entry] = {
    "demo": _Entry("demo.demo", "watch two notebooks take turns on one GPU"),
    "lab": _Entry("lab", "start JupyterLab with kernels on fractions of a GPU", passes_on=True),
    "run": _Entry("run.run", "run a script or a model server on a share of a GPU"),
    "lease": _Entry("claim", "reserve GPU memory for a program that Jupyter does not start"),
    "release": _Entry(_LEASES, "end a reservation made with `jupyter gpu lease`"),
    "measure": _Entry("measuring.measure", "measure which share of a GPU is enough for a program"),
    "status": _Entry("status", "show the GPUs, and which kernels hold or wait for them"),
    "suspend": _Entry(_LEASES, "save a kernel's GPU memory to host memory and free the GPU"),
    "resume": _Entry(_LEASES, "bring a suspended kernel back onto a GPU"),
    "pin": _Entry(_LEASES, "keep a kernel on its GPU for a while"),
    "unpin": _Entry(_LEASES, "end a kernel's pin"),
    "resize": _Entry(_LEASES, "give a running kernel another share of a GPU"),
    "explain": _Entry(_LEASES, "say why a kernel waited, was suspended, moved or refused"),
    "drain": _Entry(_LEASES, "empty a GPU (administrators)"),
    "undrain": _Entry(_LEASES, "put a drained GPU back into use (administrators)"),
    "move": _Entry(_LEASES, "move an idle kernel to another GPU (administrators)"),
    "evict": _Entry(_LEASES, "end a kernel; its state is lost (administrators)"),
    "end": _Entry(_LEASES, "end processes that a kernel left on a GPU when it ended"),
    "report": _Entry("report", "report how much GPU time kernels used, and what it cost"),
    "audit": _Entry("audit", "show what administrators did, when, and for whom (administrators)"),
    "capacity": _Entry("capacity", "show how much more GPU each pool can grant"),
    "seats": _Entry("seats", "list the seats of hub servers, or end one (administrators)"),
    "pool": _Entry("pool", "show the pools, or change them while the broker runs"),
    "budget": _Entry("budget", "show the remaining budgets, or add to one"),
    "kernels": _Entry("kernels", "install, list and remove the kernels that the launcher offers"),
    "doctor": _Entry("doctor.doctor", "check the machine, the driver, the broker and Jupyter"),
    "logs": _Entry("logs", "show the broker's log, or follow it"),
    "simulate": _Entry("simulate", "simulate how many GPUs a group of notebook users needs"),
    "rescue": _Entry("rescue", "resume suspended kernels when no broker can run"),
    "setup-machine": _Entry("setup_machine", "set up a workstation for several users (administrators)"),
    "uninstall": _Entry("uninstall", "remove this user's kernelspecs, state and settings"),
    "completion": _Entry("completion", "print completion for bash, zsh or fish"),
    "node": _Entry("node.node", "run and set up the parts for cluster nodes (administrators)"),
    "broker": _Entry("broker", "run the broker (it starts automatically when needed)"),
}

EPILOG = """\
start here:
  jupyter gpu demo                       see it work, with or without a GPU
  jupyter gpu kernels install            add kernels such as "Python 3 · 1/4 GPU" to the launcher
  jupyter gpu status --watch             watch which kernels are on the GPU

`jupyter gpu COMMAND --help` explains a command.
"""


def _overview() -> Parser:
    lines = "\n".join(f"  {name:<22} {entry.summary}" for name, entry in COMMANDS.items())
    parser = Parser(
        prog="jupyter gpu",
        usage="jupyter gpu [--help] [--version] COMMAND ...",
        description=f"Jupyter kernels on fractions of a GPU.\n\ncommands:\n{lines}",
        epilog=EPILOG,
    )
    parser.flag("--version", "show the version and exit")
    return parser


def _dispatch(arguments: Sequence[str]) -> int:
    overview = _overview()
    if not arguments:
        overview.print_help()
        return 2
    name = arguments[0]
    if name.startswith("-") and overview.parse_args([name]).version:
        print(f"jupyter-fractional-gpu {__version__}", flush=True)
        return 0
    entry = COMMANDS.get(name)
    if entry is None:
        import difflib  # noqa: PLC0415 - for slips only

        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean `jupyter gpu {close[0]}`? " if close else ""
        overview.error(f"unknown command {name[:80]!r}; {hint}choose from {', '.join(COMMANDS)}")
    command, parser = subcommand(name)
    if entry.passes_on:
        options, others = parser.parse_known_args(arguments[1:])
        options.passed_on = others
    else:
        options = parser.parse_args(arguments[1:])
    code: int = command.run(options)
    sys.stdout.flush()
    return code


def subcommand(name: str) -> tuple[Any, Parser]:
    module = importlib.import_module(f"fractional_gpu.commands.{COMMANDS[name].module}")
    command = getattr(module, "COMMANDS", {}).get(name, module)
    parser = Parser(prog=f"jupyter gpu {name}")
    command.configure(parser)
    return command, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code. Expected errors are printed, not raised."""
    if argv is None and _COMPLETING in os.environ:
        from fractional_gpu.commands.completion import complete  # noqa: PLC0415 - for shells only, when Tab is pressed

        complete({name: entry.summary for name, entry in COMMANDS.items()}, lambda name: subcommand(name)[1])
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # this process was started with the stream closed (`>&-`)
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except (CommandError, FractionalGPUError) as error:
        say(f"jupyter gpu: {' '.join(str(error).split())}", sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()  # the reader of our output exited (`| head`)
        return FAILED
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        _discard_output()
        say(
            f"jupyter gpu: cannot write the output: {error.strerror}; free some space, or write elsewhere",
            sys.stderr,
        )
        return FAILED


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that the interpreter can flush it at exit without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
