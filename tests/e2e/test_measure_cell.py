"""`%%gpu measure` in a real kernel, with real processes on the simulated device."""

from pathlib import Path

import pytest

from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("measure-cell")

SETUP = "from fractional_gpu.gpu.simulated import cuda\npasses = 0"
CELL = "buffer = cuda.allocate(8 << 20)\nwhile passes < 3:\n    cuda.launch(0.02, 1.0)\n    passes += 1\npasses = 0\nbuffer.free()"
OPTIONS = "--memory 64MiB --copies 1"


def leases(world: World) -> list[str]:
    return [one.spec.label for one in world.status().leases if one.spec.label.startswith("measure")]


def test_a_cell_is_measured_in_separate_processes_with_the_setup_that_it_names_until_an_interrupt(
    world: World, server: Server
) -> None:
    (quarter,) = world.install(250)
    notebook = server.start(quarter)
    notebook.must("kept = 7")
    notebook.must(SETUP)
    running = notebook.send(f"%%gpu measure --setup 2 {OPTIONS}\n{CELL}")
    for message in notebook.messages(running):
        if "round 1" in message["content"].get("data", {}).get("text/plain", ""):
            break
    notebook.interrupt()
    stopped = notebook.wait(running)
    assert stopped.status == "error"
    shown = stopped.data[-1]["text/plain"]
    assert "on a simulated device" in shown
    assert "alone on 1: " in shown
    assert "1/2 next to 1 other: " in shown
    assert "No smaller share is known to be enough" in shown
    assert "ALL UNITS/s" in shown
    assert notebook.must("print(kept, passes, 'buffer' in globals())").text == "7 0 False\n", (
        "the kernel ran none of it"
    )
    until(lambda: not leases(world), "its leases end")
    what_hinders_it_is_told_in_one_sentence(notebook)
    a_measurement_ends_with_its_kernel(world, server, notebook)


def what_hinders_it_is_told_in_one_sentence(notebook: Notebook) -> None:
    missing = notebook.run(f"%%gpu measure {OPTIONS}\n{CELL}")
    assert missing.status == "error"
    assert "Nothing was measured" in missing.error
    assert "is not defined in the measured process" in missing.error
    assert "--setup" in missing.error
    notebook.must("buffer = cuda.allocate(8 << 20)")
    held = notebook.run("%%gpu measure --setup 1 --fractions 1 --within 3s\n1")
    assert "no device of pool default has" in held.error
    assert "This kernel itself holds 256 MiB" in held.error
    assert "%gpu release" in held.error


def a_measurement_ends_with_its_kernel(world: World, server: Server, notebook: Notebook) -> None:
    files = notebook.must("import os, tempfile; tempfile.tempdir = os.getcwd(); print(tempfile.tempdir)").text.strip()
    before = set(Path(files).iterdir())
    notebook.send(f"%%gpu measure {OPTIONS}\nimport time; time.sleep(0.05)")
    until(lambda: leases(world), "it measures")
    pid = world.lease(notebook.kernel_id).pid
    assert pid is not None
    world.end(pid, 9)
    until(lambda: not leases(world), "its leases end")
    assert set(Path(files).iterdir()) == before, "no file of the kernel's is left"
    world.await_restart(notebook.kernel_id, pid)
    # Jupyter still believes that it is busy and does not wait until a message is received: the reply would be lost.
    until(lambda: not world.lease(notebook.kernel_id).busy, "the kernel that was started again answers")
    server.connect(notebook.kernel_id).must("1")  # Jupyter cannot shut down a kernel before it has restarted it
