"""Completion of `jupyter gpu` in a shell, by argcomplete.

The shell runs `jupyter gpu` with `_ARGCOMPLETE` in its environment whenever Tab is pressed (`jupyter` itself hands the line on).
Only then is this module imported: no other start of the command pays for it. Only the chosen subcommand is imported here, too.

What a value may be is said where its argument is added, with `completed`. Proposals that the broker knows are asked for and not waited
for: a completion that blocks is worse than none.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.protocol.errors import FractionalGPUError

__all__ = ["complete", "device_names", "kernelspec_names", "lease_names", "pool_names"]

_ASK_S = 0.5
_FILES = frozenset({"FILE", "PATH", "DIR", "SESSIONS", "CELLS"})  # arguments of these names are completed to files

ParserOf = Callable[[str], argparse.ArgumentParser]


def complete(summaries: Mapping[str, str], parser_of: ParserOf) -> None:
    """Write the proposals for the line that the shell completes, and end the process.

    `summaries`: the subcommands. `parser_of` returns a subcommand's parser.
    """
    import argcomplete  # noqa: PLC0415 - only here, as said above
    from traitlets.config.argcomplete_config import (  # noqa: PLC0415 - as above
        get_argcomplete_cwords,
        increment_argcomplete_index,
    )

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
    """Argcomplete proposes files for every value of which it knows nothing."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for each in action.choices.values():
                _propose_files_only_for_files(each)
        elif not hasattr(action, "completer") and not action.choices and action.metavar not in _FILES:
            action.completer = _nothing  # type: ignore[attr-defined]


def lease_names(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """Propose the leases of this user, with their notebooks."""
    status = _status(parsed_args)
    return {lease.lease_id[:8]: lease.label or lease.state for lease in status.leases} if status is not None else {}


def device_names(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """Propose the devices of the broker by number, with their names."""
    status = _status(parsed_args)
    return {str(device.index): device.name for device in status.devices} if status is not None else {}


def pool_names(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Propose the pools of the broker."""
    status = _status(parsed_args)
    return list(status.pools) if status is not None else []


def kernelspec_names(**_: object) -> dict[str, str]:
    """Propose the kernelspecs that this package installed, with the names that the launcher shows."""
    from fractional_gpu.jupyter.kernelspecs import list_installed  # noqa: PLC0415 - heavy, and needed for `kernels remove` only

    return {spec.name: spec.display_name for spec in list_installed()}


def _status(options: argparse.Namespace) -> Any:  # noqa: ANN401 - a HostStatus or None, whose module is heavy
    """Ask the broker that runs, if one does; none is started for a proposal."""
    from fractional_gpu.client.client import BrokerClient  # noqa: PLC0415 - as above
    from fractional_gpu.client.seat import own_seat  # noqa: PLC0415 - as above

    try:
        seat = own_seat()
        path = getattr(options, "socket", None) or socket_path()
        with BrokerClient(path, token=seat.token if seat is not None else None, timeout_s=_ASK_S) as client:
            return client.status()
    except FractionalGPUError:
        return None
