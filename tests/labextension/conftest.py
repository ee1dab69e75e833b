"""A Jupyter server with the extension, and its event stream as a page hears it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import websocket

import fractional_gpu_kernel.server
from fractional_gpu_kernel.server.app import NOTICE_ID, STATE_ID
from tests.support.shared_server import SharedServer
from tests.support.world import DEADLINE_S, Server, World

State = dict[str, Any]
CONFIG = Path(fractional_gpu_kernel.server.__file__).with_name("jupyter-fractional-gpu.json")


def enable(world: World) -> None:
    """Let the world's servers load the extension, as an installation does."""
    folder = world.folder / "config" / "jupyter_server_config.d"
    folder.mkdir(exist_ok=True)
    shutil.copy(CONFIG, folder)


class Page:
    def __init__(self, server: Server) -> None:
        address = server.url.replace("http", "ws", 1) + "api/events/subscribe"
        self.socket = websocket.create_connection(
            address, header=[f"Authorization: token {server.token}"], timeout=DEADLINE_S
        )

    def hear(self, schema_id: str) -> dict[str, Any]:
        while True:
            event: dict[str, Any] = json.loads(self.socket.recv())
            if event["schema_id"] == schema_id:
                return event

    def until(self, wanted: Callable[[State], bool]) -> State:
        while not wanted(state := self.hear(STATE_ID)):
            pass
        return state

    def notice(self) -> dict[str, Any]:
        return self.hear(NOTICE_ID)

    def until_kernel(self, kernel_id: str, wanted: str) -> State:
        def kernels(state: State) -> list[State]:
            return [one for one in state["kernels"] if (one["kernel_id"], one["state"]) == (kernel_id, wanted)]

        (kernel,) = kernels(self.until(lambda state: bool(kernels(state))))
        return kernel


@contextmanager
def page_of(server: Server) -> Iterator[Page]:
    page = Page(server)
    try:
        yield page
    finally:
        page.socket.close()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    """A server with the extension, whose world is emptied after each test."""
    shared = SharedServer(enable)
    yield shared
    shared.close()


@pytest.fixture
def world(shared_server: SharedServer, has_failed: Callable[[], bool]) -> Iterator[World]:
    with shared_server.borrowed() as lent:
        yield lent
        if has_failed():
            shared_server.close()


@pytest.fixture
def server(world: World, shared_server: SharedServer) -> Server:
    started = shared_server.server_of(world)
    assert started is not None
    return started


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    with page_of(server) as opened:
        yield opened
