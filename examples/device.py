"""One small face for two kinds of GPU, so that the notebooks beside this file run on either without a change.

On a real GPU the work is done by torch. On a machine without one, the kernel is on a simulated GPU: its buffers hold real bytes, they
are really moved away when the kernel is suspended, and calls really wait while it is; only the speed says nothing.

    import device

    gpu = device.open()            # the GPU this kernel has a share of
    data = gpu.fill(seed=11)       # most of the share, every byte derived from the seed
    data.step()                    # work on it: every byte plus one
    data.wrong_bytes()             # compare every byte with what it must be; 0 is the right answer
"""

import os
import random
import time

CHUNK = 16 * 2**20  # bytes that are worked on at a time
AT_MOST = 8 * 2**30  # bytes: filling all of a big GPU proves no more and moves for longer
MIB = 2**20


def open():  # noqa: A001 - reads as device.open()
    """Return the GPU that this kernel has a share of. Raises RuntimeError, with what to do, if it has none."""
    if "JUPYTER_GPU_SIMULATED_DIR" in os.environ:
        return GPU(SimulatedBackend())
    try:
        import torch
    except ImportError:
        raise RuntimeError("torch is not installed in this kernel, and the notebooks use it on a real GPU: pip install torch") from None
    if not torch.cuda.is_available():
        raise RuntimeError("this kernel has no GPU: choose a kernel such as 'Python 3 · 3/4 GPU' in the menu Kernel > Change Kernel")
    return GPU(TorchBackend(torch))


class GPU:
    """The share of a GPU that this kernel has."""

    def __init__(self, backend):
        self.backend = backend

    @property
    def share_bytes(self):
        """How much memory the share has now: a resize, or a cell under %%gpu, changes it."""
        cap = os.environ.get("JUPYTER_GPU_MEMORY_MIB")
        return int(cap) * MIB if cap else self.backend.total_bytes() // 2

    @property
    def simulated(self):
        """Whether it is a simulated one."""
        return self.backend.simulated

    def fill(self, seed, size=None):
        """Return `size` bytes on the GPU (default: three quarters of the share), all of them derived from the seed."""
        if size is None:
            size = min(AT_MOST, (self.share_bytes - self.backend.overhead_bytes) * 3 // 4)
        count = size // CHUNK
        if count < 1:
            raise ValueError(f"a share of {self.share_bytes // MIB} MiB is too small for this notebook; ask for a bigger fraction")
        return Data(self.backend, seed, count)

    def __repr__(self):
        return f"{self.backend.name()}: {self.share_bytes // MIB} MiB of it are this kernel's share"


class Data:
    """Bytes on the GPU, of which it is known at any time what they must be."""

    def __init__(self, backend, seed, count):
        self.backend = backend
        self.seed = seed
        self.steps = 0
        self.chunks = [backend.chunk(seed, index) for index in range(count)]

    def __len__(self):
        return len(self.chunks) * CHUNK

    def step(self, times=1):
        """Work: add one to every byte (255 becomes 0)."""
        started = time.perf_counter()
        for _ in range(times):
            for chunk in self.chunks:
                self.backend.add_one(chunk)
            self.steps += 1
        self.backend.finish()
        return f"{len(self) // MIB} MiB changed {times} time{'s' * (times != 1)} in {time.perf_counter() - started:.1f} s of computing"

    def wrong_bytes(self):
        """Return how many bytes are not what the seed and the steps say they must be, after looking at every single one."""
        return sum(self.backend.wrong_bytes(chunk, self.seed, index, self.steps) for index, chunk in enumerate(self.chunks))

    def __repr__(self):
        return f"{len(self) // MIB} MiB on the GPU from seed {self.seed}, after {self.steps} step{'s' * (self.steps != 1)}"


class TorchBackend:
    """A real GPU, by way of torch."""

    simulated = False
    overhead_bytes = 1024 * MIB  # the CUDA context and what torch needs to compare

    def __init__(self, torch):
        self.torch = torch

    def name(self):
        return self.torch.cuda.get_device_name()

    def total_bytes(self):
        return self.torch.cuda.mem_get_info()[1]

    def chunk(self, seed, index):
        generator = self.torch.Generator(device="cuda").manual_seed(seed * 1_000_003 + index)
        return self.torch.randint(0, 256, (CHUNK,), dtype=self.torch.uint8, device="cuda", generator=generator)

    def add_one(self, chunk):
        chunk.add_(1)

    def finish(self):
        self.torch.cuda.synchronize()

    def wrong_bytes(self, chunk, seed, index, steps):
        expected = self.chunk(seed, index).add_(steps % 256)
        return int(self.torch.count_nonzero(chunk != expected))


class SimulatedBackend:
    """A simulated GPU."""

    simulated = True
    overhead_bytes = 0

    def __init__(self):
        from fractional_gpu.gpu.simulated import cuda

        self.cuda = cuda

    def name(self):
        return self.cuda.device().name  # it says that it is simulated

    def total_bytes(self):
        return self.cuda.memory_info()[1]

    def chunk(self, seed, index):
        buffer = self.cuda.allocate(CHUNK)
        buffer.write(random.Random(seed * 1_000_003 + index).randbytes(CHUNK))
        return buffer

    def add_one(self, chunk):
        chunk.write(chunk.read().translate(plus(1)))

    def finish(self):
        self.cuda.launch(0.05)

    def wrong_bytes(self, chunk, seed, index, steps):
        found = chunk.read()
        expected = random.Random(seed * 1_000_003 + index).randbytes(CHUNK).translate(plus(steps))
        return 0 if found == expected else sum(a != b for a, b in zip(found, expected, strict=True))


def plus(number):
    """Return the table that adds a number to a byte."""
    return bytes((value + number) % 256 for value in range(256))
