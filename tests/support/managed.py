"""Kernels of a world that the test's own process starts through jupyter_client, without any server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.support.world import DEADLINE_S, World

__all__ = ["client_of", "entered", "must", "own_event_loop", "ready"]

_OURS = ("JUPYTER", "IPYTHON", "JPY_", "PYTHONPATH", "HOME")


@contextmanager
def own_event_loop() -> Iterator[None]:
    """At the end, close the event loop that jupyter_client's blocking classes make in each thread."""
    try:
        yield
    finally:
        ensure_event_loop().close()


@contextmanager
def entered(world: World) -> Iterator[None]:
    """Let this process live in the world: its Jupyter folders, its broker."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(_OURS):
            del os.environ[name]
    os.environ.update({name: value for name, value in world.environment.items() if name.startswith(_OURS)})
    try:
        with own_event_loop():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def client_of(manager: KernelManager) -> Iterator[BlockingKernelClient]:
    """A blocking client of the kernel that now runs, ready."""
    client = manager.client()
    assert isinstance(client, BlockingKernelClient)
    with ready(client):
        yield client


@contextmanager
def ready(client: BlockingKernelClient) -> Iterator[None]:
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)
        yield
    finally:
        client.stop_channels()


def must(client: BlockingKernelClient, code: str) -> str:
    printed: list[str] = []

    def hear(message: dict[str, object]) -> None:
        content = message["content"]
        assert isinstance(content, dict)
        if "text" in content:
            printed.append(str(content["text"]))

    reply = client.execute_interactive(code, timeout=DEADLINE_S, output_hook=hear)
    assert reply["content"]["status"] == "ok", f"{code!r} ended with {reply['content']}"
    return "".join(printed)
