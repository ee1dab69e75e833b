"""What kernels run in these tests: with torch on a real device, with the bare driver on a double of it, or the simulated device's own API.

`check()` prints `intact` if every byte on the device is what `fill` put there, computed by the device itself.
"""

from typing import Protocol

from tests.support.paths import STRANGER

__all__ = ["Cells", "DriverCells", "SimulatedCells", "TorchCells"]

_TORCH_SUM = """
import torch
def checksum(tensor):
    "Depends on every element and its place; integers wrap around, so the sum is exact on any device and in any order."
    flat, total = tensor.reshape(-1).view(torch.int64), 0
    for start in range(0, flat.numel(), 1 << 22):
        part = flat[start:start + (1 << 22)]
        odd = 2 * torch.arange(start, start + part.numel(), device=part.device) + 1
        total = (total + int((part * odd).sum())) % (1 << 64)
    return total
"""
_TORCH_FILL = """
generator = torch.Generator(device="cuda").manual_seed({seed})
buffer = torch.randint(-2**62, 2**62, ({mib} << 17,), device="cuda", generator=generator)
expected = checksum(buffer)
torch.cuda.synchronize()
"""
_TORCH_STRANGER = """
import sys, torch
held = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda").fill_(7)
torch.cuda.synchronize()
print("holding", flush=True)
sys.stdin.read()
"""
_SIMULATED_FILL = """
import random
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate({mib} << 20)
buffer.write(random.Random({seed}).randbytes(1 << 20) * {mib})
expected = buffer.sha256()
"""


class Cells(Protocol):
    """The code of one kind of device. Sizes in MiB."""

    context_mib: int  # about what a process takes that holds nothing
    stranger_context_mib: int  # at least what a stranger takes next to what it asks for

    def fill(self, seed: int, mib: int) -> str:
        """Code that puts this many MiB of noise on the device as `buffer`."""

    def check(self) -> str:
        """Code that prints `intact`, or fails."""

    def busy_until(self, file: str) -> str:
        """Code that uses the device until the file exists, then checks."""

    def grab(self, step_mib: int) -> str:
        """Code that allocates in steps until that is refused, frees everything and prints how many MiB it got."""

    def work_in_background(self) -> str:
        """Code that has a thread use the device without a pause, from before the cell ends until `stop.set()`, as `thread`."""

    def past_the_cap(self, mib: int) -> str:
        """Code that takes so much device memory as no framework counts."""

    def stranger(self, backend: str, device_id: str, mib: int) -> list[str]:
        """Arguments of Python for a process without a lease; it prints `holding` and ends with its standard input."""


_BACKGROUND = """
import threading
begun, stop = threading.Event(), threading.Event()
def work():
    while not stop.is_set():
        {work}
        begun.set()
thread = threading.Thread(target=work, daemon=True)
thread.start()
assert begun.wait(60)
"""
_DIRECT = """
import ctypes, torch
torch.zeros(1, device="cuda")  # makes the context current in this thread
library, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
assert library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t({mib} << 20)) == 0
"""
_SIMULATED_DIRECT = """
import os
from fractional_gpu.gpu.simulated import cuda
cap = os.environ.pop("JUPYTER_GPU_MEMORY_MIB")
direct = cuda.allocate({mib} << 20)
os.environ["JUPYTER_GPU_MEMORY_MIB"] = cap
"""


class TorchCells:
    """Cells for a real device."""

    context_mib = 512
    stranger_context_mib = 1024

    def fill(self, seed: int, mib: int) -> str:
        """See Cells."""
        return _TORCH_SUM + _TORCH_FILL.format(seed=seed, mib=mib)

    def check(self) -> str:
        """See Cells."""
        return 'assert checksum(buffer) == expected, "the bytes differ"\nprint("intact")'

    def busy_until(self, file: str) -> str:
        """See Cells."""
        return (
            f"import os\nwhile not os.path.exists({file!r}):\n    assert checksum(buffer) == expected\n{self.check()}"
        )

    def grab(self, step_mib: int) -> str:
        """See Cells."""
        return f"""
import torch
held = []
try:
    while True:
        held.append(torch.empty({step_mib} << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError as error:
    refusal = str(error)
print(len(held) * {step_mib})
del held
torch.cuda.empty_cache()
"""

    def work_in_background(self) -> str:
        """See Cells."""
        factors = "import torch\nfactor = torch.rand(4096, 4096, device='cuda')\n"
        return factors + _BACKGROUND.format(work="(factor @ factor).sum().item()")

    def past_the_cap(self, mib: int) -> str:
        """See Cells."""
        return _DIRECT.format(mib=mib)

    def stranger(self, backend: str, device_id: str, mib: int) -> list[str]:  # noqa: ARG002 - the environment says which
        """See Cells."""
        return ["-c", _TORCH_STRANGER, str(mib)]


class SimulatedCells:
    """The same for a simulated device."""

    context_mib = 32
    stranger_context_mib = 32

    def fill(self, seed: int, mib: int) -> str:
        """See Cells."""
        return _SIMULATED_FILL.format(seed=seed, mib=mib)

    def check(self) -> str:
        """See Cells."""
        return 'assert buffer.sha256() == expected, "the bytes differ"\nprint("intact")'

    def busy_until(self, file: str) -> str:
        """See Cells."""
        return f"import os\nwhile not os.path.exists({file!r}):\n    assert buffer.read(4096)\n{self.check()}"

    def grab(self, step_mib: int) -> str:
        """See Cells."""
        return f"""
from fractional_gpu.gpu.simulated import cuda
held = []
try:
    while True:
        held.append(cuda.allocate({step_mib} << 20))
except cuda.SimulatedOutOfMemory as error:
    refusal = str(error)
print(len(held) * {step_mib})
for one in held:
    one.free()
"""

    def work_in_background(self) -> str:
        """See Cells."""
        return "from fractional_gpu.gpu.simulated import cuda\n" + _BACKGROUND.format(work="cuda.launch(2)")

    def past_the_cap(self, mib: int) -> str:
        """See Cells."""
        return _SIMULATED_DIRECT.format(mib=mib)

    def stranger(self, backend: str, device_id: str, mib: int) -> list[str]:
        """See Cells."""
        return ["-P", STRANGER, backend.removeprefix("simulated:"), device_id, str(mib)]


_DRIVER_FILL = """
from tests.gpu.driver import Driver, Noise
driver = Driver()
driver.start()
noise, first, size = Noise(driver), 1000 * {seed}, {mib} << 20
buffer = int(driver.do("cuMemAlloc", size))
noise.fill(buffer, size, first)
"""
_DRIVER_STRANGER = """
import sys
from tests.gpu.driver import Driver
driver = Driver()
driver.start()
driver.do("cuMemAlloc", int(sys.argv[1]) << 20)
print("holding", flush=True)
sys.stdin.read()
"""


class DriverCells:
    """The same through the bare driver, for its double. No framework keeps these within a cap."""

    context_mib = 48
    stranger_context_mib = 48

    def fill(self, seed: int, mib: int) -> str:
        """See Cells."""
        return _DRIVER_FILL.format(seed=seed, mib=mib)

    def check(self) -> str:
        """See Cells."""
        return 'assert noise.is_intact(buffer, size, first), "the bytes differ"\nprint("intact")'

    def busy_until(self, file: str) -> str:
        """See Cells."""
        waiting = f"while not os.path.exists({file!r}):\n    assert noise.is_intact(buffer, size, first)\n"
        return f"import os\n{waiting}{self.check()}"

    def grab(self, step_mib: int) -> str:
        """See Cells."""
        return f"""
from tests.gpu.driver import Driver, DriverError
driver, held = Driver(), []
driver.start()
try:
    while True:
        held.append(driver.do("cuMemAlloc", {step_mib} << 20))
except DriverError as error:
    refusal = str(error)
print(len(held) * {step_mib})
for one in held:
    driver.do("cuMemFree", one)
"""

    def work_in_background(self) -> str:
        """See Cells."""
        # A context is current in one thread only.
        return _BACKGROUND.format(work="driver.start(); noise.is_intact(buffer, size, first)")

    def past_the_cap(self, mib: int) -> str:
        """See Cells."""
        return (
            "from tests.gpu.driver import Driver\n"
            f"driver = Driver()\ndriver.start()\ndirect = driver.do('cuMemAlloc', {mib} << 20)"
        )

    def stranger(self, backend: str, device_id: str, mib: int) -> list[str]:  # noqa: ARG002 - the environment says which
        """See Cells."""
        return ["-c", _DRIVER_STRANGER, str(mib)]
