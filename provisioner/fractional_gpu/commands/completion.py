"""`jupyter gpu completion` sets up shell completion. This module also completes command lines, using argcomplete.

When the user presses Tab, the shell runs `jupyter gpu` with `_ARGCOMPLETE` in its environment, and `complete` answers. Queries to a broker
have a short timeout, so that pressing Tab never blocks for long.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.commands.terminal.text import UsageError
from fractional_gpu.protocol.errors import FractionalGPUError

SHELLS = ("bash", "zsh", "fish")
_COMMANDS = ("jupyter", "jupyter-gpu")
_ANSWER_S = 0.5
_FILES = frozenset({"FILE", "PATH", "DIR", "SESSIONS", "CELLS"})  # arguments with these names are completed to files
ParserOf = Callable[[str], argparse.ArgumentParser]
EPILOG = """\
examples:
  eval "$(jupyter gpu completion bash)"            in ~/.bashrc
  eval "$(jupyter gpu completion zsh)"             in ~/.zshrc, below compinit
  jupyter gpu completion fish > ~/.config/fish/completions/jupyter.fish

This completes the whole `jupyter` command; subcommands that support completion complete their own arguments. Leases, devices and
pools come from the running broker.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print shell code that completes `jupyter gpu`: commands, options, leases, devices and pools."
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SHELLS, nargs="?", help="the shell (default: the one in $SHELL)")


def run(options: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode  # noqa: PLC0415 - needed here only

    shell = options.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise UsageError(f"choose a shell: {', '.join(SHELLS)} ($SHELL is {os.environ.get('SHELL') or 'not set'})")
    sys.stdout.write(shellcode(_COMMANDS, shell=shell))
    return 0


def complete(summaries: Mapping[str, str], parser_of: ParserOf) -> None:
    import argcomplete  # noqa: PLC0415 - only here, as said above
    from traitlets.config.argcomplete_config import get_argcomplete_cwords, increment_argcomplete_index  # noqa: PLC0415 - as above

    words = get_argcomplete_cwords() or []
    if len(words) > 1 and words[1] in summaries:
        increment_argcomplete_index()
        parser = parser_of(words[1])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--version", action="store_true")
        commands = parser.add_subparsers()
        for name, summary in summaries.items():
            commands.add_parser(name, help=summary, add_help=False)
    _propose_files_only_for_files(parser)
    argcomplete.autocomplete(parser)


def _nothing(**_: object) -> tuple[str, ...]:
    return ()


def _propose_files_only_for_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:  # noqa: SLF001 - argparse offers no other way
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for each in action.choices.values():
                _propose_files_only_for_files(each)
        elif not hasattr(action, "completer") and not action.choices and action.metavar not in _FILES:
            action.completer = _nothing  # type: ignore[attr-defined]


def proposals(what: str, parsed_args: argparse.Namespace) -> Mapping[str, str] | list[str]:
    if what == "kernelspecs":
        from fractional_gpu.jupyter.kernelspecs import list_installed  # noqa: PLC0415 - heavy, and needed for `kernels remove` only

        return {spec.name: spec.display_name for spec in list_installed()}
    from fractional_gpu.client.client import BrokerClient  # noqa: PLC0415 - as above
    from fractional_gpu.client.seat import own_seat  # noqa: PLC0415 - as above

    try:
        seat = own_seat()
        path = getattr(parsed_args, "socket", None) or socket_path()
        with BrokerClient(path, token=seat.token if seat is not None else None, timeout_s=_ANSWER_S) as client:
            status = client.status()
    except FractionalGPUError:
        return []  # completion starts no broker
    if what == "leases":
        return {lease.lease_id[:8]: lease.spec.label or lease.state for lease in status.leases}
    if what == "devices":
        return {str(device.index): device.name for device in status.devices}
    return list(status.pools)
