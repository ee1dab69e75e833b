"""What kernels run in end-to-end tests: bytes that go to the simulated GPU, and the look at whether they are all there."""

__all__ = ["CHECK", "fill"]

CHECK = """
import hashlib
assert hashlib.sha256(buffer.read()).hexdigest() == digest, "the bytes differ"
print("intact")
"""


def fill(seed: int, mib: int = 16) -> str:
    """Code that puts so many MiB of noise on the device as `buffer` and keeps its digest."""
    return f"""
import hashlib, random
from fractional_gpu.gpu.simulated import cuda
data = random.Random({seed}).randbytes(1 << 20) * {mib}
buffer = cuda.allocate(len(data))
buffer.write(data)
digest = hashlib.sha256(data).hexdigest()
del data
"""
