"""Small pieces of HTML that are readable in light and dark themes.

Colours are JupyterLab's CSS variables with a fallback that holds on both backgrounds, for notebooks that other programs show. What
colour shows, the text says, too. Every text passes through `escape`: it may come from the broker, and so from another user.
"""

import html
from collections.abc import Iterable, Sequence

__all__ = ["FREE", "OTHERS", "SAVED", "USED", "bar", "box", "escape", "table", "text_bar"]

USED = "var(--jp-brand-color1,#2196f3)"
SAVED = "var(--jp-warn-color1,#f57c00)"
OTHERS = "var(--jp-ui-font-color3,#9e9e9e)"
FREE = "var(--jp-border-color2,rgba(127,127,127,.35))"

_TEXT = "color:var(--jp-content-font-color1,inherit)"
_MUTED = "opacity:.75"
_CELL = "text-align:left;padding:2px 12px 2px 0;border:none;background:none;vertical-align:top;white-space:normal"


def escape(text: str) -> str:
    """Return text as HTML."""
    return html.escape(text)


def box(title: str, *parts: str, note: str = "") -> str:
    """Return a titled block; `title` and `note` are text, `parts` HTML."""
    heading = f'<div style="font-weight:600;margin-bottom:4px">{escape(title)}</div>'
    below = f'<div style="{_MUTED};font-size:90%;margin-top:4px">{escape(note)}</div>' if note else ""
    return f'<div style="{_TEXT};margin:2px 0">{heading}{"".join(parts)}{below}</div>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table of HTML cells; without `head` (texts), the first cell of a row names it."""
    lines = []
    if head:
        names = "".join(
            f'<th scope="col" style="{_CELL};font-weight:400;{_MUTED}">{escape(name)}</th>' for name in head
        )
        lines.append(f"<tr>{names}</tr>")
    for row in rows:
        first, *others = row
        tag = "td" if head else "th"
        scope = "" if head else ' scope="row"'
        style = f"{_CELL};white-space:nowrap" if head else f"{_CELL};font-weight:400;white-space:nowrap;{_MUTED}"
        cells = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in others)
        lines.append(f'<tr style="background:none"><{tag}{scope} style="{style}">{first}</{tag}>{cells}</tr>')
    return f'<table style="margin:0;border:none;border-collapse:collapse">{"".join(lines)}</table>'


def bar(parts: Iterable[tuple[int, str]], whole: int, label: str) -> str:
    """Return a horizontal bar: `parts` are (size, colour) from the left, of `whole`; `label` says the same to a screen reader."""
    pieces = []
    left = 100.0
    for size, colour in parts:
        width = min(left, 100.0 * max(0, size) / max(1, whole))
        left -= width
        pieces.append(f'<span style="display:inline-block;height:100%;width:{width:.1f}%;background:{colour}"></span>')
    return (
        f'<span role="img" aria-label="{escape(label)}" title="{escape(label)}" style="display:inline-block;width:180px;height:.7em;'
        f'border-radius:3px;overflow:hidden;line-height:0;background:{FREE};vertical-align:baseline">{"".join(pieces)}</span>'
    )


def text_bar(parts: Iterable[tuple[int, str]], whole: int, width: int = 20) -> str:
    """Return the bar's plain twin: `parts` are (size, sign). What is there at all has at least one sign."""
    signs = ""
    total = 0
    for size, sign in parts:
        total += max(0, size)
        upto = min(width, max(round(width * total / max(1, whole)), len(signs) + (size > 0)))
        signs += sign * (upto - len(signs))
    return f"[{signs:-<{width}}]"
