"""What one key of the configuration is, and how a wrong one is reported: the place, the value and what is allowed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

__all__ = ["ConfigError", "Key", "config_error", "did_you_mean"]

_LONGEST_VALUE = 120


class ConfigError(Exception):
    """The configuration cannot be used. The message names the file, the key, the value and what is allowed."""


def config_error(where: str, value: object, problem: str) -> ConfigError:
    """Return the error for one key; `where` names the key and its file."""
    shown = repr(value)
    if len(shown) > _LONGEST_VALUE:
        shown = shown[:_LONGEST_VALUE] + "..."
    return ConfigError(f"{where} = {shown}: {problem}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the sentence that lists the allowed names, with the most similar one first."""
    names = sorted(known)
    similar = get_close_matches(given, names, n=1)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    return f"{hint}Allowed: {', '.join(names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a pool; the tables of keys map its name to it.

    `parse` takes the value as it is written and returns the one of `field`, an attribute of `PoolSpec` or `HubPool`; with `also`, it
    returns a value for `field` and one for each of these. It raises ValueError with what is allowed. The example configuration shows
    `default`, `example` and `help`.
    """

    field: str
    parse: Callable[[object], Any]
    default: object
    example: object
    help: str
    also: tuple[str, ...] = ()
