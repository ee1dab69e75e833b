"""What may stand for an argument on the command line, said where the argument is added. Light: every subcommand imports it."""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["DEVICES", "DURATIONS", "FRACTIONS", "KERNELSPECS", "LEASES", "POOLS", "completed"]

Completer = Callable[..., Any]

DURATIONS = ("15m", "30m", "1h", "2h")
FRACTIONS = ("1/8", "1/4", "1/2", "3/4", "1")


def completed(action: argparse.Action, by: Completer | Sequence[str]) -> None:
    """Have a shell complete the argument: by what a completer finds, or to one of some words; others stay allowed."""
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
