"""Accessibility by axe-core: the rules of WCAG 2.2, levels A and AA, on a page that a test has opened.

axe judges what is drawn, so a check is of one state of a page, in one colour scheme and at one width; `looks` goes through these: dark
colours on a small screen, and with JUPYTER_GPU_ALL_LOOKS=1 (as `tests/run release` does) each scheme at each width.
`tests/run setup` installs axe-core.
"""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page

__all__ = ["ALL_LOOKS", "SMALL_PX", "assert_accessible", "assert_accessible_in_any_look", "looks", "violations"]

ALL_LOOKS = bool(os.environ.get("JUPYTER_GPU_ALL_LOOKS"))
SMALL_PX = 320  # success criterion 1.4.10: 1280 pixels at a zoom of 400 %
_WCAG = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"]}
# Of each violation: the rule, whether its element is one of ours or within one, the name, and why.
_RUN = """async ([within, only, ours]) => {
  const { violations } = await axe.run(within ? { include: within } : document, {
    runOnly: only, resultTypes: ['violations'], ancestry: true,
  });
  return violations.flatMap(({ id, nodes }) => nodes.map((node) => {
    const [failed] = [...node.any, ...node.all, ...node.none];
    const message = failed ? failed.message : 'not as it should be';
    const mine = ours !== null && document.querySelector(node.ancestry[0]).closest(ours) !== null;
    return [id, mine, `${id}: ${node.ancestry.join(' ')}`, `${message} (${node.html.slice(0, 200)})`];
  }));
}"""
# Styles set by a script are not subject to a page's Content-Security-Policy; elements of style are.
# Violations of some rules without our elements. Hiding takes the focus from them; it is given back once they are laid out again.
_WITHOUT = f"""async ([ours, only]) => {{
  const focused = document.activeElement, nodes = [...document.querySelectorAll(ours)];
  const shown = nodes.map((node) => node.style.display);
  for (const node of nodes) node.style.setProperty('display', 'none', 'important');
  const without = await ({_RUN})([null, only, null]);
  nodes.forEach((node, at) => {{ node.style.display = shown[at]; }});
  while (document.activeElement !== focused) {{
    await new Promise(requestAnimationFrame);
    focused.focus();
  }}
  return without;
}}"""


# What a page does when its elements have new sizes (ResizeObserver) is done with the next picture, so with the second one at the latest.
# Colours on their way from one scheme to the other are neither's.
_DRAWN = """async () => {
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const transitions = document.getAnimations().filter((one) => one instanceof CSSTransition);
  await Promise.allSettled(transitions.map((one) => one.finished));
}"""


@cache
def _source() -> str:
    file = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
    assert file.is_file(), f"these tests need {file} (tests/run setup installs it)"
    return file.read_text()


def violations(page: Page, within: str | None = None) -> dict[str, str]:
    """Return what axe finds wrong, by rule and element. `within`: a CSS selector; None: the whole page."""
    _load(page)
    return {name: why for _, _, name, why in page.evaluate(_RUN, [within, _WCAG, None])}


def assert_accessible(page: Page, ours: str | None = None, *, within: str | None = None) -> None:
    """Fail if axe finds anything wrong.

    `ours`: the page is another project's and the elements with this CSS selector are ours: then nothing may be wrong within them, and
    nothing on the whole page that is not wrong without them. `within`: only the elements with this CSS selector have changed since the page
    was found to be accessible.
    """
    if ours is None:
        assert within is None or page.locator(within).count(), f"nothing is {within}"
        wrong = violations(page, within)
    else:
        assert page.locator(ours).count(), f"nothing is {ours}"
        wrong = _more_than_without(page, ours)
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


def _more_than_without(page: Page, ours: str) -> dict[str, str]:
    """Only rules that the rest of the page breaks are checked again without our elements."""
    _load(page)
    whole: list[tuple[str, bool, str, str]] = page.evaluate(_RUN, [None, _WCAG, ours])
    broken = sorted({rule for rule, mine, _, _ in whole if not mine})
    without = page.evaluate(_WITHOUT, [ours, {"type": "rule", "values": broken}]) if broken else []
    before = {name for _, _, name, _ in without}
    return {name: why for _, mine, name, why in whole if mine or name not in before}


def _load(page: Page) -> None:
    page.evaluate(_DRAWN)
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(_source())


def assert_accessible_in_any_look(page: Page, ours: str | None = None) -> None:
    """Fail if axe finds anything wrong, or a page of ours is wider than a small screen, in a look of `looks`. `ours`: as above."""
    for look in looks(page):
        assert_accessible(page, ours)
        if ours is None and look.endswith(f" {SMALL_PX} px"):
            assert page.evaluate("document.documentElement.scrollWidth") <= SMALL_PX, f"wider than the screen: {look}"


def looks(page: Page) -> Iterator[str]:
    """Show the page in dark colours at 320 pixels and say so; with ALL_LOOKS also in light ones, and in both at its own width.

    Ends with light colours at the page's own width.
    """
    size = page.viewport_size
    assert size is not None
    own = size["width"]
    pairs: list[tuple[Literal["dark", "light"], int]] = [("dark", SMALL_PX)]
    if ALL_LOOKS:
        pairs += [("dark", own), ("light", SMALL_PX), ("light", own)]
    for scheme, width in pairs:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": size["height"]})
        yield f"{scheme}, {width} px"
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(size)
