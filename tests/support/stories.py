"""What kernels run in end-to-end tests: bytes that go to the simulated GPU, and the look at whether they are all there."""

__all__ = ["BLOCKED", "CHECK", "SLEEPS", "UNINTERRUPTIBLE", "fill"]

CHECK = """
import hashlib
assert hashlib.sha256(buffer.read()).hexdigest() == digest, "the bytes differ"
print("intact")
"""

SLEEPS = "import time\nwhile True: time.sleep(0.05)\n"
"""Sleeps until it is interrupted, at any moment: Python notices a signal that comes just before a system call when that call is over."""

UNINTERRUPTIBLE = """
import signal, threading
from fractional_gpu.gpu.simulated.context import Gate
def held_back(gate, thread, wait=Gate._wait):
    if threading.current_thread() is not threading.main_thread():
        return wait(gate, thread)
    held = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        wait(gate, thread)
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)
Gate._wait = held_back
"""
"""From here on a wait for the device takes an interrupt only when it is over, as a thread that is blocked in NVIDIA's driver does."""

# A cell that says that it needs no GPU and is blocked on it. The file `blocked` tells when an interrupt finds it so: the
# call that holds interrupts back (UNINTERRUPTIBLE) has put its own handler in place.
BLOCKED = """%%cpu
import pathlib, signal, threading, time
usual = signal.getsignal(signal.SIGINT)
def tell():
    while signal.getsignal(signal.SIGINT) is usual:
        time.sleep(0.005)
    pathlib.Path("blocked").touch()
threading.Thread(target=tell, daemon=True).start()
buffer.read(1)
while True: pass
"""


def fill(seed: int, mib: int = 4) -> str:
    """Code that puts this many MiB of noise on the device as `buffer` and keeps its digest."""
    return f"""
import hashlib, random
from fractional_gpu.gpu.simulated import cuda
data = random.Random({seed}).randbytes(1 << 20) * {mib}
buffer = cuda.allocate(len(data))
buffer.write(data)
digest = hashlib.sha256(data).hexdigest()
del data
"""
