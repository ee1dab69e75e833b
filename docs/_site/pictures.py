"""The pictures that are drawn from what they show: `python -m docs._site.pictures` writes them into docs/.

`house.svg` is the floors of import-linter's contract, and `states.svg` the arbiter's table. `turns.svg` shows two kernels that do not fit
on a GPU together; `taking-turns.svg` animates them, unless the reader prefers less motion.

All are narrow enough for a phone, and have light and dark colours.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.transitions import TABLE

ROOT: Final = Path(__file__).resolve().parents[2]
_LIGHT: Final = {
    "paper": "#fff",
    "ink": "#1f2933",
    "line": "#68707c",
    "blue": "#2f6fb3",
    "pale": "#e4edf7",
    "orange": "#a85420",
    "sand": "#f7e9df",
}
_DARK: Final = {
    "paper": "#14181e",
    "ink": "#e6e8eb",
    "line": "#9aa1ab",
    "blue": "#7db1e8",
    "pale": "#1d2c3f",
    "orange": "#e59a63",
    "sand": "#3a2a1e",
}
_PAPER, _INK, _LINE, _BLUE, _PALE, _ORANGE, _SAND = (f"var(--{name})" for name in _LIGHT)
_FULL_BLUE, _FULL_ORANGE = _LIGHT["blue"], _LIGHT["orange"]  # under white words
_WIDTH: Final = 400


def pictures() -> Mapping[str, str]:
    """Return each picture by the name of its file in docs/."""
    return {"house.svg": house(), "states.svg": states(), "taking-turns.svg": taking_turns(), "turns.svg": turns()}


def _svg(height: int, label: str, body: Iterator[str] | list[str]) -> str:
    light, dark = ("".join(f"--{name}:{colour};" for name, colour in one.items()) for one in (_LIGHT, _DARK))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui,sans-serif" font-size="14" role="img" aria-label={quoteattr(label)}>\n'
        f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>\n"
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{_LINE}"/></marker></defs>\n<rect width="{_WIDTH}" height="{height}" fill="{_PAPER}"/>\n'
    )
    return head + "\n".join(body) + "\n</svg>\n"


def _text(
    x: float, y: float, text: str, *, size: int = 14, fill: str = _INK, anchor: str = "middle", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, *, fill: str = _PALE, stroke: str = _BLUE) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"/>'


# -- the house -------------------------------------------------------------------------------------------------------------

_WORDS: Final = {
    "commands": "jupyter gpu ...",
    "fractional_gpu_hub": "spawners, page",
    "fractional_gpu_kernel": "gate, %gpu",
    "jupyter": "provisioner",
    "broker": "one for each host",
    "engines": "Slurm, Kubernetes",
    "client": "lease API",
    "simulator": "virtual time",
    "gpu": "NVIDIA, simulated",
    "ledger": "SQLite",
    "config": "pools, policies",
    "reports": "use and costs",
    "protocol": "messages, errors",
    "host": "processes, memory",
    "pages": "HTML in one file",
    "curves": "panels of curves",
    "stats": "medians, intervals",
    "svg": "parts of pictures",
    "core": "events in, effects out",
}


def floors() -> list[list[str]]:
    """Return the rooms of each floor, the highest first, as import-linter's contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (house,) = [contract for contract in contracts if contract["name"].startswith("the floors of the house")]
    return [[room.strip().removeprefix("fractional_gpu.") for room in floor.split("|")] for floor in house["layers"]]


def house() -> str:
    """Return the rooms of the code, floor by floor, two in a row."""
    y, step, each = 12, 52, (_WIDTH - 24) / 2
    body = []
    for rooms in floors():
        for number, room in enumerate(rooms):
            alone = number % 2 == 0 and number == len(rooms) - 1
            x, width, word = 12 + number % 2 * each, 2 * each if alone else each, _WORDS.get(room, "")
            fill, stroke = (_SAND, _ORANGE) if room == "core" else (_PALE, _BLUE)
            body += [
                _box(x + 3, y, width - 6, step - 8, fill=fill, stroke=stroke),
                _text(x + width / 2, y + (19 if word else 27), room, bold=True),
            ]
            if word:
                body.append(_text(x + width / 2, y + 36, word, size=12))
            y += step if number % 2 or alone else 0
        body.append(f'<path d="M12 {y + 1} H{_WIDTH - 12}" stroke="{_LINE}" stroke-dasharray="3 4"/>')
        y += 11
    body.append(_text(_WIDTH / 2, y + 12, "a room imports from lower floors only", size=13))
    return _svg(y + 26, "The rooms of the code: each floor imports from lower floors only.", body)


# -- the states ------------------------------------------------------------------------------------------------------------

_S = LeaseState
_PLACES: Final = {
    _S.UNATTACHED: (310, 36),
    _S.NO_CONTEXT: (78, 150),
    _S.RESIDENT: (310, 255),
    _S.SUSPENDING: (78, 350),
    _S.QUARANTINED: (200, 460),
    _S.RESUMING: (318, 560),
    _S.SUSPENDED: (78, 560),
}
_LEFT_OUT: Final = ("process exited", "released", "expired")
"""From any state with a process: said below the picture instead of drawn."""
_HALF_WIDTH, _HALF_HEIGHT = 60, 18


def states() -> str:
    """Return the states of a lease, with the moves of the arbiter's table. Words below name the moves of a starting broker and the ends."""
    body = []
    for old, moves in TABLE.items():
        by_target: dict[LeaseState, list[str]] = {}
        for cause, new in moves.items():
            if (
                old is not None
                and new is not old
                and cause.value not in _LEFT_OUT
                and not cause.value.startswith("found")
            ):
                by_target.setdefault(new, []).append(cause.value)
        for new, causes in by_target.items():
            body += _arrow(old, new, ", ".join(causes))
    for state, (x, y) in _PLACES.items():
        held = state in (_S.RESIDENT, _S.SUSPENDING, _S.RESUMING, _S.QUARANTINED)
        fill, stroke = (_SAND, _ORANGE) if held else (_PALE, _BLUE)
        body += [
            _box(x - _HALF_WIDTH, y - _HALF_HEIGHT, 2 * _HALF_WIDTH, 2 * _HALF_HEIGHT, fill=fill, stroke=stroke),
            _text(x, y + 5, state.value, bold=True),
        ]
    words = (
        ("orange: holds device memory", _ORANGE),
        ("From every state: its process exits (unattached),", _INK),
        ("or the lease is released (ended).", _INK),
        ("A broker that starts finds each lease in one of them,", _INK),
        ("or quarantines it until it knows.", _INK),
    )
    for line, (text, colour) in enumerate(words):
        body.append(_text(12, 620 + 18 * line, text, anchor="start", size=13, fill=colour))
    return _svg(704, "The states of a lease and the moves between them.", body)


def _arrow(old: LeaseState | None, new: LeaseState, says: str) -> list[str]:
    """Return a bent arrow between two states; the way back bends to the other side."""
    if old is None:
        return []
    (x1, y1), (x2, y2) = _PLACES[old], _PLACES[new]
    dx, dy = x2 - x1, y2 - y1
    length = math.hypot(dx, dy)
    bend = 24.0
    mx, my = (x1 + x2) / 2 - dy / length * bend, (y1 + y2) / 2 + dx / length * bend
    (sx, sy), (ex, ey) = _edge(x1, y1, mx, my), _edge(x2, y2, mx, my)
    line = f'<path d="M{sx:.0f} {sy:.0f} Q{mx:.0f} {my:.0f} {ex:.0f} {ey:.0f}" fill="none" stroke="{_LINE}" marker-end="url(#tip)"/>'
    label_x, label_y = (sx + 2 * mx + ex) / 4, (sy + 2 * my + ey) / 4
    return [
        line,
        f'<g paint-order="stroke" stroke="{_PAPER}" stroke-width="4">{_text(label_x, label_y + 4, says, size=12)}</g>',
    ]


def _edge(x: float, y: float, towards_x: float, towards_y: float) -> tuple[float, float]:
    """Return where the line from a box's middle to that point leaves the box, with a little air."""
    dx, dy = towards_x - x, towards_y - y
    part = min((_HALF_WIDTH + 4) / abs(dx) if dx else math.inf, (_HALF_HEIGHT + 4) / abs(dy) if dy else math.inf)
    return x + dx * part, y + dy * part


# -- taking turns ----------------------------------------------------------------------------------------------------------

_SECONDS: Final = 12.0
_ANA_LEAVES, _ANA_GONE, _BEN_THERE, _BEN_LEAVES, _BEN_GONE, _ANA_THERE = 3.6, 4.8, 6.0, 9.0, 10.2, 11.4
_CAPTIONS: Final = (
    (0.0, "Ana's cell runs. Ben's kernel idles: its GPU memory is saved in host memory."),
    (2.6, "Ben runs a cell. It waits: both do not fit. Ana's cell has ended."),
    (_ANA_LEAVES, "Ana's memory is saved. Her variables stay."),
    (_ANA_GONE, "Ben's memory comes back."),
    (_BEN_THERE, "Ben's cell runs, with every variable as it was."),
    (_BEN_LEAVES, "Ana runs a cell again: Ben's memory is saved, and hers comes back."),
)


def taking_turns() -> str:
    """Return two kernels that take turns, animated by style sheets alone, because no script runs in an image."""
    rules = [
        _moving(
            "ana",
            [(0, (0, 0)), (_ANA_LEAVES, (0, 0)), (_ANA_GONE, (0, 110)), (_BEN_GONE, (0, 110)), (_ANA_THERE, (0, 0))],
        ),
        _moving(
            "ben",
            [
                (0, (0, 0)),
                (_ANA_GONE, (0, 0)),
                (_BEN_THERE, (0, -160)),
                (_BEN_LEAVES, (0, -160)),
                (_BEN_GONE, (0, 0)),
            ],
        ),
        _lit("ana-runs", [(0, 2.6), (_ANA_THERE, _SECONDS)]),
        _lit("ben-waits", [(2.6, _BEN_THERE)]),
        _lit("ben-runs", [(_BEN_THERE, _BEN_LEAVES)]),
        _lit("ana-waits", [(_BEN_LEAVES, _ANA_THERE)]),
    ]
    ends = [start for start, _ in _CAPTIONS[1:]] + [_SECONDS]
    captions = []
    for number, ((start, words), end) in enumerate(zip(_CAPTIONS, ends, strict=True)):
        rules.append(_lit(f"says-{number}", [(start, end)]))
        lines = [_text(_WIDTH / 2, 288 + 19 * line, one, size=13) for line, one in enumerate(wrap(words, 52))]
        captions.append(f'<g class="says-{number}{"" if number == 0 else " later"}">{"".join(lines)}</g>')
    style = (
        "<style>" + "".join(rules) + ".later,.ben-runs,.ben-waits,.ana-waits{opacity:0}"
        "@media (prefers-reduced-motion: reduce){*{animation:none!important}}</style>"
    )
    body = [
        style,
        *_notebook(34, "Ana", _BLUE, _FULL_BLUE),
        *_notebook(164, "Ben", _ORANGE, _FULL_ORANGE),
        _text(170, 24, "GPU", anchor="start", bold=True),
        _box(170, 34, 220, 66, fill=_PAPER, stroke=_INK),
        _text(170, 134, "host memory", anchor="start", bold=True),
        _box(170, 144, 220, 116, fill=_PAPER, stroke=_INK),
        f'<g class="ana">{_box(178, 42, 155, 50, fill=_FULL_BLUE)}{_text(255, 72, "Ana: 3/4 GPU", fill="#fff")}</g>',
        f'<g class="ben">{_box(178, 202, 155, 50, fill=_FULL_ORANGE, stroke=_ORANGE)}{_text(255, 232, "Ben: 3/4 GPU", fill="#fff")}</g>',
        *captions,
    ]
    return _svg(
        320, "Two kernels take turns on one GPU: while one runs, the other's memory is saved in host memory.", body
    )


def _notebook(y: float, name: str, colour: str, full: str) -> list[str]:
    x, who = 10, name.lower()

    def cell(fill: str) -> str:
        return _box(x + 8, y + 18, 124, 42, fill=fill, stroke=colour)

    return [
        _text(x, y - 10, f"{name}'s notebook", anchor="start", bold=True),
        _box(x, y, 140, 80, fill=_PAPER, stroke=_LINE),
        _text(x + 70, y + 44, "idle", fill=_LINE),
        f'<g class="{who}-runs">{cell(full)}{_text(x + 70, y + 44, "a cell runs", fill="#fff")}</g>',
        f'<g class="{who}-waits">{cell(_PAPER)}{_text(x + 70, y + 44, "a cell waits", fill=colour)}</g>',
    ]


def _moving(name: str, stops: list[tuple[float, tuple[int, int]]]) -> str:
    frames = "".join(f"{100 * at / _SECONDS:.1f}%{{transform:translate({x}px,{y}px)}}" for at, (x, y) in stops)
    x, y = stops[-1][1]
    return f"@keyframes {name}{{{frames}100%{{transform:translate({x}px,{y}px)}}}}.{name}{{animation:{name} {_SECONDS:g}s infinite}}"


def _lit(name: str, spans: list[tuple[float, float]]) -> str:
    """Return the rule of what is seen in these spans of the twelve seconds."""
    frames = {0.0: "0"}
    for start, end in spans:
        frames[100 * start / _SECONDS] = "1"
        frames[100 * end / _SECONDS] = "0" if end < _SECONDS else "1"
    listed = "".join(f"{at:.1f}%{{opacity:{seen}}}" for at, seen in sorted(frames.items()))
    return f"@keyframes {name}{{{listed}}}.{name}{{animation:{name} {_SECONDS:g}s infinite step-end}}"


# -- turns, standing still -------------------------------------------------------------------------------------------------

_TURNS: Final = (("Ana", 0, 106), ("Ben", 112, 200), ("Ana", 206, 292), ("Ben", 298, 380))
_CELLS: Final = (("Ana", 0, 98), ("Ben", 116, 190), ("Ana", 210, 268), ("Ben", 302, 374))


def turns() -> str:
    """Return the cells of two notebooks, and where the memory of each kernel is over time."""
    body = []
    for line, words in enumerate(("Ana's cells, on 3/4 GPU", "Ben's cells, on 3/4 GPU", "GPU memory", "host memory")):
        body.append(_text(10, 20 + 62 * line, words, anchor="start", bold=True))
    full = {"Ana": (_FULL_BLUE, _BLUE), "Ben": (_FULL_ORANGE, _ORANGE)}
    pale = {"Ana": (_PALE, _BLUE), "Ben": (_SAND, _ORANGE)}

    def bar(line: int, span: tuple[int, int], text: str, colours: tuple[str, str], ink: str) -> None:
        (start, end), (fill, stroke) = span, colours
        body.append(_box(10 + start, 28 + 62 * line, end - start, 30, fill=fill, stroke=stroke))
        body.append(_text(10 + (start + end) / 2, 48 + 62 * line, text, size=13, fill=ink))

    for name, start, end in _CELLS:
        bar(0 if name == "Ana" else 1, (start, end), "cell", full[name], "#fff")
    for name, start, end in _TURNS:
        bar(2, (start, end), name, full[name], "#fff")
        other = "Ben" if name == "Ana" else "Ana"
        if start:
            bar(3, (start, end), other, pale[other], _INK)
    body.append(f'<path d="M10 262 H390" stroke="{_LINE}" marker-end="url(#tip)"/>')
    body.append(_text(390, 280, "time", anchor="end", size=13))
    body.append(_text(10, 280, "after each turn every variable is as it was", anchor="start", size=13))
    return _svg(290, "Two kernels take turns on one GPU: while one runs, the other's memory is in host memory.", body)


def main() -> None:
    """Write the pictures."""
    for name, picture in pictures().items():
        (ROOT / "docs" / name).write_text(picture)


if __name__ == "__main__":
    main()
