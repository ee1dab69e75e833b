"""`%gpu` against a real broker: what it shows is true, and what it asks for happens."""

import re

from provisioner.gpu.simulated import faults
from tests.support.world import Server, World

FILL = """
from provisioner.gpu.simulated import cuda
buffer = cuda.allocate(192 << 20)
buffer.write(b"x" * (192 << 20))
"""


def text(shown: list[dict[str, str]]) -> str:
    return shown[-1]["text/plain"]


def test_what_the_notebook_shows_is_what_the_broker_knows(world: World, server: Server) -> None:
    quarter, half = world.install(250, 500)
    first, second = server.start(quarter), server.start(half)
    first.must(FILL)
    second.must(FILL)
    status = text(first.must("%gpu").data)
    assert "1/4 GPU, 256 MiB of device memory, pool default" in status
    assert "beside" in status
    assert "1/2 GPU" in status.partition("beside")[2]
    top = text(first.must("%gpu top").data)
    assert re.search(r"1/4 GPU, 256 MiB +this kernel +on the GPU", top)
    assert re.search(r"1/2 GPU, 512 MiB +Python 3 .*on the GPU", top)
    first.send("%gpu suspend")
    world.await_state(first.kernel_id, "suspended")
    assert "saved in host memory" in text(first.must("%gpu").data)
    first.must("buffer.read()[:1]")
    history = text(first.must("%gpu history").data)
    assert "░" in history
    assert "█" in history
    story = text(first.must("%gpu explain").data)
    assert "224 MiB restored" in story


def test_a_pool_may_let_a_cell_run_on_while_its_memory_comes_back(world: World) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'overlap_resume': True}}")
    with Server(world) as server:
        (whole,) = world.install(1000)
        notebook = server.start(whole)
        notebook.must(FILL)
        notebook.send("%gpu suspend")
        world.await_state(notebook.kernel_id, "suspended")
        fault = faults.inject(world.simulated_folder, "restore", "hang")
        request = notebook.send("print('on the processor'); print(buffer.read()[:1])")
        for message in notebook.messages(request):
            if message["msg_type"] == "stream":
                assert message["content"]["text"] == "on the processor\n"
                break
        assert world.lease(notebook.kernel_id).state == "resuming"
        faults.remove(world.simulated_folder, fault)
        assert notebook.wait(request).text == "b'x'\n"
        assert notebook.must("print(buffer.read()[:1])").text == "b'x'\n"
        assert world.lease(notebook.kernel_id).position is None
