"""Errors of the commands: a sentence for the user, and an exit code."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class CommandError(Exception):
    """The command failed; the message says why and what to do. Exit code 1."""

    exit_code = 1


class UsageError(CommandError):
    """The arguments contradict each other, or a value is not allowed. Exit code 2."""

    exit_code = 2


def parse_argument(parse: Callable[[str], T], text: str) -> T:
    """Return the value of an argument. Raises UsageError with what is allowed."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from None
