"""What a program sees: allocations, limits, and what death gives back."""

import threading
from contextlib import ExitStack

import pytest

from fractional_gpu.gpu.interface import Monitor
from tests.gpu_behaviour.hosts import CONTEXT_MIB, DEVICE_MIB, Host
from tests.gpu_sim.kernels import MIB, KernelError, KernelProcess

pytestmark = pytest.mark.promise("driver-bytes")


def test_bytes_are_kept(kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(1000); x.fill(bytes(1))")
    assert kernel.run("x.read() == bytes(1000)")
    kernel.run("x.write(b'hello', 10)")
    kernel.run("x.write(memoryview(b'world'), 995)")
    assert kernel.run("x.read(7, 9).decode()") == "\0hello\0"
    assert kernel.run("x.read(offset=994).decode()") == "\0world"
    kernel.run("x.fill(b'abc')")
    assert kernel.run("x.read() == (b'abc' * 334)[:1000]")
    assert kernel.run("x.sha256() == __import__('hashlib').sha256(x.read()).hexdigest()")


def test_freed_memory_is_free_and_unusable(kernel: KernelProcess) -> None:
    before = kernel.run("cuda.memory_info()[0]")
    kernel.run("!x = cuda.allocate(2**20)")
    assert kernel.run("cuda.memory_info()[0]") == before - MIB
    kernel.run("x.free()")
    assert kernel.run("cuda.memory_info()[0]") == before
    with pytest.raises(KernelError):
        kernel.run("x.read()")


def test_the_first_use_charges_the_context(kernel: KernelProcess) -> None:
    assert kernel.run("cuda.memory_info()") == [(DEVICE_MIB - CONTEXT_MIB) * MIB, DEVICE_MIB * MIB]
    kernel.run("cuda.reset()")
    kernel.run("cuda.reset()")
    assert kernel.run("cuda.memory_info()") == [(DEVICE_MIB - CONTEXT_MIB) * MIB, DEVICE_MIB * MIB]


def test_a_full_device_is_an_ordinary_error(kernel: KernelProcess, host: Host) -> None:
    kernel.run("!x = cuda.allocate(224 * 2**20)")
    with pytest.raises(KernelError, match=host.out_of_memory):
        kernel.run("cuda.allocate(2**20)")
    with host.kernel() as other, pytest.raises(KernelError, match=host.out_of_memory):
        other.run("cuda.memory_info()")
    assert kernel.run("x.read(5) == bytes(5)")


def test_what_the_dead_held_is_free_for_the_next(host: Host) -> None:
    with host.kernel() as first, host.kernel() as second:
        first.run("!x = cuda.allocate(200 * 2**20); x.write(b'x')")
        with pytest.raises(KernelError):
            second.run("cuda.allocate(200 * 2**20)")
        first.kill()
        second.run("!x = cuda.allocate(224 * 2**20)")
        assert host.left_behind() == [second.pid]


def test_a_zombie_holds_nothing(host: Host, kernel: KernelProcess, monitor: Monitor) -> None:
    kernel.run("!x = cuda.allocate(2**20)")
    kernel.process.kill()
    kernel.process.wait_unreaped()
    assert monitor.use(host.devices[0]).used_mib == 0


def test_an_orderly_exit_leaves_nothing_behind(host: Host, kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(2**20)")
    assert kernel.end() == 0
    assert host.left_behind() == []


CHURN = """!
import random
chance, held, full = random.Random(SEED), [], 0

def churn(rounds):
    global full
    for _ in range(rounds):
        try:
            held.append(cuda.allocate(chance.randrange(1, 64 << 20)))
        except RuntimeError:
            full += 1
        if held and chance.random() < 0.4:
            held.pop(chance.randrange(len(held))).free()
"""


@pytest.mark.parametrize("seed", range(2))
def test_the_sum_never_exceeds_the_device(host: Host, monitor: Monitor, seed: int) -> None:
    """Several processes allocate and free at random and one is killed, while a reader adds up all the time."""
    seen: list[int] = []
    done = threading.Event()

    def add_up() -> None:
        while not done.is_set():
            use = monitor.use(host.devices[0])
            seen.append(use.used_mib)

    reader = threading.Thread(target=add_up)
    with ExitStack() as stack:
        kernels = [stack.enter_context(host.kernel()) for _ in range(4)]
        for number, kernel in enumerate(kernels):
            kernel.run(CHURN.replace("SEED", str(seed * 10 + number)))
            kernel.run("cuda.memory_info()")
        reader.start()
        stack.callback(reader.join)
        stack.callback(done.set)
        for kernel in kernels:
            kernel.begin("churn(100)")
        kernels[1 + seed % 3].kill()
        survivors = [kernel for kernel in kernels if kernel.process.returncode is None]
        for kernel in survivors:
            kernel.result()
        assert sum(kernel.run("full") for kernel in survivors) > 0
        held = sum(kernel.run("sum(-(-x.n_bytes // 4096) * 4096 for x in held)") for kernel in survivors)
        used = monitor.use(host.devices[0]).used_mib - len(survivors) * CONTEXT_MIB
        assert abs(used * MIB - held) < (1 + len(survivors) * 2) * MIB
    assert 128 < max(seen) <= DEVICE_MIB
