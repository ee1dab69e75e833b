"""What notebooks do besides plain tensors: other allocators, registered memory, compiled code, live data loaders, JAX and CuPy.

Whether the driver saves such a kernel is recorded (`suspend`), and not promised. Promised is that the kernel goes on with all it has,
whether it was saved or refused, and that it holds nothing on the device while it is saved.
"""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from fractional_gpu.protocol.errors import FractionalGPUError
from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab

Note = Callable[[str, object], None]

_ALLOCATOR = """
import os
given = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ",".join([*([given] if given else []), "{option}"])
"""
_HOST_REGISTER = """
host = torch.arange(1 << 20)
assert int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0)) == 0
assert host.is_pinned()
"""
_COMPILE = """
@torch.compile
def compiled(one):
    return torch.relu(one) * 2 + 1
def is_right(count):
    given = torch.randn(count, device="cuda")
    return torch.allclose(compiled(given), torch.relu(given) * 2 + 1)
assert is_right(1 << 16)
"""
_LOADER = """
import torch.utils.data
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        return torch.full((256,), float(index))
loader = torch.utils.data.DataLoader(Numbers(), batch_size=16, num_workers=2, persistent_workers=True, pin_memory=True)
batches = iter(loader)
def take(count):
    return sum(next(batches).cuda()[:, 0].sum().item() for _ in range(count))
assert take(8) == float(sum(range(128)))
"""
_JAX = """
import jax, jax.numpy as jnp
held = jnp.arange(1 << 20, dtype=jnp.int32)
@jax.jit
def added(one):
    return (one + 1).sum()
jax_before = int(added(held % 1000))
assert {device.platform for device in held.devices()} == {"gpu"}
"""
_CUPY = """
import cupy
held = cupy.arange(1 << 20)
cupy_before = int((held * 3).sum())
"""


class Variant(NamedTuple):
    """Cells before and after the kernel's tensors are made, and one that checks the rest; `needs` is a package, or `cc`."""

    first: str = ""
    then: str = ""
    check: str = ""
    needs: str = "torch"


VARIANTS = {
    "expandable segments": Variant(
        first=_ALLOCATOR.format(option="expandable_segments:True"),
        check="assert any(one.get('is_expandable') for one in torch.cuda.memory_snapshot()), 'no segment is expandable'",
    ),
    "cudaMallocAsync": Variant(
        first=_ALLOCATOR.format(option="backend:cudaMallocAsync"),
        check="assert torch.cuda.get_allocator_backend() == 'cudaMallocAsync'",
    ),
    "cudaHostRegister": Variant(
        then=_HOST_REGISTER,
        check="assert host.is_pinned() and torch.equal(host.to('cuda', non_blocking=True).cpu(), torch.arange(1 << 20))",
    ),
    "torch.compile": Variant(
        then=_COMPILE,
        check="assert is_right(1 << 16) and is_right(777), 'compiled code computes something else'",
        needs="cc",
    ),
    "DataLoader workers": Variant(
        then=_LOADER,
        check="assert take(8) == float(sum(range(128, 256))), 'the loader gives something else'",
    ),
    "JAX": Variant(then=_JAX, check="assert int(added(held % 1000)) == jax_before", needs="jax"),
    "CuPy": Variant(then=_CUPY, check="assert int((held * 3).sum()) == cupy_before", needs="cupy"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_goes_on_whether_it_can_be_saved_or_not(lab: Lab, saw: Note, name: str) -> None:
    variant = VARIANTS[name]
    if (shutil.which("cc") if variant.needs == "cc" else find_spec(variant.needs)) is None:
        saw("not shown", f"there is no {variant.needs}")
        pytest.skip(f"there is no {variant.needs}")
    with Kernel(lab, lab.install(6)) as kernel:
        for code in (variant.first, lab.cells.fill(31, lab.unit_mib), variant.then):
            if code:
                kernel.must(code)
        saw("held_mib", lab.used_by(kernel.pid))
        try:
            lease = kernel.suspend()
        except FractionalGPUError as error:
            saw("suspend", f"refused: {error}")
        else:
            saw("suspend", f"{lease.state}, {lease.saved_mib} MiB")
            assert lab.used_by(kernel.pid) == 0, "it holds device memory while it is saved"
        assert kernel.is_intact()
        kernel.must(variant.check)
        saw("afterwards", "all there")
