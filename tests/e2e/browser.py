"""A user at a browser: Chromium, JupyterLab with the extension, and what can be seen and clicked there."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.labextension.conftest import enable
from tests.labextension.rebuild import PREBUILT
from tests.support.screenshots import take
from tests.support.world import Server, World, until

__all__ = ["Lab", "new_page", "opened_browser", "opened_lab", "opened_notebook", "write_notebook"]

DEADLINE_MS = 90_000
_EXTENSIONS = {"jupyterlab": True, "jupyter_lsp": False, "jupyter_server_terminals": False}
_NOTEBOOK_7 = {**_EXTENSIONS, "notebook": True, "notebook_shim": True}
_QUIET = {
    "disabledExtensions": {
        "@jupyterlab/apputils-extension:announcements": True,  # the offer to show news
        "@jupyterlab/lsp-extension:plugin": True,
    },
    "buildCheck": False,  # for which the server starts node twice with each page
}
# A blinking cursor takes a twentieth of a processor.
_STILL_CURSOR = """
const still = new CSSStyleSheet();
still.replaceSync(".cm-cursorLayer { animation: none !important }");
document.adoptedStyleSheets = [still];
"""
_UNASKED = {"@jupyterlab/docmanager-extension:plugin": {"renameUntitledFileOnSave": False}}


class Lab:
    """One JupyterLab page that shows a notebook."""

    def __init__(self, server: Server, page: Page) -> None:
        self.server = server
        self.page = page

    def launch(self, kernel: str) -> None:
        card = self.page.locator('.jp-LauncherCard[data-category="Notebook"]').filter(has_text=kernel)
        if not card.is_visible():
            self.page.get_by_title("New Launcher").first.click()
        card.click()
        expect(self.page.locator(".jp-Launcher")).to_have_count(0)
        expect(self.item).to_contain_text("GPU · has not used the GPU (simulated)")
        expect(self.page.get_by_role("button", name=f"{kernel} (simulated) | Idle", exact=True)).to_be_visible()

    def turn_to(self, notebook: str) -> None:
        self.page.get_by_role("tab", name=notebook, exact=True).click()

    @property
    def cells(self) -> Locator:
        return self.page.locator(f"{_PANEL} .jp-CodeCell")

    @property
    def output(self) -> Locator:
        """The output of the cell before the last; the last cell is empty, for the next code."""
        return self.page.locator(f"{_PANEL} .jp-CodeCell:nth-last-child(2 of .jp-CodeCell) .jp-OutputArea")

    @property
    def item(self) -> Locator:
        return self.page.locator("#jp-main-statusbar button[aria-haspopup=dialog]")

    @property
    def panel(self) -> Locator:
        return self.page.get_by_role("dialog", name="This kernel's GPU")

    def run(self, code: str) -> None:
        self.cells.last.locator(".cm-content").click()
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")

    def choose_theme(self, theme: str) -> None:
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        self.page.locator('.lm-Menu-item[data-type="submenu"]', has_text=re.compile("^Theme$")).click()
        self.page.get_by_role("menuitem", name=theme, exact=True).click()
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-name", theme)

    def picture(self, name: str) -> None:
        take(self.page, name)


_PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"


@contextmanager
def opened_browser() -> Iterator[Browser]:
    # The shell opens no windows, and takes a third less processor time for the same pages.
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    assert chromium, "these tests need Chromium (Debian: apt-get install chromium-headless-shell)"
    # There is no GPU to draw with, and emulating one takes a quarter of the browser's processor time.
    arguments = ["--disable-gpu"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        expect.set_options(timeout=DEADLINE_MS)
        try:
            yield browser
        finally:
            browser.close()


def new_page(browser: Browser) -> Page:
    page = browser.new_page(viewport={"width": 1200, "height": 700}, color_scheme="light")
    page.add_init_script(_STILL_CURSOR)
    page.set_default_timeout(DEADLINE_MS)
    return page


def _install(world: World) -> None:
    """Install the extension for the servers and pages of this world, and turn off dialogs that ask questions."""
    enable(world)
    extensions = world.folder / "data" / "labextensions"
    extensions.mkdir()
    shutil.copytree(PREBUILT, extensions / "jupyter-fractional-gpu")
    settings = world.folder / "config" / "labconfig"
    settings.mkdir()
    (settings / "page_config.json").write_text(json.dumps(_QUIET))
    (settings / "default_setting_overrides.json").write_text(json.dumps(_UNASKED))


@contextmanager
def opened_lab(world: World, browser: Browser, *, with_notebook: bool = False) -> Iterator[Lab]:
    """JupyterLab in a browser, at the launcher, for the block; with `with_notebook` its server also has the pages of Notebook 7."""
    _install(world)
    extensions = _NOTEBOOK_7 if with_notebook else _EXTENSIONS
    with Server(world, extensions=extensions) as server, closing(new_page(browser)) as page:
        lab = Lab(server, page)
        try:
            page.goto(f"{server.url}lab?token={server.token}")
            expect(page.locator(".jp-LauncherCard").first).to_be_visible()
            yield lab
        except AssertionError:
            lab.picture("failed")
            raise


def _talks(server: Server) -> bool:
    try:
        kernels = server.request("GET", "api/kernels?no_track_activity=1")
    except HTTPError as error:
        # Jupyter's server lists a kernel a moment before it knows the kernel's last activity, and fails in between.
        if error.code != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        return False
    return any(one["connections"] for one in kernels)


def write_notebook(world: World, name: str, kernelspec: str) -> None:
    """Write a notebook with an empty cell, whose kernel starts when a page opens it."""
    cell: dict[str, Any] = {"cell_type": "code", "id": "first", "metadata": {}, "source": ""}
    cell |= {"outputs": [], "execution_count": None}
    metadata = {"kernelspec": {"name": kernelspec, "display_name": kernelspec}}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": [cell]}
    (world.notebooks / name).write_text(json.dumps(notebook))


@contextmanager
def opened_notebook(world: World, browser: Browser, kernelspec: str) -> Iterator[Lab]:
    """A new notebook in Notebook 7 with a started kernel of that kernelspec, for the block."""
    _install(world)
    write_notebook(world, "Untitled.ipynb", kernelspec)
    with Server(world, extensions=_NOTEBOOK_7) as server, closing(new_page(browser)) as page:
        page.goto(f"{server.url}notebooks/Untitled.ipynb?token={server.token}")
        expect(page.locator(".jp-CodeCell")).to_be_visible()
        until(lambda: _talks(server), "the page talks to its kernel")
        yield Lab(server, page)
