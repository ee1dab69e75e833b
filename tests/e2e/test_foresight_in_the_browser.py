"""A person at a notebook whose kernel was suspended for another one: it is back before Shift-Enter, and only one word leaves the page."""

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Request, expect

from tests.e2e.browser import Lab, opened_lab
from tests.support.stories import CHECK, fill
from tests.support.world import World, new_world

KERNEL = "Python 3 · 3/4 GPU"
SETTINGS = "lab/api/settings/jupyter-fractional-gpu:status"
UNTOLD = "nobody_may_hear_of_this"


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[World, Lab, list[Request]]]:
    """One JupyterLab for both tests. Its first notebook is in front, and its kernel was suspended for that of a second one."""
    with new_world() as world:
        world.install(750)
        with opened_lab(world) as lab:
            told: list[Request] = []
            lab.page.on(
                "request", lambda one: told.append(one) if one.url.partition("?")[0].endswith("/expect") else None
            )
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
            yield world, lab, told


@pytest.fixture
def world(shared: tuple[World, Lab, list[Request]]) -> World:
    return shared[0]


@pytest.fixture
def lab(shared: tuple[World, Lab, list[Request]]) -> Lab:
    return shared[1]


@pytest.fixture
def told(shared: tuple[World, Lab, list[Request]]) -> list[Request]:
    """What the page has told the server of signs, from its first notebook on: it may tell one as soon as a notebook comes to the front."""
    return shared[2]


def story(world: World, lab: Lab) -> list[str]:
    (kernel,) = lab.server.request("GET", "api/kernels")
    with world.client() as client:
        return [line.reason for line in client.story(world.lease(kernel["id"]).lease_id).lines]


def test_who_types_finds_the_kernel_back_and_the_cell_waits_for_nothing(
    world: World, lab: Lab, told: list[Request]
) -> None:
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
    expect(lab.output).to_contain_text(re.compile(r"a cell is expected \((a cell is being edited|its notebook came)"))

    assert told, "the page told no sign"
    for request in told:
        body = json.loads(request.post_data or "")
        assert body.keys() == {"sign"}
        assert body["sign"] in {"focus", "scroll", "typing", "hover"}
        assert UNTOLD not in request.url


def test_a_page_whose_settings_switch_it_off_tells_nothing(world: World, lab: Lab, told: list[Request]) -> None:
    lab.server.request("PUT", SETTINGS, {"raw": json.dumps({"foresight": False})})
    lab.page.goto(f"{lab.server.url}lab/tree/Untitled.ipynb?reset")  # the notebook without what was open beside it
    expect(lab.item).to_contain_text("3/4 GPU")
    told.clear()
    (kernel,) = lab.server.request("GET", "api/kernels")
    lease = world.lease(kernel["id"])
    if lease.state == "resident":
        with world.client() as client:
            client.suspend(lease.lease_id)
    expect(lab.item).to_contain_text("suspended")
    before = story(world, lab)
    lab.cells.last.locator(".cm-content").click()
    lab.page.keyboard.type("1 + 1")
    assert lab.page.evaluate("document.activeElement.closest('.jp-Notebook') !== null")
    lab.page.keyboard.press("Shift+Enter")
    lab.run(CHECK.strip())
    expect(lab.output).to_contain_text("intact")
    assert not told
    assert "resume.expected" not in story(world, lab)[len(before) :]
