"""One broker and one kernel of `swap_overhead.py`.

    python -P tests/benchmarks/swap_lane.py FOLDER PROCESSES

FOLDER is the host of the double. For each number on the standard input it measures that number of rounds, and writes their samples as one
line of JSON.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, TypedDict

from tests.benchmarks.kernels import BenchKernel
from tests.gpu.lab import CAPACITY_UNITS, Lab

__all__ = ["CONTEXT_MIB", "DEVICE_MIB", "Sample"]

DEVICE_MIB: Final = 1024
CONTEXT_MIB: Final = 48
_BUFFER_MIB: Final = 4
_CHECKPOINT_CALLS: Final = "cuCheckpointProcess"
_CHILD: Final = """
import sys
from tests.gpu.driver import Driver
driver = Driver()
driver.start()
driver.do("cuMemAlloc", 1 << 20)
print("ready", flush=True)
sys.stdin.read()
"""
_CHILDREN: Final = """
import subprocess, sys
children = []
for number in range({count}):
    child = subprocess.Popen([sys.executable, "-P", "-c", {code!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline()
    children.append(child)
"""


class Sample(TypedDict):
    """One suspend or resume. Times in milliseconds."""

    total_ms: float
    driver_ms: float
    nvml_calls: int
    checkpoint_calls: int


class CallLog:
    """The double's log, read from where it was read last."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "calls"
        self._read = 0

    def news(self) -> list[tuple[int, int, str]]:
        """Return when calls began and how long they took, in microseconds, and their names, for those that ended since the last time."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        fields = [line.split(" ") for line in whole.decode().splitlines()]
        return [(int(began), int(elapsed), name) for began, elapsed, _pid, name, *_ in fields]


@contextmanager
def _lab() -> Iterator[Lab]:
    """A lab whose broker manages all devices, with this process's packages. The environment is the lab's until the block ends."""
    before = dict(os.environ)
    with ExitStack() as stack:
        lab = Lab(Path(tempfile.mkdtemp(prefix="jgl-")), DEVICE_MIB)
        stack.callback(lab.close)
        config = lab.folder / "config" / "jupyter_gpu_config.py"
        config.write_text(config.read_text().replace("c.GPUBroker.devices = [0]\n", ""))
        lab.environment["PYTHONPATH"] = before["PYTHONPATH"]
        os.environ.clear()
        os.environ.update(lab.environment)
        try:
            lab.start_broker()
            yield lab
        finally:
            os.environ.clear()
            os.environ.update(before)


def _measured(log: CallLog, act: Callable[[], object]) -> Sample:
    log.news()
    begun_ns = time.monotonic_ns()
    act()
    ended_ns = time.monotonic_ns()
    calls = [one for one in log.news() if begun_ns // 1000 <= one[0] <= ended_ns // 1000]
    driver_us = [elapsed_us for _, elapsed_us, name in calls if name.startswith(_CHECKPOINT_CALLS)]
    return Sample(
        total_ms=(ended_ns - begun_ns) / 1e6,
        driver_ms=sum(driver_us) / 1000,
        nvml_calls=sum(name.startswith("nvml") for _, _, name in calls),
        checkpoint_calls=len(driver_us),
    )


def main(folder: str, processes: int) -> None:
    """Serve until the standard input ends."""
    log = CallLog(Path(folder))
    with _lab() as lab, BenchKernel(lab.install(CAPACITY_UNITS)) as kernel, lab.client() as broker:
        kernel.run(lab.cells.fill(1, _BUFFER_MIB))
        kernel.run(_CHILDREN.format(count=processes - 1, code=_CHILD))
        lease_id = kernel.lease(broker).lease_id
        broker.suspend(lease_id)  # the first one starts the worker
        broker.resume(lease_id)
        for line in sys.stdin:
            rounds = []
            for _ in range(int(line)):
                suspend = _measured(log, lambda: broker.suspend(lease_id))
                rounds.append((suspend, _measured(log, lambda: broker.resume(lease_id))))
            sys.stdout.write(json.dumps(rounds) + "\n")
            sys.stdout.flush()
        kernel.run(lab.cells.check())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
