"""What `%gpu` shows and what a waiting cell says, in Notebook 7 by axe: in its light and its dark theme, on a small and a large screen."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from fractional_gpu.protocol.messages import DrainRequest
from tests.e2e.browser import Lab, opened_lab, opened_notebook
from tests.support.axe import SMALL_PX, assert_accessible
from tests.support.stories import fill
from tests.support.world import World, until

THEMES = "lab/user-settings/@jupyterlab/apputils-extension"
OUTPUT = ".jp-OutputArea-output"
SHOWN = {
    "%gpu": "of 256 MiB used",
    "%gpu top": "In the bars",
    "%gpu history": "on the GPU",
    "%gpu explain": "asked for the GPU",
    "%gpu cost": "this month",
    """from fractional_gpu_kernel.display.lines import publish
from fractional_gpu_kernel.magics.measure_cell import MeasurementView
figures = {"remarks": [], "sentences": ["A quarter suffices."], "table": ["memory " * 40]}
publish(get_ipython(), MeasurementView(figures))""": "A quarter suffices",  # `%%gpu measure` itself takes a minute
}


def choose_theme(world: World, theme: str) -> None:
    """Before the server starts: its pages have this theme."""
    folder = Path(world.folder, "config", THEMES)
    folder.mkdir(parents=True)
    (folder / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))


def at_both_widths(lab: Lab, ours: str) -> None:
    size = lab.page.viewport_size
    assert size is not None
    for width in (SMALL_PX, size["width"]):
        lab.page.set_viewport_size({"width": width, "height": size["height"]})
        assert_accessible(lab.page, ours)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_what_a_notebook_shows_is_accessible(world: World, theme: str) -> None:
    world.install(250)
    choose_theme(world, theme)
    with opened_notebook(world, "fractional-gpu-default-250") as lab:
        expect(lab.page.locator("body")).to_have_attribute("data-jp-theme-name", theme)
        lab.run(fill(1, 32).strip() + '\nprint("there")')
        expect(lab.output).to_contain_text("there")
        for command, text in SHOWN.items():
            lab.run(command)
            expect(lab.output).to_contain_text(text)
            at_both_widths(lab, OUTPUT)


def test_a_wait_is_said_aloud_where_there_is_no_status_bar(world: World) -> None:
    world.install(750)
    with opened_notebook(world, "fractional-gpu-default-750") as lab, world.client() as client:
        lab.run(fill(1, 32).strip() + '\nprint("there")')
        expect(lab.output).to_contain_text("there")
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
        at_both_widths(lab, OUTPUT)
        client.undrain(device.device_id)
        expect(lab.output).to_contain_text("here again")
        expect(spoken).to_have_text("GPU: on the GPU")


def test_the_settings_are_accessible_and_changed_by_keyboard(world: World) -> None:
    world.install(250)
    with opened_lab(world) as lab:
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
