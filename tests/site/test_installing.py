"""Every page installs what exists, and one variable decides what that is."""

import re
from pathlib import Path

import pytest

from docs._site import installing
from docs._site.installing import BUILD, IS_FILE, PACKAGE
from fractional_gpu import __version__
from tests.installs.story import build_wheel
from tests.support.paths import ROOT

PAGES = [page for page in installing.pages() if any(installing.installing(page.read_text()))]
PUBLISHED = "jupyter-fractional-gpu"


def test_the_pages_that_install_are_found() -> None:
    names = {page.name for page in PAGES}
    assert names >= {"README.md", "hub.md", "start.md", "environments.md", "tljh.md", "Dockerfile"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_installs_what_exists_and_leads_to_how_it_is_made(page: Path) -> None:
    text = page.read_text()
    assert installing.current(text) == text, "`python -m docs._site.installing` changes it"
    if page.suffix == ".md" and IS_FILE and BUILD not in text:
        assert "start.md#1-install" in text
    if page.name.startswith("Dockerfile"):
        wheel = PACKAGE.replace(__version__, "${VERSION}")
        assert text.count(f"COPY ./{wheel} /tmp/\n") == IS_FILE


def test_how_the_package_is_made_is_said_as_long_as_nothing_is_published() -> None:
    assert (f"\n{BUILD}\n" in (ROOT / "docs" / "start.md").read_text()) == IS_FILE


def test_it_is_the_name_of_the_file_that_is_built(tmp_path: Path) -> None:
    assert not IS_FILE or build_wheel(tmp_path).name == PACKAGE


def test_one_variable_changes_all_pages_at_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "PACKAGE", PUBLISHED)
    monkeypatch.setattr(installing, "IS_FILE", False)
    for page in PAGES:
        text = installing.current(page.read_text())
        installs = [line for line in text.splitlines() if re.search(r"pip install|--plugin", line)]
        assert not [line for line in installs if ".whl" in line], page
        assert any(PUBLISHED in line for line in installs), page
