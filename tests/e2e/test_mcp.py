"""An agent uses GPUs through the MCP server of a real Jupyter server."""

import json
from collections.abc import Iterator

import pytest

from tests.support.agents import Agent, connected, mcp_server, mcp_world
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("agents")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with mcp_world() as world:
        world.configure("c.GPUBroker.pools = {'default': {'idle_after': 'on-demand', 'preempt': 'never'}}")
        world.start_broker()
        yield world


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    with mcp_server(world) as server:
        yield server


@pytest.fixture(scope="module")
def agent(server: Server) -> Iterator[Agent]:
    with connected(server) as agent:
        yield agent


@pytest.fixture
def kernels(world: World, server: Server) -> Iterator[list[Notebook]]:
    """Kernels that end with the test."""
    started: list[Notebook] = []
    yield started
    for one in started:
        server.request("DELETE", f"api/kernels/{one.kernel_id}")
    until(lambda: not world.status().leases, "their leases have ended")


def test_tools_say_what_they_only_read_and_what_they_answer(agent: Agent) -> None:
    tools = {name: tool for name, tool in agent.tools.items() if name.startswith("gpu_")}
    reading = {name for name, tool in tools.items() if tool["annotations"]["readOnlyHint"]}
    assert reading == {"gpu_status", "gpu_explain", "gpu_cost"}
    assert tools.keys() - reading == {"gpu_reserve", "gpu_wait", "gpu_release", "gpu_resize"}
    for tool in tools.values():
        assert tool["outputSchema"]["type"] == "object"
    assert "ends_in_ms" in json.dumps(tools["gpu_reserve"]["outputSchema"])


def test_an_agent_reserves_and_releases_and_is_told_what_failed(agent: Agent) -> None:
    first = agent.call("gpu_reserve", memory_mib=700, seconds=600, agent="alpha")
    assert first["environment"]
    refused = agent.call("gpu_reserve", memory_mib=700, wait_s=0)
    assert (refused["code"], refused["reason"]) == ("no-room", "timeout")
    (lease,) = agent.call("gpu_status")["leases"]
    assert (lease["lease"]["spec"]["lease_id"], lease["lease"]["spec"]["label"]) == (first["lease_id"], "alpha")
    agent.call("gpu_release", lease_id=first["lease_id"])
    assert agent.call("gpu_status")["leases"] == []
    unknown = agent.call("gpu_explain", lease_id=first["lease_id"])
    assert (unknown["code"], "jupyter gpu status" in unknown["message"]) == ("not-found", True)


def test_an_agent_brings_a_kernel_back_resizes_and_explains_it(
    world: World, server: Server, agent: Agent, kernels: list[Notebook]
) -> None:
    (kernelspec,) = world.install(250)
    notebook = server.start(kernelspec)
    kernels.append(notebook)
    notebook.must(
        "from fractional_gpu.gpu.simulated import cuda\nbuffer = cuda.allocate(1 << 20); buffer.write(b'abc')"
    )
    lease_id = world.lease(notebook.kernel_id).lease_id
    with world.client() as client:
        client.suspend(lease_id)
    assert agent.call("gpu_wait", lease_id=lease_id)["lease"]["state"] == "resident"
    assert agent.call("gpu_resize", lease_id=lease_id, memory_mib=300)["lease"]["spec"]["reserve_mib"] == 300
    explained = agent.call("gpu_explain", lease_id=lease_id)
    assert "resumed" in [line["reason"] for line in explained["story"]]
    assert agent.call("gpu_cost", lease_id=lease_id)["cost"]["lease_id"] == lease_id
    kernel = agent.call("gpu_release", lease_id=lease_id)
    assert (kernel["code"], kernel["reason"]) == ("conflict", "kernel")
    assert notebook.must("print(buffer.read(3))").text == "b'abc'\n"


def test_a_wait_ends_at_its_deadline_and_says_what_is_in_the_way(
    world: World, server: Server, agent: Agent, kernels: list[Notebook]
) -> None:
    (whole,) = world.install(1000)
    first, second = server.start(whole), server.start(whole)
    kernels += [first, second]
    go = world.state / "go"
    running = first.send(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    world.await_state(first.kernel_id, "resident")
    lease_id = world.lease(second.kernel_id).lease_id
    refused = agent.call("gpu_wait", lease_id=lease_id, wait_s=1)
    assert (refused["code"], refused["reason"]) == ("no-room", "timeout")
    assert "is running a cell" in refused["message"]
    until(lambda: world.lease(second.kernel_id).position is None, "the wait has left the queue")
    go.touch()
    first.wait(running)
    assert agent.call("gpu_wait", lease_id=lease_id)["lease"]["state"] == "resident"


def test_many_waits_leave_the_server_its_threads_and_end_with_it(world: World, server: Server, agent: Agent) -> None:
    """It stops the server, so it comes last of the tests that share it."""
    agent.call("gpu_reserve", memory_mib=1000)
    waits = [agent.begin("gpu_reserve", memory_mib=30, wait_s=3600) for _ in range(45)]
    until(lambda: len(agent.call("gpu_status")["leases"]) == 1 + len(waits), "all wait")
    assert server.request("GET", "api/contents")["type"] == "directory"
    server.stop()
    until(lambda: not world.status().leases, "all have ended")
