"""Kernels that a page keeps at work without a cell: JupyterLab's debugger, and a GUI event loop, in a real JupyterLab."""

from playwright.sync_api import expect

from fractional_gpu.gpu.simulated.store import Store
from tests.e2e.browser import Lab, opened_lab
from tests.e2e.test_debugger import TOUCHING
from tests.e2e.test_gui_loops import COUNT, REGISTERED, await_ticks, nudged
from tests.support.pair import NO_TURNS
from tests.support.paths import COMPLETE_PYTHONPATH
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, World

KERNEL = "Python 3 · 3/4 GPU"


def launched(lab: Lab, code: str) -> Notebook:
    """Run the code in a new notebook, and return another connection to its kernel."""
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
    with opened_lab(world) as lab:
        first = launched(lab, fill(1) + TOUCHING)
        lab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-DebuggerBugButton").click()
        variables = lab.page.locator(".jp-DebuggerVariables-body jp-tree-view")
        expect(variables).to_contain_text("touching")
        launched(lab, fill(2))
        world.await_state(first.kernel_id, "suspended")
        lab.turn_to("Untitled.ipynb")  # the panel asks for the variables
        world.await_state(first.kernel_id, "resident")
        expect(variables).to_contain_text("touching")
        # A suspend that takes a second, as a driver's does: the page asks for the variables once more when the cell has ended.
        Store(world.simulated_folder).configure(checkpoint_mib_s=40)
        lab.run("%gpu suspend")
        expect(lab.output).to_contain_text("Suspended")
        assert first.debug("debugInfo")["success"], "the page asks for nothing that is behind this"
        expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")
        assert world.lease(first.kernel_id).state == "suspended"
        lab.run(CHECK.strip())
        expect(lab.output).to_contain_text("intact")


def test_a_notebook_with_a_gui_event_loop_makes_room_and_goes_on(world: World) -> None:
    world.configure(NO_TURNS)
    world.install(750)
    with opened_lab(world) as lab:
        first = launched(lab, fill(1) + COUNT + REGISTERED)
        with nudged(first):
            launched(lab, fill(2))
            world.await_state(first.kernel_id, "suspended")
            lab.turn_to("Untitled.ipynb")
            expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")
            lab.run(CHECK.strip())
            expect(lab.output).to_contain_text("intact")
            expect(lab.item).to_contain_text("of 768 MiB")
            await_ticks(world)
