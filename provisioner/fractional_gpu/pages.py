"""What our HTML pages share: one file, nothing loaded from elsewhere, no script, for light and dark screens and for paper."""

from collections.abc import Mapping
from html import escape

_LIGHT = {"page": "#ffffff", "text": "#1f2937", "faint": "#4b5563", "grid": "#d1d5db"}
_DARK = {"page": "#14171c", "text": "#e5e7eb", "faint": "#a8b0bd", "grid": "#3b424d"}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:var(--text);background:var(--page)}"
    "h1{font-size:1.5em}h2{font-size:1.1em;margin:1.6em 0 .3em}.result{font-size:1.15em}"
    ".wide{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;white-space:nowrap}"
    "th{font-weight:600;border-bottom:1px solid var(--grid)}th:first-child,td:first-child{text-align:left}"
    "svg{width:100%;height:auto}text{font-size:12px;fill:var(--faint)}.grid{stroke:var(--grid)}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--grid);padding:.6em;font-size:13px}"
)


def begin_page(title: str, style: str, *, light: Mapping[str, str], dark: Mapping[str, str]) -> str:
    """Return a page up to its body. `light` and `dark`: colours by name, for `var(--NAME)` in the style."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>:root{{color-scheme:light dark;{_colours(_LIGHT | dict(light))}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{_colours(_DARK | dict(dark))}}}}}"
        f"{_STYLE}{style}</style></head><body>"
    )


def end_page() -> str:
    """Return the end of a page."""
    return "</body></html>\n"


def _colours(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def round_step(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50 ... that is at least so large."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
