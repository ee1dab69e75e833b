"""What a run saw: the machine, and for each test its outcome, its time and the numbers that it noted."""

import json
import os
import platform
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pynvml

from fractional_gpu import __version__
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor

__all__ = ["RESULTS", "Results", "machine"]

RESULTS = "JUPYTER_GPU_RESULTS"
_TORCH = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"


class Results:
    """Collected over a run and written at its end."""

    def __init__(self, *, simulated: bool, torch: bool = True) -> None:
        self.content: dict[str, Any] = {**machine(simulated=simulated, torch=torch), "tests": {}}

    def note(self, test: str, name: str, value: object) -> None:
        """Remember what a test saw: plain JSON data."""
        self.content["tests"].setdefault(test, {"saw": {}})["saw"][name] = value

    def end(self, test: str, outcome: str, seconds: float) -> None:
        """Remember how a test ended."""
        one = self.content["tests"].setdefault(test, {"saw": {}})
        one["outcome"], one["seconds"] = outcome, round(seconds, 3)

    def write(self) -> Path | None:
        """Write the file that the environment names, if it names one."""
        name = os.environ.get(RESULTS)
        if not name:
            return None
        path = Path(name).absolute()
        path.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")
        return path


def machine(*, simulated: bool, torch: bool = True) -> dict[str, Any]:
    """Return what was measured on, and whether it was simulated or a double of the driver.

    Raises RuntimeError if there is no device, or a needed torch is missing.
    """
    found: dict[str, Any] = {
        "simulated": simulated,
        "double": bool(os.environ.get("DRIVER_DOUBLE")),  # of the driver: its times say nothing about GPUs
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "host_memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
    }
    if simulated:
        return found
    with closing(NvidiaMonitor()) as monitor:
        devices = monitor.devices()
        found["devices"] = [{"name": device.name, "memory_mib": device.memory_mib} for device in devices]
        if not devices:
            raise RuntimeError(f"no GPU was found: {monitor.why_none}")
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        level = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        found["cuda_driver"] = f"{level // 1000}.{level % 1000 // 10}"
    done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if not torch:
            return found
        raise RuntimeError(
            f"torch is needed here: {(done.stderr.strip().splitlines() or ['it cannot be imported'])[-1]}"
        )
    found["torch"], found["torch_cuda"] = json.loads(done.stdout)
    return found
