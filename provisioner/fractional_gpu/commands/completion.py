"""`jupyter gpu completion`: the lines that have a shell complete `jupyter gpu` when Tab is pressed."""

import argparse
import os
import sys
from pathlib import Path

from fractional_gpu.commands.terminal.failure import UsageError

__all__ = ["SHELLS", "configure", "run"]

SHELLS = ("bash", "zsh", "fish")
_COMMANDS = ("jupyter", "jupyter-gpu")
EPILOG = """\
examples:
  eval "$(jupyter gpu completion bash)"            in ~/.bashrc
  eval "$(jupyter gpu completion zsh)"             in ~/.zshrc, below compinit
  jupyter gpu completion fish > ~/.config/fish/completions/jupyter.fish

It completes `jupyter` as a whole: every Jupyter command that can, completes its own arguments. Leases, devices and pools are those of
the broker that runs.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Print what a shell evaluates to complete `jupyter gpu`: commands, options, leases, devices and pools."
    )
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SHELLS, nargs="?", help="the shell (default: the one in $SHELL)")


def run(options: argparse.Namespace) -> int:
    """Print the shell's code. Raises UsageError for a shell that is not among those it is known for."""
    from argcomplete.shell_integration import shellcode  # noqa: PLC0415 - needed here only

    shell = options.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise UsageError(f"say for which shell: {', '.join(SHELLS)} ($SHELL is {os.environ.get('SHELL') or 'not set'})")
    sys.stdout.write(shellcode(_COMMANDS, shell=shell))
    return 0
