"""What the extension adds to the start of ipykernel: the application made ready in a fresh process, with and without it.

Processor time is compared, because other work on the machine hardly disturbs it; an ipykernel waits for nothing else until it is ready.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate
from tests.support.paths import COMPLETE_PYTHONPATH

__all__ = ["measure_loading"]

GOAL_MS = 30.0

_START = """
import os, sys
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance()
app.initialize(sys.argv[1:])
os._exit(0 if "gpu" in app.shell.magics_manager.magics["line"] else 3)
"""
_ENDS_WITH = {True: 0, False: 3}


def measure_loading(pairs: int, say: Callable[[str], None]) -> Row:
    """Start both in turns, changing who goes first, and compare pair by pair. The first pair makes profiles and bytecode."""
    with tempfile.TemporaryDirectory(prefix="jfg-") as name:
        folder = Path(name)
        (folder / "token").write_text("token")
        (folder / "measured.py").write_text(_START)
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(pairs + 1):
            for extension in (number % 2 == 0, number % 2 == 1):
                times[extension].append(_ready_ms(folder, extension=extension))
            if number:
                say(f"loading {number}/{pairs}: {times[True][-1]:.0f} ms, plain {times[False][-1]:.0f} ms")
    ours, theirs = times[True][1:], times[False][1:]
    return Row(
        measured="ipykernel made ready with the extension loaded, processor time",
        compared_with="plain ipykernel",
        unit="ms",
        ours=median(ours),
        theirs=median(theirs),
        compared=median_estimate([one - other for one, other in zip(ours, theirs, strict=True)]),
        quotient=False,
        samples=pairs,
        goal=GOAL_MS,
    )


def _ready_ms(folder: Path, *, extension: bool) -> float:
    environment = {
        **os.environ,
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder),
        "JUPYTER_GPU_SOCKET": str(folder / "broker.sock"),  # no broker listens: loading needs none
        "JUPYTER_GPU_LEASE": "benchmark",
        "JUPYTER_GPU_TOKEN_FILE": str(folder / "token"),
        "PYTHONPATH": os.pathsep.join((COMPLETE_PYTHONPATH, str(folder))),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # kept, as in an installation
    modules = ["fractional_gpu_kernel", "measured"] if extension else ["measured"]
    command = [sys.executable, "-m", *modules, "-f", str(folder / "connection.json"), "--quiet"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != _ENDS_WITH[extension]:
        raise RuntimeError(f"ipykernel ended with {process.returncode}; expected {_ENDS_WITH[extension]}")
    return (used.ru_utime + used.ru_stime) * 1000
