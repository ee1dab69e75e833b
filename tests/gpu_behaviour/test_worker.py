"""The checkpoint worker, message by message."""

import signal
from itertools import product

import pytest

from fractional_gpu.gpu.interface import Checkpointer, ProcessState
from fractional_gpu.host.process import identify
from tests.gpu_behaviour.hosts import Host
from tests.gpu_sim.kernels import KernelProcess, answer, ask, eventually, send

pytestmark = pytest.mark.promise("driver-bytes")


def test_a_whole_round_is_answered_in_order(host: Host, kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'ab')")
    first, second = host.devices
    with host.worker() as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=1000)
        ask(worker, "checkpoint", kernel.pid)
        ask(worker, "state", kernel.pid)
        ask(worker, "restore", kernel.pid, moves={first: second})
        ask(worker, "unlock", kernel.pid)
        replies = [answer(worker) for _ in range(5)]
    assert [reply["state"] for reply in replies] == [None, None, "checkpointed", None, None]
    assert all(isinstance(reply["elapsed_us"], int) for reply in replies)
    assert replies[1]["elapsed_us"] > 0
    assert kernel.run("cuda.device().device_id") == second
    assert kernel.run("x.read(2).decode()") == "ab"


def test_a_driver_error_keeps_its_code(host: Host, kernel: KernelProcess) -> None:
    with host.worker() as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=10)
        reply = answer(worker)
    assert reply["error"]["code"] == "not-initialized"
    assert str(kernel.pid) in reply["error"]["message"]


def test_another_process_with_the_same_pid_is_not_touched(host: Host, kernel: KernelProcess) -> None:
    kernel.run("cuda.memory_info()")
    others: tuple[dict[str, str | int], ...] = ({"start_time": 1}, {"boot_id": "another"})
    with host.worker() as worker:
        for operation, other in product(("state", "lock", "checkpoint", "restore", "unlock"), others):
            target = {**identify(kernel.pid).to_dict(), **other}
            send(worker, {"op": operation, "target": target, "timeout_ms": 10})
            reply = answer(worker)
            assert reply["error"]["code"] == "wrong-identity", (operation, other)
            ask(worker, "state", kernel.pid)
            assert answer(worker)["state"] == "running", (operation, other)


def test_a_process_that_is_gone_is_said_to_be(host: Host, kernel: KernelProcess) -> None:
    target = identify(kernel.pid).to_dict()
    kernel.kill()
    with host.worker() as worker:
        send(worker, {"op": "state", "target": target})
        assert answer(worker)["state"] == "gone"
        send(worker, {"op": "checkpoint", "target": target})
        assert answer(worker)["error"]["code"] == "no-such-process"


def test_it_finishes_what_is_in_hand(host: Host, kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("cuda.memory_info()")
    release = host.hang("lock")
    with host.worker() as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=1000)
        eventually(lambda: host.hangs("lock"), "it began")
        worker.channel.close()
        worker.process.send_signal(signal.SIGINT)
        worker.process.send_signal(signal.SIGTERM)
        release()
        assert worker.process.wait() == 0
    assert driver.state(kernel.pid) is ProcessState.LOCKED
