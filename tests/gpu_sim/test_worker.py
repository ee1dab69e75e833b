"""The checkpoint worker, message by message; what it does with any driver is in tests/gpu_behaviour."""

import json
import os
import socket
import subprocess
import sys

import pytest

from fractional_gpu.gpu.simulated import host
from tests.gpu_sim.kernels import answer, send, worker_process


def start(*arguments: str, channel: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.gpu.worker", *arguments],
        stdin=channel,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "request_",
    [
        [],
        {},
        {"op": "reset"},
        {"op": "lock"},
        {"op": "lock", "target": {}, "timeout_ms": "soon"},
        {"op": "lock", "target": {"boot_id": "b", "pid": "7", "start_time": 0}, "timeout_ms": 1},
        {"op": "state", "target": 5},
    ],
)
def test_a_request_that_makes_no_sense_is_answered_and_the_next_served(
    simulated: host.SimulatedHost, request_: object
) -> None:
    with worker_process(simulated) as worker:
        send(worker, request_)
        reply = answer(worker)
        assert reply["error"]["code"] == "unknown"
        send(worker, {"op": "ping"})
        assert answer(worker) == {"state": None, "elapsed_us": 0}


def test_a_backend_that_cannot_be_opened_ends_it_with_the_reason() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = start("--backend", "simulated:/nowhere", channel=theirs.fileno())
        assert done.returncode == 1
        assert json.loads(ours.recv(1 << 16))["error"]["code"] == "not-initialized"
    assert "there is no simulated GPU host in /nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [(), ("--backend",), ("--frontend", "x"), ("--backend", "nvidia", "more")])
def test_arguments_that_are_not_understood_end_it(arguments: tuple[str, ...]) -> None:
    done = start(*arguments)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_it_starts_light() -> None:
    """A restart waits for its imports."""
    code = (
        "import sys; from fractional_gpu.gpu import worker; from fractional_gpu.gpu.simulated import checkpointer; "
        "print([m for m in ('asyncio', 'tornado', 'zmq', 'traitlets', 'msgspec', 'pynvml', 'cuda', 'subprocess') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.strip() == "[]"
