"""The one error of the configuration, and how it is worded: where, what was given, what is allowed."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["ConfigError", "did_you_mean", "refuse"]

_LONGEST_VALUE = 120


class ConfigError(Exception):
    """The configuration cannot be used. The message names the file, the key, the value and what is allowed."""


def refuse(where: str, value: object, problem: str) -> ConfigError:
    """Return the error for one key: `where` names it, with its file."""
    shown = repr(value)
    if len(shown) > _LONGEST_VALUE:
        shown = shown[:_LONGEST_VALUE] + "..."
    return ConfigError(f"{where} = {shown}: {problem}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return what is allowed, with the most similar one first if there is one."""
    names = sorted(known)
    similar = get_close_matches(given, names, n=1)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    return f"{hint}Allowed: {', '.join(names)}"
