"""A person at a notebook whose kernel was suspended for another one: it is back before Shift-Enter, and only one word leaves the page."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Request, expect

from tests.e2e.browser import Lab, opened_lab, opened_notebook
from tests.support.stories import CHECK, fill
from tests.support.world import World

pytestmark = pytest.mark.promise("early-resume")

KERNEL = "Python 3 · 3/4 GPU"
SETTINGS = "lab/api/settings/jupyter-fractional-gpu:status"
UNTOLD = "nobody_may_hear_of_this"


@contextmanager
def two_notebooks(world: World) -> Iterator[tuple[Lab, list[Request]]]:
    """The first notebook is in front, and its kernel was suspended for that of the second, which has ended. Yields what the page tells.

    The settings of the page switch foresight off.
    """
    world.install(750)
    settings = world.folder / "config" / "lab" / "user-settings" / "jupyter-fractional-gpu"
    settings.mkdir(parents=True)
    (settings / "status.jupyterlab-settings").write_text(json.dumps({"foresight": False}))
    with opened_lab(world) as lab:
        told: list[Request] = []
        lab.page.on("request", lambda one: told.append(one) if one.url.partition("?")[0].endswith("/expect") else None)
        lab.launch(KERNEL)
        lab.run(fill(1, 64).strip() + '\nprint("first")')
        expect(lab.output).to_contain_text("first")
        lab.launch(KERNEL)
        lab.run(fill(2, 64).strip() + '\nprint("second")')
        expect(lab.output).to_contain_text("second")
        first, second = (world.lease(one["id"]) for one in lab.server.request("GET", "api/kernels"))
        if first.state == "resident":
            first, second = second, first
        assert (first.state, second.state) == ("suspended", "resident")
        lab.turn_to("Untitled.ipynb")
        expect(lab.item).to_contain_text("suspended")
        lab.server.request("DELETE", f"api/kernels/{second.kernel_id}")
        yield lab, told


def switch_on(world: World, lab: Lab) -> None:
    """Switch foresight on in the page's settings, load the page with this notebook alone, and suspend its kernel again."""
    lab.server.request("PUT", SETTINGS, {"raw": json.dumps({"foresight": True})})
    lab.page.goto(f"{lab.server.url}lab/tree/Untitled.ipynb?reset")
    expect(lab.item).to_contain_text("of 768 MiB")
    (kernel,) = lab.server.request("GET", "api/kernels")
    world.suspend_for_others(kernel["id"])
    expect(lab.item).to_contain_text("suspended")


def story(world: World, lab: Lab) -> list[str]:
    (kernel,) = lab.server.request("GET", "api/kernels")
    with world.client() as client:
        return [line.reason for line in client.story(world.lease(kernel["id"]).lease_id).lines]


def test_who_types_finds_the_kernel_back_and_where_it_is_switched_off_the_page_tells_nothing(world: World) -> None:
    with two_notebooks(world) as (lab, told):
        nothing_is_told_where_it_is_switched_off(world, lab, told)
        switch_on(world, lab)
        told.clear()  # while the page was loaded its kernel was on the GPU
        the_kernel_is_back_and_the_cell_waits_for_nothing(world, lab)
        only_one_word_leaves_the_page(told)


def nothing_is_told_where_it_is_switched_off(world: World, lab: Lab, told: list[Request]) -> None:
    lab.cells.last.locator(".cm-content").click()
    lab.page.keyboard.type("1 + 1")
    assert lab.page.evaluate("document.activeElement.closest('.jp-Notebook') !== null")
    lab.page.keyboard.press("Shift+Enter")
    lab.run(CHECK.strip())
    expect(lab.output).to_contain_text("intact")
    assert not told
    assert "resume.expected" not in story(world, lab)


def the_kernel_is_back_and_the_cell_waits_for_nothing(world: World, lab: Lab) -> None:
    lab.cells.last.locator(".cm-content").click()
    lab.page.keyboard.type(f"{UNTOLD} = 1\n")
    lab.page.keyboard.insert_text(CHECK.strip())
    expect(lab.item).to_contain_text("of 768 MiB")
    before = story(world, lab)
    assert "resume.expected" in before
    lab.page.keyboard.press("Shift+Enter")
    expect(lab.output).to_contain_text("intact")
    after = story(world, lab)[len(before) :]
    assert not [one for one in after if one.startswith(("wait.", "resume.", "grant."))], "it ran at once"
    lab.run("%gpu explain")
    expect(lab.output).to_contain_text(
        re.compile(r"a cell is expected \((a cell is being edited|its notebook came|its cells come)")
    )


def only_one_word_leaves_the_page(told: list[Request]) -> None:
    assert told, "the page told no sign"
    for request in told:
        body = json.loads(request.post_data or "")
        assert body.keys() == {"sign"}
        assert body["sign"] in {"focus", "scroll", "typing", "hover"}
        assert UNTOLD not in request.url


def test_notebook_7_tells_it_alike(world: World) -> None:
    (name,) = world.install(750)
    with opened_notebook(world, name) as notebook:
        notebook.run(fill(1, 64).strip() + '\nprint("first")')
        expect(notebook.output).to_contain_text("first")
        (kernel,) = notebook.server.request("GET", "api/kernels")
        world.suspend_for_others(kernel["id"])
        notebook.cells.last.locator(".cm-content").click()
        with notebook.page.expect_request(lambda one: one.url.partition("?")[0].endswith("/expect")) as told:
            notebook.page.keyboard.type("p")
        assert json.loads(told.value.post_data or "").keys() == {"sign"}
        world.await_state(kernel["id"], "resident")
        assert "resume.expected" in story(world, notebook)
        notebook.page.keyboard.press("Backspace")
        notebook.page.keyboard.insert_text(CHECK.strip())
        notebook.page.keyboard.press("Shift+Enter")
        expect(notebook.output).to_contain_text("intact")


def test_a_kernel_that_was_released_stays_away_while_a_comment_is_typed_and_run(world: World) -> None:
    world.install(750)
    with opened_lab(world) as lab:
        lab.launch(KERNEL)
        lab.run(fill(1, 64).strip() + '\nprint("first")')
        expect(lab.output).to_contain_text("first")
        lab.run("%gpu release")
        expect(lab.item).to_contain_text("suspended")
        lab.cells.last.locator(".cm-content").click()
        with lab.page.expect_response(lambda one: one.url.partition("?")[0].endswith("/expect")) as told:
            lab.page.keyboard.type("# think")
        assert told.value.ok
        lab.page.keyboard.press("Shift+Enter")
        (kernel,) = lab.server.request("GET", "api/kernels")
        assert world.lease(kernel["id"]).state == "suspended"
        assert "resume.expected" not in story(world, lab)
        lab.run(CHECK.strip())
        expect(lab.output).to_contain_text("intact")
