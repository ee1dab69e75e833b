"""Agents that call tools over MCP, and Jupyter servers that serve these tools."""

import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tests.support.paths import MCP_AGENT
from tests.support.waiting import until
from tests.support.world import NO_EXTENSIONS, Server, World, new_world

__all__ = ["Agent", "connected", "mcp_server", "mcp_world"]

# Of the MCP server, which must not be in every test's Jupyter server.
_PACKAGES = sysconfig.get_path("purelib", vars={"base": f"{sys.prefix}/mcp"})


class Agent:
    """One MCP client in a separate process. Any thread may call its tools, at the same time as others."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lock = threading.Lock()
        self._calls: list[Future[Any]] = []
        self.tools: dict[str, Any] = {one["name"]: one for one in self._heard()}
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def call(self, tool: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Return what the tool answers, or its error."""
        return self.begin(tool, **arguments).result()

    def begin(self, tool: str, **arguments: object) -> "Future[Any]":
        answer: Future[Any] = Future()
        with self._lock:
            assert self._process.stdin is not None
            asked = {"id": len(self._calls), "tool": tool, "arguments": arguments}
            self._calls.append(answer)
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return answer

    def end(self) -> None:
        self._process.kill()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            heard = json.loads(line)
            self._calls[heard["id"]].set_result(heard["answer"])
        for call in self._calls:
            if not call.done():
                call.set_exception(ConnectionError("the MCP client has ended"))

    def _heard(self) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def mcp_world(simulate: str = "1x1GiB") -> Iterator[World]:
    with new_world(simulate) as world:
        world.environment["PYTHONPATH"] += os.pathsep + _PACKAGES
        yield world


def mcp_server(world: World) -> Server:
    return Server(world, "--MCPExtensionApp.mcp_port=0", extensions={**NO_EXTENSIONS, "jupyter_server_mcp": True})


@contextmanager
def connected(server: Server) -> Iterator[Agent]:
    info = server.world.folder / "run" / f"jpserver-mcp-{server.process.pid}.json"
    until(info.exists, "the MCP server writes its address")
    argv = [sys.executable, "-P", MCP_AGENT, json.loads(info.read_text())["url"]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, env=server.world.environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        agent = Agent(process)
        try:
            yield agent
        finally:
            agent.end()
