"""What commands write: text as its reader wants it, with colours on a terminal that shows them, and plain into a pipe or file.

Rich decides about colours, by NO_COLOR, FORCE_COLOR, TTY_COMPATIBLE and TERM (docs/commands.md).
"""

import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from fractional_gpu.commands.terminal.layout import harmless, plain

if TYPE_CHECKING:
    from rich.text import Text

_ANY_WIDTH = 80


def terminal_width(out: TextIO) -> int | None:
    """Return the terminal's width in characters; None if the output is no terminal, such as a pipe to `grep`."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def shown(lines: "Iterable[Text]", out: TextIO) -> str:
    """Return the lines as `out` wants them, each with its end; they are not wrapped."""
    from rich.console import Console  # noqa: PLC0415 - heavy, and for those commands only that lay lines out

    # Lines are not wrapped; without a width, rich prints nothing where COLUMNS is 0.
    console = Console(file=out, force_jupyter=False, width=_ANY_WIDTH)
    if console.color_system is None:
        return plain(lines)
    with console.capture() as captured:
        for one in lines:
            console.print(one, soft_wrap=True)
    return captured.get()


def write(lines: "Iterable[Text]", *, flush: bool = False) -> None:
    """Write the lines to standard output."""
    sys.stdout.write(shown(lines, sys.stdout))
    if flush:
        sys.stdout.flush()


def say(sentence: str, out: TextIO | None = None, *, flush: bool = False) -> None:
    """Write sentences, a line each, to `out` (None: standard output), so that no name in them can control a terminal."""
    text = "\n".join(map(harmless, sentence.split("\n")))
    print(text, file=sys.stdout if out is None else out, flush=flush)
