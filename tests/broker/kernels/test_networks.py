"""The broker's ZeroMQ contexts in kernels' network namespaces: one per namespace, for as long as a kernel is in it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from fractional_gpu.broker.kernels.networks import Networks
from fractional_gpu.host.namespaces import namespace_of, own_namespace
from fractional_gpu.host.process import ProcessIdentity, identify
from tests.support.world import until

# Publishes on the loopback interface of a separate namespace, until its input ends.
PUBLISHER = """
import fcntl, select, socket, struct, sys, zmq
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as up:
    fcntl.ioctl(up, 0x8914, struct.pack("16sH14x", b"lo", 1))
publisher = zmq.Context().socket(zmq.PUB)
print(publisher.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    publisher.send(sys.argv[1].encode())
"""


@contextmanager
def publisher(word: str) -> Iterator[tuple[ProcessIdentity, int]]:
    """Return a process in a separate network namespace that publishes the word, and its port."""
    argv = ["unshare", "--net", sys.executable, "-c", PUBLISHER, word]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield identify(process.pid), int(process.stdout.readline())
        finally:
            process.kill()


def threads_in(namespace: tuple[int, int]) -> int:
    """Count this process's threads in a network namespace."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            status = (task / "ns" / "net").stat()
            found += (status.st_dev, status.st_ino) == namespace
    return found


async def hears(networks: Networks, lease_id: str, identity: ProcessIdentity, port: int) -> bytes:
    """Return what the port publishes, read through the context of the process."""
    with networks.context_for(lease_id, identity).socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        assert await subscriber.poll(60_000)
        return bytes(await subscriber.recv())


async def test_each_kernel_is_heard_in_its_own_network_and_nothing_stays_there() -> None:
    networks = Networks()
    with publisher("one") as (one, port), publisher("two") as (two, other):
        assert await hears(networks, "a", one, port) == b"one"
        assert await hears(networks, "b", two, other) == b"two"
        there = namespace_of(one.pid, "net")
        assert networks.context_for("c", one) is networks.context_for("a", one), "one context for a namespace"
        assert threads_in(there) > 0, "ZeroMQ's own"
        assert own_namespace("net") == namespace_of(os.getpid(), "net") != there
        networks.forget("a")
        assert threads_in(there) > 0, "the other kernel is followed still"
        networks.forget("c")
        until(lambda: not threads_in(there), "no thread is left in it")
        assert await hears(networks, "b", two, other) == b"two", "the other network's context works on"
    networks.close()


async def test_a_socket_that_was_left_open_holds_nothing_up() -> None:
    networks = Networks()
    with publisher("one") as (one, port):
        left = networks.context_for("a", one).socket(zmq.SUB)
        left.connect(f"tcp://127.0.0.1:{port}")
        there = namespace_of(one.pid, "net")
        networks.forget("a")
        assert left.closed
        until(lambda: not threads_in(there), "its context has ended")
    networks.close()


async def test_a_kernel_that_has_ended_is_an_error() -> None:
    networks = Networks()
    with publisher("gone") as (one, _):
        pass
    with pytest.raises(ProcessLookupError):
        networks.context_for("a", one)
    networks.close()
