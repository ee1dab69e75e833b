"""Talking to real kernels in tests."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from fractional_gpu.jupyter.kernel_process import KernelPorts

__all__ = ["KERNEL_DEADLINE_S", "evaluate", "plain_manager", "running_kernel", "talking_to"]

KERNEL_DEADLINE_S = 60.0


@contextmanager
def running_kernel(name: str, **start: Any) -> Iterator[KernelManager]:  # noqa: ANN401 - what start_kernel takes
    manager = KernelManager(kernel_name=name)
    try:
        manager.start_kernel(**start)
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


@contextmanager
def talking_to(manager: KernelManager) -> Iterator[BlockingKernelClient]:
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=KERNEL_DEADLINE_S)
        yield client
    finally:
        client.stop_channels()


def plain_manager(name: str) -> KernelManager:
    """The manager of a kernel that jupyter_client's provisioner starts: its ports are held as ours holds them."""
    manager, ports = KernelManager(kernel_name=name), KernelPorts(logging.getLogger(__name__))
    assert ports.secure(manager)
    manager.cache_ports = False  # or jupyter_client would choose others
    weakref.finalize(manager, ports.release)
    return manager


def evaluate(client: BlockingKernelClient, expression: str) -> str:
    """Return the repr of an expression's value in the kernel; an error is its name and value."""
    reply = client.execute("", user_expressions={"it": expression}, reply=True, timeout=KERNEL_DEADLINE_S)
    answer = reply["content"]["user_expressions"]["it"]
    if answer["status"] != "ok":
        return f"{answer['ename']}: {answer['evalue']}"
    return str(answer["data"]["text/plain"])
