"""Adds, completes and checks command-line arguments. Every command imports this module, so it must stay lightweight."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.protocol.errors import FractionalGPUError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Completer = Callable[..., Any]

DURATIONS = ("15m", "30m", "1h", "2h")
FRACTIONS = ("1/8", "1/4", "1/2", "3/4", "1")


class Parser(argparse.ArgumentParser):
    """A command's parser. It prints descriptions exactly as written, and rejects abbreviated options."""

    def __init__(self, **given: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **given)

    def describe(self, description: str, epilog: str) -> None:
        self.description, self.epilog = description, epilog

    def argument(
        self,
        name: str,
        metavar: str | None,
        help: str,  # noqa: A002 - argparse's name
        *,
        by: Completer | Sequence[str] | None = None,
        **given: Any,  # noqa: ANN401 - argparse's own
    ) -> None:
        action = self.add_argument(name, metavar=metavar, help=help, **given)
        if by is not None:
            action.completer = by if callable(by) else _words(by)  # type: ignore[attr-defined]

    def flag(self, name: str, help: str) -> None:  # noqa: A002 - argparse's name
        self.add_argument(name, action="store_true", help=help)

    def add_socket(self) -> None:
        self.argument(
            "--socket",
            "PATH",
            "the broker's socket (default: $JUPYTER_GPU_SOCKET, else the machine's broker, else your own)",
        )

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help. Raises OSError if writing fails. Since Python 3.12, argparse itself ignores this error."""
        (sys.stdout if file is None else file).write(self.format_help())
        sys.stdout.flush()


def _words(words: Sequence[str]) -> Completer:
    def propose(**_: object) -> Sequence[str]:
        return words

    return propose


def _found_by(what: str) -> Completer:
    def propose(*, parsed_args: argparse.Namespace, **_: object) -> Any:  # noqa: ANN401 - what argcomplete takes
        return import_module("fractional_gpu.commands.completion").proposals(what, parsed_args)

    return propose


LEASES, DEVICES, POOLS, KERNELSPECS = map(_found_by, ("leases", "devices", "pools", "kernelspecs"))


def require_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {' and '.join(missing)}; run: pip install 'jupyter-fractional-gpu[lab]'")


def whole_number(option: str, text: str, allowed: range) -> int:
    try:
        number = int(text)
    except ValueError:
        number = allowed.stop
    if number not in allowed:
        raise UsageError(f"{option} must be a whole number from {allowed.start} to {allowed.stop - 1}, not {text!r}")
    return number


def checked_pool(name: str) -> str:
    from fractional_gpu.jupyter.kernel_command import check_pool_name  # noqa: PLC0415 - not for every command

    try:
        return check_pool_name(name)
    except FractionalGPUError as error:
        raise UsageError(f"--pool: {error}") from None


def checked_simulate(text: str | None) -> str | None:
    if text is not None:
        from fractional_gpu.gpu.simulated.host import parse_devices  # noqa: PLC0415 - as above
        from fractional_gpu.gpu.simulated.store import SimulatedHostError  # noqa: PLC0415 - as above

        try:
            parse_devices(text)
        except SimulatedHostError as error:
            raise UsageError(str(error)) from error
    return text
