"""The documentation's site is built from the pages without a warning, and a link that leads nowhere ends the build."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from docs._site import build, contents
from docs._site.pictures import floors, pictures
from fractional_gpu.core.model import LeaseState
from tests.e2e.browser import opened_browser
from tests.support.axe import ALL_LOOKS, SMALL_PX, violations
from tests.support.paths import ROOT

pytestmark = pytest.mark.promise("accessibility", "documents")

_IN_EACH_LOOK = ("index", "search", "docs/policies")
LOOKS = [(1280, "light"), (SMALL_PX, "dark"), (1280, "dark"), (SMALL_PX, "light")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "pages"
    assert build.main([str(out)]) == 0
    return out


def test_every_page_is_there_in_a_section_and_from_the_code(site: Path) -> None:
    for page in [*build.pages(), *build.GENERATED]:
        assert (site / "docs" / f"{page}.html").is_file(), page
    assert "jupyter gpu doctor" in (site / "docs" / "reference" / "commands.html").read_text()
    assert "c.GPUBroker.pools" in (site / "docs" / "reference" / "settings.html").read_text()
    assert "slowdown_bound" in (site / "docs" / "reference" / "pools.html").read_text()
    assert "too-many" in (site / "docs" / "reference" / "errors.html").read_text()
    assert "DeviceDrained" in (site / "docs" / "reference" / "events.html").read_text()
    first = (site / "index.html").read_text()
    for title in contents.SECTIONS:
        assert title in first, title


@pytest.mark.parametrize(("width", "scheme"), LOOKS if ALL_LOOKS else [(SMALL_PX, "dark")])
def test_axe_finds_nothing_on_the_pages_and_they_fit_their_window(
    site: Path, browser: Browser, width: int, scheme: str
) -> None:
    """Pages that have every kind of element, as they look on a phone; with ALL_LOOKS in each look, and each other page in one."""
    opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    every = sorted(page for page in site.rglob("*.html") if not page.relative_to(site).parts[0].startswith("_"))
    look = LOOKS.index((width, scheme))
    for page in [*(site / f"{name}.html" for name in _IN_EACH_LOOK), *(every[look :: len(LOOKS)] if ALL_LOOKS else ())]:
        opened.goto(page.as_uri())
        name = str(page.relative_to(site))
        assert opened.evaluate("document.documentElement.scrollWidth") <= width, name
        assert (name, violations(opened)) == (name, {})
    opened.close()


def test_a_screenshot_opens_in_full_on_a_phone(site: Path, browser: Browser) -> None:
    opened = browser.new_page(viewport={"width": SMALL_PX, "height": 800})
    opened.goto((site / "docs" / "start.html").as_uri())
    opened.get_by_role("link", name="The launcher:").click()
    assert opened.locator("img").evaluate("picture => picture.naturalWidth") > 2 * SMALL_PX
    opened.close()


def test_links_to_other_sites_are_listed(site: Path) -> None:
    links = (site / "external-links.txt").read_text().splitlines()
    assert links == sorted(set(links))
    assert all(link.startswith("http") for link in links)


def test_a_page_in_no_section_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = dict(contents.SECTIONS)
    sections.pop("Run a hub")
    monkeypatch.setattr(build, "SECTIONS", sections)
    assert build.main([str(tmp_path / "out")]) == 1
    assert "docs/broker.md is in 0 sections" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_link_to_no_heading_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "one.md").write_text("# One\n\n[there](two.md#no-such-heading)\n")
    (docs / "two.md").write_text("# Two\n")
    (tmp_path / "README.md").write_text("# Us\n")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "GENERATED", {})
    monkeypatch.setattr(build, "SECTIONS", {"All": ("Both.", ("one", "two"))})
    assert build.main([str(tmp_path / "out")]) == 1


@pytest.mark.parametrize("name", pictures())
def test_a_picture_is_what_it_is_drawn_from(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pictures()[name], "`python -m docs._site.pictures` draws it again"


def test_pictures_show_every_room_and_state() -> None:
    drawn = pictures()
    for room in [room for floor in floors() for room in floor]:
        assert f">{room}</text>" in drawn["house.svg"]
    for state in set(LeaseState) - {LeaseState.ENDED}:
        assert f">{state.value}</text>" in drawn["states.svg"]
    assert "prefers-reduced-motion" in drawn["taking-turns.svg"]


def test_all_pictures_have_a_dark_form_and_fit_a_phone() -> None:
    for path in (ROOT / "docs").glob("*.svg"):
        text = path.read_text()
        assert re.search(r"prefers-color-scheme: ?dark", text), path.name
        assert int(re.findall(r'viewBox="0 0 (\d+) ', text)[0]) <= 400, path.name
