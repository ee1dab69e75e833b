"""`jupyter gpu measure` with torch: two that use the whole device slow each other down, and work next to them is noticed.

On a simulated device the same tests run with its own calls.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.gpu.lab import Lab, until

Note = Callable[[str, object], None]

# Some 100 ms of matrix products, the same in each process: one that measured its own pace next to others would do less.
_TORCH = """
import torch
from fractional_gpu_kernel.measure import tick
one = torch.randn(8192, 8192, device="cuda")
other = torch.empty_like(one)
print("ready", flush=True)
while True:
    for _ in range(4):
        torch.matmul(one, one, out=other)
    torch.cuda.synchronize()
    tick()
"""
_SIMULATED = """
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu_kernel.measure import tick
buffer = cuda.allocate(16 << 20)
print("ready", flush=True)
while True:
    cuda.launch(0.1, 1.0)
    tick()
"""
_HELD_MIB = {False: 512, True: 16}  # by whether the device is simulated


def program(lab: Lab) -> list[str]:
    return [sys.executable, "-c", _SIMULATED if lab.simulated else _TORCH]


def measure(lab: Lab, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, figures and complaints of a measurement of the program."""
    command = [sys.executable, "-m", "fractional_gpu.commands.main", "measure", "--json", *options, "--", *program(lab)]
    done = subprocess.run(command, env=lab.environment, capture_output=True, text=True, timeout=400, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def assert_nothing_left(lab: Lab) -> None:
    def leases() -> list[str]:
        with lab.client() as client:
            return [one.spec.label for one in client.status().leases]

    until(lambda: not leases(), "all leases end")


@contextmanager
def stranger(lab: Lab) -> Iterator[None]:
    """The program without a lease, from when it works."""
    environment = dict(lab.environment)
    if lab.simulated:
        with lab.monitor() as monitor:
            environment |= monitor.kernel_environment(lab.device().device_id)
    with subprocess.Popen(program(lab), env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def test_two_that_use_the_whole_device_slow_each_other_down(lab: Lab, saw: Note) -> None:
    status, found, complaint = measure(lab, "--fractions", "1/2,1", "--within", "200s", "--interval", "60%")
    assert status == 0, complaint
    alone, half = found["settings"]
    saw("unit alone, ms", round(alone["median_s"] * 1000, 1))
    saw("times as long beside another", {name: round(value, 3) for name, value in half["slower"].items()})
    saw("energy of a unit, J", [one["unit_mj"] and round(one["unit_mj"] / 1000, 2) for one in (alone, half)])
    saw("busy, %", [one["busy_percent"] for one in (alone, half)])
    saw("seconds and rounds", [found["seconds"], half["rounds"]])
    assert alone["memory_mib"] >= _HELD_MIB[lab.simulated]
    assert half["slower"]["low"] > 1.4
    assert half["slower"]["high"] < 3.5
    assert found["suffices_milli"] is None
    assert_nothing_left(lab)


def test_work_of_a_process_without_a_lease_is_noticed_or_the_answer_says_that_it_cannot_be(lab: Lab, saw: Note) -> None:
    with stranger(lab):
        status, found, complaint = measure(
            lab, "--fractions", "1/2", "--memory", f"{lab.unit_mib}MiB", "--within", "60s"
        )
    last = complaint.strip().rpartition("\n")[2]
    saw("said", last if status else found["remarks"])
    if found:  # the device does not count by process
        assert any("does not report whether they were working" in one for one in found["remarks"])
    else:
        assert "worked on the device" in last
    assert_nothing_left(lab)
