"""The checkpoint worker, line by line."""

import json
import os
import signal
import subprocess
import sys

import pytest

from provisioner.gpu.interface import ProcessState
from provisioner.gpu.simulated import faults, host
from provisioner.gpu.simulated.checkpointer import SimulatedCheckpointer
from provisioner.gpu.worker import MAX_LINE
from provisioner.host.process import identify
from tests.gpu_sim.kernels import Kernel, answer, ask, eventually, send, worker_process


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "provisioner.gpu.worker", *arguments],
        capture_output=True,
        text=True,
        input="",
        check=False,
    )


def test_a_whole_round_is_answered_in_order(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'ab')")
    first, second = (device.device_id for device in simulated.devices)
    with worker_process(simulated) as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=1000)
        ask(worker, "checkpoint", kernel.pid)
        ask(worker, "state", kernel.pid)
        ask(worker, "restore", kernel.pid, moves={first: second})
        ask(worker, "unlock", kernel.pid)
        replies = [answer(worker) for _ in range(5)]
    assert all(reply["ok"] and reply["error"] is None and reply["id"] == 1 for reply in replies)
    assert [reply["state"] for reply in replies] == [None, None, "checkpointed", None, None]
    assert all(isinstance(reply["elapsed_us"], int) for reply in replies)
    assert replies[1]["elapsed_us"] > 0
    assert kernel.run("cuda.device().index") == 1
    assert kernel.run("x.read(2).decode()") == "ab"


def test_a_driver_error_keeps_its_code(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    with worker_process(simulated) as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=10)
        reply = answer(worker)
    assert not reply["ok"]
    assert reply["error"]["code"] == "not-initialized"
    assert str(kernel.pid) in reply["error"]["message"]


@pytest.mark.parametrize("operation", ["state", "lock", "checkpoint", "restore", "unlock"])
@pytest.mark.parametrize(("field", "value"), [("start_time", 1), ("boot_id", "another")])
def test_another_process_with_the_same_pid_is_not_touched(
    operation: str, field: str, value: object, simulated: host.SimulatedHost, kernel: Kernel
) -> None:
    kernel.run("cuda.memory_info()")
    with worker_process(simulated) as worker:
        target = {**identify(kernel.pid).to_dict(), field: value}
        send(worker, {"id": 9, "op": operation, "target": target, "timeout_ms": 10})
        reply = answer(worker)
        assert (reply["id"], reply["error"]["code"]) == (9, "wrong-identity")
        ask(worker, "state", kernel.pid)
        assert answer(worker)["state"] == "running"


def test_a_process_that_is_gone_is_said_to_be(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    target = identify(kernel.pid).to_dict()
    kernel.kill()
    with worker_process(simulated) as worker:
        send(worker, {"id": 1, "op": "state", "target": target})
        assert answer(worker)["state"] == "gone"
        send(worker, {"id": 2, "op": "checkpoint", "target": target})
        assert answer(worker)["error"]["code"] == "no-such-process"


@pytest.mark.parametrize(
    "request_",
    [
        [],
        {},
        {"op": "reset"},
        {"op": "lock"},
        {"op": "lock", "target": {}, "timeout_ms": "soon"},
        {"op": "lock", "target": {"boot_id": "b", "pid": "7", "start_time": 0}, "timeout_ms": 1},
        {"op": "restore", "target": {}, "moves": {"a": 1}},
        {"op": "state", "target": 5},
    ],
)
def test_a_request_that_makes_no_sense_is_answered_and_the_next_served(
    simulated: host.SimulatedHost, request_: object
) -> None:
    with worker_process(simulated) as worker:
        send(worker, request_)
        reply = answer(worker)
        assert (reply["ok"], reply["error"]["code"]) == (False, "unknown")
        send(worker, {"id": 2, "op": "ping"})
        assert answer(worker) == {"id": 2, "ok": True, "state": None, "elapsed_us": 0, "error": None}


def test_it_finishes_what_is_in_hand_when_its_input_ends(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    fault = faults.inject(simulated.directory, "lock", "hang")
    with worker_process(simulated) as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=1000)
        eventually(lambda: faults.listed(simulated.directory)[0].taken == 1, "it began")
        assert worker.stdin is not None
        worker.stdin.close()
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        faults.remove(simulated.directory, fault)
        assert answer(worker)["ok"]
        assert worker.wait() == 0
    assert driver.state(kernel.pid) is ProcessState.LOCKED


def test_it_finishes_what_is_in_hand_when_nobody_listens_any_more(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    fault = faults.inject(simulated.directory, "lock", "hang")
    with worker_process(simulated) as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=1000)
        eventually(lambda: faults.listed(simulated.directory)[0].taken == 1, "it began")
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.close()
        worker.stdin.close()
        faults.remove(simulated.directory, fault)
        assert worker.wait() == 0
    assert driver.state(kernel.pid) is ProcessState.LOCKED


def test_a_backend_that_cannot_be_opened_ends_it_with_the_reason() -> None:
    done = start("--backend", "simulated:/nowhere")
    assert done.returncode == 1
    assert json.loads(done.stdout)["fatal"]["code"] == "not-initialized"
    assert "there is no simulated GPU host in /nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [(), ("--backend",), ("--frontend", "x"), ("--backend", "nvidia", "more")])
def test_arguments_that_are_not_understood_end_it(arguments: tuple[str, ...]) -> None:
    done = start(*arguments)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_it_starts_light() -> None:
    """Whoever waits for its restart waits for its imports."""
    code = (
        "import sys; from provisioner.gpu import worker; from provisioner.gpu.simulated import checkpointer; "
        "print([m for m in ('asyncio', 'tornado', 'zmq', 'traitlets', 'msgspec', 'pynvml', 'cuda', 'subprocess') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.strip() == "[]"


def test_a_line_without_end_does_not_fill_the_memory(simulated: host.SimulatedHost) -> None:
    with worker_process(simulated) as worker:
        assert worker.stdin is not None
        worker.stdin.write(b"x" * MAX_LINE)
        worker.stdin.flush()
        assert answer(worker)["error"]["code"] == "unknown"
