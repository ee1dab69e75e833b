"""`%gpu`'s arguments: argparse over the table of commands, with its errors as one sentence and its help as text."""

import argparse
import shlex
from collections.abc import Callable
from typing import Any, NoReturn

from fractional_gpu.core.units import parse_duration_ms, parse_fraction_milli, parse_memory_mib
from fractional_gpu_kernel.magics.commands import BURST, COMMANDS, Command

__all__ = ["ArgumentsError", "HelpAsked", "duration_ms", "overview", "parse", "parse_burst", "size"]

_BURST_NAME = "%%gpu"


class ArgumentsError(Exception):
    """What was typed is not understood; the text says what is allowed."""


class HelpAsked(Exception):  # noqa: N818 - not an error
    """`-h` was given; the text is the help."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the kernel."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(f"{self.prog}: {message}; {' '.join(self.format_usage().split())}")

    def print_help(self, file: Any = None) -> NoReturn:  # noqa: ARG002, ANN401 - argparse's signature
        raise HelpAsked(self.format_help().rstrip())


def parse(line: str) -> argparse.Namespace:
    """Return the command (`name`) and its arguments. Raises ArgumentsError or HelpAsked."""
    words = _words("%gpu", line)
    name = words[0] if words else "status"
    if name in ("-h", "--help"):
        raise HelpAsked(overview())
    if name not in COMMANDS:
        raise ArgumentsError(_unknown(name))
    found = _parser(f"%gpu {name}", COMMANDS[name]).parse_args(words[1:])
    if name == "help" and found.command:
        if found.command not in COMMANDS:
            raise ArgumentsError(_unknown(found.command))
        raise HelpAsked(_parser(f"%gpu {found.command}", COMMANDS[found.command]).format_help().rstrip())
    found.name = name
    return found


def parse_burst(line: str) -> argparse.Namespace:
    """Return `fraction` and `memory` of a `%%gpu` line. Raises ArgumentsError or HelpAsked."""
    words = _words(_BURST_NAME, line)
    if words and words[0] in COMMANDS:
        raise ArgumentsError(f"%%gpu takes a share for one cell, as %%gpu 1; for the command write %gpu {words[0]}")
    return _parser(_BURST_NAME, BURST).parse_args(words)


def size(prog: str, fraction: str | None, memory: str | None) -> tuple[int | None, int | None]:
    """Return milli-GPU and MiB, None for what is not given. Raises ArgumentsError."""
    return _read(prog, parse_fraction_milli, fraction), _read(prog, parse_memory_mib, memory)


def duration_ms(prog: str, text: str, *, also: str = "") -> int:
    """Return milliseconds, more than 0. Raises ArgumentsError, which names the word that is allowed, `also`."""
    try:
        read_ms = parse_duration_ms(text)
    except ValueError:
        read_ms = 0
    if not read_ms:
        words = f", or {also}" if also else ""
        raise ArgumentsError(
            f"{prog}: {text[:50]!r} is not a duration that it takes; allowed: more than 0, such as 30s, 10m or 1h{words}"
        )
    return read_ms


def _read(prog: str, parser: Callable[[str], int], text: str | None) -> int | None:
    try:
        return None if text is None else parser(text)
    except ValueError as error:
        raise ArgumentsError(f"{prog}: {error}") from None


def overview() -> str:
    """Return the list of everything there is."""
    width = max(len(_signature(command)) for command in COMMANDS.values())
    lines = [f"%gpu {_signature(command):<{width}}  {command.summary}" for command in COMMANDS.values()]
    return "\n".join(
        [
            *lines,
            f"{'%%gpu FRACTION':<{width + 5}}  {BURST.summary}",
            f"{'%%cpu':<{width + 5}}  run this cell without waiting for the GPU (it must not use it)",
            "",
            "%gpu COMMAND --help says more about one.",
        ]
    )


def _signature(command: Command) -> str:
    words = [command.name]
    for argument in command.arguments:
        text = " ".join(word for word in (argument.name if argument.is_option else "", argument.metavar) if word)
        words.append(text if argument.required else f"[{text}]")
    return " ".join(words)


def _parser(prog: str, command: Command) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=f"{command.summary[:1].upper()}{command.summary[1:]}. {command.details}".strip(),
        allow_abbrev=False,
    )
    for argument in command.arguments:
        text = argument.help.replace("%", "%%")
        if argument.is_flag:
            parser.add_argument(argument.name, action="store_true", help=text)
        elif argument.is_option:
            parser.add_argument(argument.name, metavar=argument.metavar, help=text)
        else:
            count = None if argument.required else "?"
            parser.add_argument(argument.name, metavar=argument.metavar, nargs=count, help=text)
    return parser


def _words(prog: str, line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ArgumentsError(f"{prog}: {line[:100]!r} cannot be split into words: {error}") from None


def _unknown(name: str) -> str:
    import difflib  # noqa: PLC0415 - for slips only

    close = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f" Did you mean %gpu {close[0]}?" if close else ""
    return f"%gpu {name[:50]} is not known; allowed: {', '.join(COMMANDS)}.{hint}"
