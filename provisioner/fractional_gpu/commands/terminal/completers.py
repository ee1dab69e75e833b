"""Completers for arguments, set where an argument is added. Light, because every subcommand imports it."""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

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


def _found_by(name: str) -> Completer:
    def propose(**given: object) -> Any:  # noqa: ANN401 - what argcomplete takes: words, or words with descriptions
        return getattr(import_module("fractional_gpu.commands.completion"), name)(**given)

    return propose


LEASES = _found_by("lease_names")
DEVICES = _found_by("device_names")
POOLS = _found_by("pool_names")
KERNELSPECS = _found_by("kernelspec_names")
