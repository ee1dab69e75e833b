"""JupyterLab's debugger, which asks a kernel for its variables after each cell, in a real JupyterLab."""

from playwright.sync_api import expect

from tests.e2e.browser import Lab, opened_browser, opened_lab
from tests.e2e.test_debugger import TOUCHING
from tests.support.pair import NO_TURNS
from tests.support.paths import COMPLETE_PYTHONPATH
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, World

KERNEL = "Python 3 · 3/4 GPU"


def launched(lab: Lab, code: str) -> Notebook:
    """Run the code in a new notebook, and return a second connection to its kernel."""
    before = {kernel["id"] for kernel in lab.server.request("GET", "api/kernels")}
    lab.launch(KERNEL)
    lab.run(code.strip() + '\nprint("there")')
    expect(lab.output).to_contain_text("there")
    (kernel_id,) = {kernel["id"] for kernel in lab.server.request("GET", "api/kernels")} - before
    return lab.server.connect(kernel_id)


def test_the_debuggers_panel_shows_what_lies_on_the_gpu_and_leaves_a_kernel_suspended_that_is_to_be(
    world: World,
) -> None:
    world.environment["PYTHONPATH"] = COMPLETE_PYTHONPATH
    world.configure(NO_TURNS)
    world.install(750)
    with opened_browser() as browser, opened_lab(world, browser) as lab:
        first = launched(lab, fill(1) + TOUCHING)
        lab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-DebuggerBugButton").click()
        variables = lab.page.locator(".jp-DebuggerVariables-body jp-tree-view")
        expect(variables).to_contain_text("touching")
        launched(lab, fill(2))
        world.await_state(first.kernel_id, "suspended")
        lab.turn_to("Untitled.ipynb")  # the panel asks for the variables
        world.await_state(first.kernel_id, "resident")
        expect(variables).to_contain_text("touching")
        lab.run("%gpu suspend")
        expect(lab.output).to_contain_text("Suspended")
        assert first.debug("debugInfo")["success"], "the page asks for nothing that is behind this"
        expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")
        assert world.lease(first.kernel_id).state == "suspended"
        lab.run(CHECK.strip())
        expect(lab.output).to_contain_text("intact")
