"""An agent uses GPUs through the MCP server of a real Jupyter server."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.paths import MCP_AGENT
from tests.support.world import Server, World, new_world, until

pytestmark = pytest.mark.promise("agents")

# Of the MCP server, which must not be in every test's Jupyter server.
PACKAGES = sysconfig.get_path("purelib", vars={"base": f"{sys.prefix}/mcp"})


class Agent:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.tools: dict[str, Any] = {one["name"]: one for one in self._heard()}

    def call(self, tool: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tool": tool, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._heard()
        return json.loads(answer["error"]) if "error" in answer else answer

    def _heard(self) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as world:
        world.environment["PYTHONPATH"] += os.pathsep + PACKAGES
        yield world


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    with Server(world, "--MCPExtensionApp.mcp_port=0", extensions={"jupyter_server_mcp": True}) as server:
        yield server


@pytest.fixture
def agent(world: World, server: Server) -> Iterator[Agent]:
    info = world.folder / "run" / f"jpserver-mcp-{server.process.pid}.json"
    until(info.exists, "the MCP server writes its address")
    argv = [sys.executable, "-P", MCP_AGENT, json.loads(info.read_text())["url"]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, env=world.environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield Agent(process)
        finally:
            process.kill()


def test_tools_say_what_they_only_read_and_what_they_answer(agent: Agent) -> None:
    tools = {name: tool for name, tool in agent.tools.items() if name.startswith("gpu_")}
    reading = {name for name, tool in tools.items() if tool["annotations"]["readOnlyHint"]}
    assert reading == {"gpu_status", "gpu_explain", "gpu_cost"}
    assert tools.keys() - reading == {"gpu_reserve", "gpu_wait", "gpu_release", "gpu_resize"}
    for tool in tools.values():
        assert tool["outputSchema"]["type"] == "object"
    assert "ends_in_ms" in json.dumps(tools["gpu_reserve"]["outputSchema"])


def test_an_agent_reserves_and_releases_and_is_told_what_failed(world: World, agent: Agent) -> None:
    world.start_broker()
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


def test_what_an_agent_reserved_ends_with_its_jupyter_server(world: World, server: Server, agent: Agent) -> None:
    world.start_broker()
    agent.call("gpu_reserve", memory_mib=100)
    server.process.kill()
    until(lambda: not world.status().leases, "the reservation has ended")


def test_an_agent_brings_a_kernel_back_resizes_and_explains_it(world: World, server: Server, agent: Agent) -> None:
    (kernelspec,) = world.install(250)
    notebook = server.start(kernelspec)
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


def test_a_wait_ends_at_its_deadline_and_says_what_is_in_the_way(world: World, server: Server, agent: Agent) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'idle_after': 'on-demand', 'preempt': 'never'}}")
    (whole,) = world.install(1000)
    first, second = server.start(whole), server.start(whole)
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
