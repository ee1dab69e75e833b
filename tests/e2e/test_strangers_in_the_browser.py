"""JupyterLab names the program that holds the device without a lease, and tells when the cell that waited for it begins."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import expect

from tests.e2e.browser import Lab, opened_browser, opened_lab
from tests.e2e.test_browser import SETTINGS
from tests.support.axe import assert_accessible
from tests.support.paths import STRANGER
from tests.support.stories import CHECK, fill
from tests.support.world import World, until

KERNEL = "Python 3 · 1/2 GPU"
CLOCK = "() => { const now = Date.now; window.ahead = 0; Date.now = () => now() + window.ahead; }"


@contextmanager
def stranger(world: World, mib: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-P", STRANGER, str(world.simulated_folder), "0", str(mib)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=world.environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"holding {process.pid}\n".encode()
        try:
            yield process
        finally:
            process.kill()


def a_cell_waits_for_the_stranger(world: World, lab: Lab, ahead_ms: int = 0) -> None:
    """Run a cell while a stranger has the device, until the page has named it everywhere and its clock has gone ahead."""
    running = lab.page.locator("#jp-running-sessions")
    (kernel,) = lab.server.request("GET", "api/kernels")
    lab.run("%gpu suspend")
    world.await_state(kernel["id"], "suspended")
    with stranger(world, 700) as program:
        until(lambda: world.status().devices[0].strangers, "the broker sees it")
        lab.run(CHECK.strip())
        (seen,) = world.status().devices[0].strangers
        assert (seen.pid, seen.own) == (program.pid, True)
        name = f"{seen.command} (your process {program.pid})"
        expect(lab.item).to_contain_text(f"1/2 GPU · waiting, place 1 · {name} holds ")
        expect(lab.output).to_contain_text(f"{name} holds ")
        lab.item.click()
        expect(lab.panel).to_contain_text(f"{name}: ")
        lab.page.keyboard.press("Escape")
        if not running.is_visible():
            lab.page.get_by_role("tab", name="Running Terminals and Kernels").click()
        expect(running).to_contain_text(f"{name}: ")
        assert_accessible(lab.page, ".jp-FractionalGPU-item")
        lab.picture("stranger")
        lab.page.evaluate(f"window.ahead += {ahead_ms}")
    expect(lab.output).to_contain_text("intact")
    expect(lab.item).to_contain_text("of 512 MiB")  # by now the page would have told
    expect(running).not_to_contain_text("your process")


def test_a_stranger_is_named_where_a_cell_waits_and_the_begin_of_the_cell_is_told_until_switched_off(
    world: World,
) -> None:
    world.install(500)
    with opened_browser() as browser, opened_lab(world, browser) as lab:
        lab.launch(KERNEL)
        lab.run(fill(1, 64).strip())
        lab.page.keyboard.press("Control+s")
        told = lab.page.get_by_role("alert").filter(has_text="a cell has begun, after waiting")
        lab.page.evaluate(CLOCK)
        a_cell_waits_for_the_stranger(world, lab)
        expect(told).to_have_count(0)
        a_cell_waits_for_the_stranger(world, lab, ahead_ms=30_000)
        expect(told).to_contain_text("Untitled.ipynb: a cell has begun, after waiting")
        lab.page.get_by_role("button", name="Never show this").click()
        until(lambda: lab.server.request("GET", SETTINGS)["settings"].get("waited") is False, "that is kept")
        a_cell_waits_for_the_stranger(world, lab, ahead_ms=30_000)
        expect(told).to_have_count(0)
        lab.page.get_by_role("button", name="Suspend All").click()
        lab.page.get_by_role("dialog").get_by_role("button", name="Suspend All").click()
        expect(lab.item).to_contain_text("1/2 GPU · suspended")
