"""Arguments that several commands have: how a shell completes them, and what is checked first. Light, because every command imports it."""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.gpu.simulated.host import parse_devices
from fractional_gpu.gpu.simulated.store import SimulatedHostError

Completer = Callable[..., Any]

DURATIONS = ("15m", "30m", "1h", "2h")
FRACTIONS = ("1/8", "1/4", "1/2", "3/4", "1")


def set_completer(action: argparse.Action, by: Completer | Sequence[str]) -> None:
    """Set how a shell completes the argument: by a completer or from words. Other values stay allowed."""
    action.completer = by if callable(by) else _words(by)  # type: ignore[attr-defined]


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
        raise CommandError(f"this needs {' and '.join(missing)}: pip install 'jupyter-fractional-gpu[lab]'")


def checked_simulate(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_devices(text)
        except SimulatedHostError as error:
            raise UsageError(str(error)) from error
    return text
