"""Accessibility by axe-core: the rules of WCAG 2.2, levels A and AA, on a page that a test has opened.

axe judges what is drawn, so a check is of one state of a page, in one colour scheme and at one width; `looks` goes through these.
`tests/run setup` installs axe-core.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from playwright.sync_api import Page

__all__ = ["SMALL_PX", "assert_accessible", "assert_accessible_in_any_look", "looks", "violations"]

SMALL_PX = 320  # success criterion 1.4.10: 1280 pixels at a zoom of 400 %
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"]
_RUN = """async ([within, tags]) => {
  const { violations } = await axe.run(within ? { include: within } : document, {
    runOnly: { type: 'tag', values: tags }, resultTypes: ['violations'], ancestry: true,
  });
  return violations.flatMap(({ id, nodes }) => nodes.map((node) => {
    const [failed] = [...node.any, ...node.all, ...node.none];
    const message = failed ? failed.message : 'not as it should be';
    return [`${id}: ${node.ancestry.join(' ')}`, `${message} (${node.html.slice(0, 200)})`];
  }));
}"""
# Styles set by a script are not subject to a page's Content-Security-Policy; elements of style are.
# Violations with and without our elements. Hiding takes the focus from them; it is given back once they are laid out again.
_COMPARE = f"""async ([ours, tags]) => {{
  const run = {_RUN}, whole = await run([null, tags]);
  const focused = document.activeElement, nodes = [...document.querySelectorAll(ours)];
  const shown = nodes.map((node) => node.style.display);
  for (const node of nodes) node.style.setProperty('display', 'none', 'important');
  const without = await run([null, tags]);
  nodes.forEach((node, at) => {{ node.style.display = shown[at]; }});
  while (document.activeElement !== focused) {{
    await new Promise(requestAnimationFrame);
    focused.focus();
  }}
  return [whole, without];
}}"""


# What a page does when its elements have new sizes (ResizeObserver) is done with the next picture, so with the second one at the latest.
_DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@cache
def _source() -> str:
    file = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
    assert file.is_file(), f"these tests need {file} (tests/run setup installs it)"
    return file.read_text()


def violations(page: Page, within: str | None = None) -> dict[str, str]:
    """Return what axe finds wrong, by rule and element. `within`: a CSS selector; None: the whole page."""
    _load(page)
    found: list[tuple[str, str]] = page.evaluate(_RUN, [within, _TAGS])
    return dict(found)


def assert_accessible(page: Page, ours: str | None = None) -> None:
    """Fail if axe finds anything wrong.

    `ours`: the page is another project's and the elements with this CSS selector are ours: then nothing may be wrong within them, and
    nothing on the whole page that is not wrong without them.
    """
    if ours is None:
        wrong = violations(page)
    else:
        assert page.locator(ours).count(), f"nothing is {ours}"
        _load(page)
        whole, without = map(dict, page.evaluate(_COMPARE, [ours, _TAGS]))
        wrong = {name: why for name, why in whole.items() if name not in without} | violations(page, ours)
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


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
    """Show the page in dark and in light colours, at 320 pixels and at its own width, and say which; light and its width are the last."""
    size = page.viewport_size
    assert size is not None
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        for width in (SMALL_PX, size["width"]):
            page.set_viewport_size({"width": width, "height": size["height"]})
            yield f"{scheme}, {width} px"
