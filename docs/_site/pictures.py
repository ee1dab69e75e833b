"""The pictures that are drawn from what they show: `python -m docs._site.pictures` writes them into docs/.

`house.svg` is the floors of import-linter's contract, and `states.svg` the arbiter's table. `taking-turns.svg` moves: two kernels that do
not fit on a GPU together, in twelve seconds. Where a reader prefers less motion it stands still.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.transitions import TABLE

ROOT: Final = Path(__file__).resolve().parents[2]
_INK, _LINE, _BLUE, _PALE, _ORANGE, _SAND = "#1f2933", "#8a8f98", "#2f6fb3", "#e4edf7", "#c0662b", "#f7e9df"


def pictures() -> Mapping[str, str]:
    """Return each picture by the name of its file in docs/."""
    return {"house.svg": house(), "states.svg": states(), "taking-turns.svg": taking_turns()}


def _svg(width: int, height: int, label: str, body: Iterator[str] | list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui,sans-serif" font-size="14" '
        f'role="img" aria-label={quoteattr(label)}>\n'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{_LINE}"/></marker></defs>\n<rect width="{width}" height="{height}" fill="#fff"/>\n'
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
    "core": "the arbiter: events in, effects out",
}


def floors() -> list[list[str]]:
    """Return the rooms of each floor, the highest first, as import-linter's contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (house,) = [contract for contract in contracts if contract["name"].startswith("the floors of the house")]
    return [[room.strip().removeprefix("fractional_gpu.") for room in floor.split("|")] for floor in house["layers"]]


def house() -> str:
    """Return the rooms of the code, floor by floor."""
    width, step = 900, 74
    body = []
    rows = floors()
    for number, rooms in enumerate(rows):
        y, each = 16 + number * step, (width - 32) / len(rooms)
        for place, room in enumerate(rooms):
            x, word = 16 + place * each, _WORDS.get(room, "")
            pale = room == "core"
            body += [
                _box(x + 4, y, each - 8, step - 14, fill=_SAND if pale else _PALE, stroke=_ORANGE if pale else _BLUE),
                _text(x + each / 2, y + (26 if word else 35), room, bold=True),
            ]
            if word:
                body.append(_text(x + each / 2, y + 45, word, size=12))
    body.append(_text(width / 2, 16 + len(rows) * step + 10, "a room imports from lower floors only", size=13))
    return _svg(
        width, 16 + len(rows) * step + 26, "The rooms of the code: each floor imports from lower floors only.", body
    )


# -- the states ------------------------------------------------------------------------------------------------------------

_S = LeaseState
_PLACES: Final = {
    _S.UNATTACHED: (110, 70),
    _S.NO_CONTEXT: (110, 240),
    _S.RESIDENT: (380, 240),
    _S.SUSPENDING: (640, 90),
    _S.SUSPENDED: (850, 240),
    _S.RESUMING: (640, 390),
    _S.QUARANTINED: (640, 240),
}
_LEFT_OUT: Final = ("process exited", "released", "expired")
"""From any state with a process: said below the picture instead of drawn."""
_HALF_WIDTH, _HALF_HEIGHT = 62, 20


def states() -> str:
    """Return the states of a lease, with the moves of the arbiter's table. Those of a starting broker and the ends are said in words."""
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
    body += [
        _text(16, 460, "orange: holds device memory", anchor="start", size=12, fill=_ORANGE),
        _text(
            16,
            480,
            "From every state: its process exits (unattached), or the lease is released (ended).",
            anchor="start",
            size=12,
        ),
        _text(
            16,
            500,
            "A broker that starts finds each lease in one of them, or quarantines it until it is known.",
            anchor="start",
            size=12,
        ),
    ]
    return _svg(940, 515, "The states of a lease and the moves between them.", body)


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
        f'<g paint-order="stroke" stroke="#fff" stroke-width="4">{_text(label_x, label_y + 4, says, size=12)}</g>',
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
    """Return two kernels that take turns, animated by style sheets alone: pages show it as an image, where no script runs."""
    rules = [
        _moving(
            "ana",
            [(0, (0, 0)), (_ANA_LEAVES, (0, 0)), (_ANA_GONE, (0, 130)), (_BEN_GONE, (0, 130)), (_ANA_THERE, (0, 0))],
        ),
        _moving(
            "ben",
            [
                (0, (0, 0)),
                (_ANA_GONE, (0, 0)),
                (_BEN_THERE, (-190, -130)),
                (_BEN_LEAVES, (-190, -130)),
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
        captions.append(f'<g class="says-{number}{"" if number == 0 else " later"}">{_text(360, 306, words)}</g>')
    style = (
        "<style>" + "".join(rules) + ".later,.ben-runs,.ben-waits,.ana-waits{opacity:0}"
        "@media (prefers-reduced-motion: reduce){*{animation:none!important}}</style>"
    )
    body = [
        style,
        *_notebook(20, 40, "Ana", "ana", _BLUE),
        *_notebook(20, 170, "Ben", "ben", _ORANGE),
        _text(290, 30, "GPU", anchor="start", bold=True),
        _box(290, 40, 250, 90, fill="#fff", stroke=_INK),
        _text(290, 160, "host memory", anchor="start", bold=True),
        _box(290, 170, 410, 90, fill="#fff", stroke=_INK),
        f'<g class="ana">{_box(300, 50, 185, 70, fill=_BLUE)}{_text(392, 90, "Ana: 3/4 GPU", fill="#fff")}</g>',
        f'<g class="ben">{_box(490, 180, 185, 70, fill=_ORANGE, stroke=_ORANGE)}{_text(582, 220, "Ben: 3/4 GPU", fill="#fff")}</g>',
        *captions,
    ]
    return _svg(
        720, 325, "Two kernels take turns on one GPU: while one runs, the other's memory is saved in host memory.", body
    )


def _notebook(x: float, y: float, name: str, who: str, colour: str) -> list[str]:
    def cell(fill: str) -> str:
        return _box(x + 10, y + 22, 200, 46, fill=fill, stroke=colour)

    return [
        _text(x, y - 10, f"{name}'s notebook", anchor="start", bold=True),
        _box(x, y, 220, 90, fill="#fff", stroke=_LINE),
        _text(x + 110, y + 50, "idle", fill=_LINE),
        f'<g class="{who}-runs">{cell(colour)}{_text(x + 110, y + 50, "a cell runs", fill="#fff")}</g>',
        f'<g class="{who}-waits">{cell("#fff")}{_text(x + 110, y + 50, "a cell waits", fill=colour)}</g>',
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


def main() -> None:
    """Write the pictures."""
    for name, picture in pictures().items():
        (ROOT / "docs" / name).write_text(picture)


if __name__ == "__main__":
    main()
