"""Formats terminal output: errors, and lines and tables laid out by rich, in colour if supported.

Labels and the names of users, pools and processes are untrusted. They are not parsed as markup, and `harmless` keeps them from controlling
the terminal. A width of None means that the output goes to a program, so nothing is wrapped or cut. No information is shown by colour
alone. Rich is not imported until a line is created, because help, completion and `jupyter gpu run` do not need it.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.text import Text

T = TypeVar("T")


class CommandError(Exception):
    """The command failed. The message says why and what to do. The exit code is 1."""

    exit_code = 1


class UsageError(CommandError):
    """The arguments contradict each other, or a value is not allowed. The exit code is 2."""

    exit_code = 2


def parse_argument(parse: Callable[[str], T], text: str, option: str = "") -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}" if option else str(error)) from None


Piece: TypeAlias = "str | tuple[str, str] | Text"
"""Plain text, a pair of text and style, or a line."""

_ENDLESS: Final = 1 << 20  # characters per line, so that lines are not wrapped
_GAP: Final = 2  # characters between columns
_HANGING: Final = 2  # extra indent of the later parts of a wrapped line
_NARROWEST: Final = 8  # fewest characters in a part of a wrapped line
_JOINERS: Final = "\u200c\u200d"  # between letters of Persian and Indian names, and in emoji; they move no cursor


class Style(StrEnum):
    HEADING = "bold"
    GOOD = "green"
    ATTENTION = "yellow"  # waits, will go away, or lacks something
    WRONG = "bold red"  # lost, over-committed, or an error
    USED = "green"
    RESERVED = "blue"
    OTHERS = "magenta"  # memory of programs that are not ours


def harmless(text: str) -> str:
    r"""Return the text on one line, with an escape such as `\x1b` for each character that could control a terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _JOINERS else ascii(one)[1:-1] for one in text)


def line(*pieces: Piece) -> "Text":
    from rich.text import Text  # noqa: PLC0415 - as said above

    found = Text(end="")
    for piece in pieces:
        if isinstance(piece, Text):
            found.append_text(piece)
        else:
            text, style = (piece, "") if isinstance(piece, str) else piece
            found.append(harmless(text), style)
    return found


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Piece]],
    *,
    indent: str = "  ",
    width: int | None = None,
    figures_from: int | None = None,
    least: Sequence[int] = (),
    whole: int = 0,
) -> "list[Text]":
    """Return the lines of a table, with two spaces between columns. An empty `header` is omitted.

    Columns from index `figures_from` onwards are right-aligned. `least` lists the minimum widths of the first columns. If the table is
    wider than `width`, cells in the widest columns are wrapped over several lines, except in the first `whole` columns.
    """
    from rich.console import Console  # noqa: PLC0415 - as said above
    from rich.table import Table  # noqa: PLC0415 - as said above

    if not header and not rows:
        return []
    columns = len(header) or max(map(len, rows), default=0)
    drawn = Table(
        box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=bool(header), header_style=str(Style.HEADING)
    )
    for number in range(columns):
        name = line(header[number]) if header else ""
        justify: JustifyMethod = "right" if figures_from is not None and number >= figures_from else "left"
        narrowest = least[number] if number < len(least) else None
        drawn.add_column(name, justify=justify, overflow="fold", min_width=narrowest, no_wrap=number < whole)
    for row in rows:
        drawn.add_row(*(line(cell) for cell in row))
    room = _ENDLESS if width is None else max(width - len(indent), columns)
    # This console is only for layout. It does not have a terminal's size, and nothing is written to it.
    console = Console(width=_ENDLESS, height=100, color_system=None, force_jupyter=False)
    lines = console.render_lines(drawn, console.options.update(width=room), pad=False)
    found: list[Text] = []
    for segments in lines:
        one = line(indent)
        for segment in segments:
            one.append(segment.text, segment.style)
        one.rstrip()
        found.append(one)
    return found


def fitted(lines: "Iterable[Text | str]", width: int | None) -> "list[Text]":
    found: list[Text] = []
    for one in lines:
        whole = line(one) if isinstance(one, str) else one
        found += [whole] if width is None or whole.cell_len <= width else _wrapped(whole, width)
    return found


def _wrapped(whole: "Text", width: int) -> "list[Text]":
    indent = len(whole.plain) - len(whole.plain.lstrip()) + _HANGING
    found: list[Text] = []
    for part in whole.divide(_breaks(whole.plain, max(width, indent + _NARROWEST), indent)):
        part.rstrip()
        found.append(line(" " * indent).append_text(part) if found else part)
    return found


def _breaks(text: str, width: int, indent: int) -> list[int]:
    """Return the positions at which to break the text into lines. Rich's own wrapping would split long words such as paths."""
    from rich.cells import cell_len  # noqa: PLC0415 - as said above

    found: list[int] = []
    begin, before = 0, 0
    for word in re.finditer(r"\S+", text):
        is_first = not text[begin : word.start()].strip()
        if not is_first and before + cell_len(text[begin : word.end()]) > width:
            begin, before = word.start(), indent
            found.append(begin)
    return found


def plain(lines: "Iterable[Text]") -> str:
    return "".join(f"{one.plain}\n" for one in lines)


def terminal_width(out: TextIO) -> int | None:
    return shutil.get_terminal_size().columns if out.isatty() else None


def shown(lines: "Iterable[Text]", out: TextIO) -> str:
    from rich.console import Console  # noqa: PLC0415 - heavy, and only for commands that lay out lines

    # Lines are not wrapped. Without a width, rich prints nothing if COLUMNS is 0.
    console = Console(file=out, force_jupyter=False, width=80)
    if console.color_system is None:
        return plain(lines)
    with console.capture() as captured:
        for one in lines:
            console.print(one, soft_wrap=True)
    return captured.get()


def write(lines: "Iterable[Text]", *, flush: bool = False) -> None:
    sys.stdout.write(shown(lines, sys.stdout))
    if flush:
        sys.stdout.flush()


def say(sentence: str, out: TextIO | None = None, *, flush: bool = False) -> None:
    text = "\n".join(map(harmless, sentence.split("\n")))
    print(text, file=sys.stdout if out is None else out, flush=flush)


def answer(
    options: argparse.Namespace, document: object, lines: "Callable[[int | None], Iterable[Text | str]]"
) -> None:
    if options.json:
        from msgspec import to_builtins  # noqa: PLC0415 - not for help texts

        print(json.dumps(to_builtins(document)))
    else:
        width = terminal_width(sys.stdout)
        write(fitted(lines(width), width))


@contextmanager
def file_errors(done: str, path: Path | str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.filename or path} cannot be {done}: {error.strerror or error}{advice}") from None


def write_file(path: Path, text: str, option: str) -> None:
    with file_errors("written", path, f"; check {option}"):
        path.write_text(text, encoding="utf-8", newline="")
