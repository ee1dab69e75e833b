"""axe checks the output of `%gpu` and of a waiting cell in Notebook 7: in the light and the dark theme, on a small and a large screen."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from fractional_gpu.protocol.messages import DrainRequest
from tests.e2e.browser import Lab, opened_browser, opened_lab, opened_notebook
from tests.support.axe import ALL_LOOKS, SMALL_PX, assert_accessible
from tests.support.stories import fill
from tests.support.world import World, until

pytestmark = pytest.mark.promise("accessibility")

OUTPUT = ".jp-OutputArea-output"
WIDTH_PX, TALL_PX = 1200, 3000  # every output is inside the window
SHOWN = {
    "%gpu": "of 768 MiB used",
    "%gpu top": "In the bars",
    "%gpu history": "on the GPU",
    "%gpu explain": "asked for the GPU",
    "%gpu cost": "this month",
    """from fractional_gpu_kernel.display.lines import publish
from fractional_gpu_kernel.magics.measure_cell import MeasurementView
figures = {"remarks": [], "sentences": ["A quarter suffices."], "table": ["memory " * 40]}
publish(get_ipython(), MeasurementView(figures))""": "A quarter suffices",  # `%%gpu measure` itself takes a minute
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as opened:
        yield opened


@pytest.mark.timeout(300)
def test_what_a_notebook_shows_and_a_wait_that_it_says_aloud_are_accessible(world: World, browser: Browser) -> None:
    """Notebook 7 has no status bar. One page changes to the dark theme, as its user does; axe sees all outputs at once."""
    world.install(750)
    with opened_notebook(world, browser, "fractional-gpu-default-750") as lab:
        expect(lab.page.locator("body")).to_have_attribute("data-jp-theme-name", "JupyterLab Light")
        lab.run(fill(1, 32).strip() + '\nprint("there")')
        expect(lab.output).to_contain_text("there")
        for command, text in SHOWN.items():
            lab.run(command)
            expect(lab.output).to_contain_text(text)
        is_accessible_in_each_look(lab)
        a_wait_is_said_aloud(world, lab)


def is_accessible_in_each_look(lab: Lab) -> None:
    """Check the light theme at the page's width and the dark one on a small screen; with ALL_LOOKS each at both widths. Ends with dark."""
    for theme, width in (("Light", WIDTH_PX), ("Dark", SMALL_PX)):
        if theme == "Dark":
            lab.choose_theme("JupyterLab Dark")
        for at in (WIDTH_PX, SMALL_PX) if ALL_LOOKS else (width,):
            lab.page.set_viewport_size({"width": at, "height": TALL_PX})
            expect(lab.page.locator(OUTPUT)).to_have_count(len(SHOWN) + 1)
            assert_accessible(lab.page, OUTPUT)
    lab.page.set_viewport_size({"width": WIDTH_PX, "height": TALL_PX})


def a_wait_is_said_aloud(world: World, lab: Lab) -> None:
    with world.client() as client:
        spoken = lab.page.get_by_role("status").filter(has_text="GPU: ")
        expect(spoken).to_have_text("GPU: on the GPU")
        (kernel,) = lab.server.request("GET", "api/kernels")
        lease_id = world.lease(kernel["id"]).lease_id
        client.suspend(lease_id)
        expect(spoken).to_have_text("GPU: suspended")
        (device,) = world.status().devices
        client.drain(device.device_id, DrainRequest())
        lab.run('print("here again")')
        expect(spoken).to_have_text("GPU: waiting for the GPU, place 1")
        expect(lab.output).to_contain_text(re.compile("wait", re.IGNORECASE))
        assert_accessible(lab.page, OUTPUT)
        client.undrain(device.device_id)
        expect(lab.output).to_contain_text("here again")
        expect(spoken).to_have_text("GPU: on the GPU")


def test_the_settings_are_accessible_and_changed_by_keyboard(world: World, browser: Browser) -> None:
    world.install(250)
    with opened_lab(world, browser) as lab:
        lab.page.get_by_role("menuitem", name="Settings", exact=True).click()
        lab.page.get_by_role("menuitem", name=re.compile("^Settings Editor")).first.click()
        lab.page.get_by_text("Fractional GPU", exact=True).first.click()
        switch = lab.page.get_by_label("Bring kernels back before their cells run")
        expect(switch).to_be_checked()
        assert_accessible(lab.page, ".jp-SettingsPanel")
        switch.focus()
        lab.page.keyboard.press("Space")
        settings = "lab/api/settings/jupyter-fractional-gpu:status"
        until(lambda: not lab.server.request("GET", settings)["settings"].get("foresight", True), "it is switched off")
