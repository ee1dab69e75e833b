"""Managed memory cannot be checkpointed. A kernel in which it is recognised is refused and survives.

It records what the driver does with a kernel that holds some and was not recognised.
Nothing is promised to such a kernel beyond what the driver leaves of it; promised is that the others notice nothing, and that the broker
does not call it sound when it is not.
"""

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from fractional_gpu.protocol.errors import ConflictError, FractionalGPUError
from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab, until

Note = Callable[[str, object], None]

MANAGED = """
import ctypes, torch
torch.zeros(1, device="cuda")  # makes the context current in this thread
cuda, pointer, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), 64 << 20
assert cuda.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_uint(1)) == 0
ctypes.memset(pointer.value, 0x5A, size)
"""
CHECK = """
assert cuda.cuCtxSynchronize() == 0, "the context is broken"
assert ctypes.string_at(pointer.value, size) == b"\\x5a" * size, "managed memory differs"
print(float(torch.ones(8, device="cuda").sum().item()))
"""

RECOGNISED = {
    "cupy": (
        "import cupy\ncupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)\nheld = cupy.arange(1 << 20)",
        "print(int(held.sum()))",
    ),
    "numba": (
        (
            "import numpy\nfrom numba import cuda as gpu\n"
            "held = gpu.managed_array(1 << 20, dtype=numpy.int64)\nheld[:] = numpy.arange(1 << 20)"
        ),
        "print(int(held.sum()))",
    ),
}


@pytest.mark.parametrize("package", RECOGNISED)
def test_managed_memory_that_is_recognised_is_refused_and_survives(lab: Lab, saw: Note, package: str) -> None:
    if find_spec(package) is None:
        saw("not shown", f"{package} is not installed")
        return
    allocate, check = RECOGNISED[package]
    with Kernel(lab, lab.install(4)) as kernel:
        kernel.must(lab.cells.fill(9, lab.unit_mib))
        kernel.must(allocate)
        kernel_id = str(kernel.manager.kernel_id)
        saw(
            "reason",
            lab.await_lease(
                kernel_id, lambda one: bool(one.lease.unsuspendable_reason), "the broker knows"
            ).lease.unsuspendable_reason,
        )
        with pytest.raises(ConflictError) as refused:
            kernel.suspend()
        saw("refusal", str(refused.value))
        assert refused.value.reason == "not-checkpointable"
        assert kernel.must(check) == f"{sum(range(1 << 20))}\n"
        assert kernel.is_intact()


def test_what_becomes_of_unrecognised_managed_memory(lab: Lab, saw: Note) -> None:
    with ExitStack() as stack:
        kernel = stack.enter_context(Kernel(lab, lab.install(3)))
        neighbour = stack.enter_context(Kernel(lab, lab.install(4)))
        neighbour.must(lab.cells.fill(6, lab.unit_mib))
        kernel.must(MANAGED)
        assert kernel.must(CHECK) == "8.0\n"
        try:
            outcome = kernel.suspend().state
        except FractionalGPUError as error:
            outcome = f"refused: {error}"
        saw("suspend", outcome)
        kernel_id = str(kernel.manager.kernel_id)
        settled = ("resident", "suspended", "quarantined")
        lease = lab.await_lease(kernel_id, lambda one: one.state in settled, "the suspend is over")
        saw("state", lease.state)
        saw("sentence", lease.sentence)
        if lease.state == "quarantined":
            saw("afterwards", "not asked: no cell runs on state that may be damaged")
        else:
            reply = kernel.run(CHECK)
            saw("afterwards", "intact" if reply.status == "ok" else f"{reply.status}: {reply.error}")
            assert reply.status == "ok" or lease.lease.unsuspendable_reason, (
                "the lease was called sound, and its kernel is not"
            )
        assert neighbour.is_intact()
        neighbour.suspend()
        until(lambda: lab.used_by(neighbour.pid) == 0, "the neighbour's memory is gone")
        assert neighbour.is_intact()
