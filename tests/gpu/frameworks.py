"""What notebooks hold next to plain memory, each in a plain process that the caller saves and brings back. Items of tests/gpu/questions.py.

    python -P -m tests.gpu.frameworks NAME

sets up what NAME holds, answers `{}`, and answers `{"intact": true}` to each line if the check succeeds, else `{"error": ...}`.
"""

import json
import os
import shutil
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from tests.gpu.items import Item, Note, NotHereError, Setting, cycle, described, tried
from tests.gpu.look import sees
from tests.gpu.talk import Talker

__all__ = ["ITEMS"]

_SETUP_S: Final = 75.0
_ANSWER_S: Final = 30.0


class Held(NamedTuple):
    """Code that makes it, code that fails if it is not there any more; `environment` and `needs` (packages, `cc`) of its process."""

    setup: str
    check: str
    needs: tuple[str, ...] = ("torch",)
    environment: Mapping[str, str] = {}
    job_file: bool = False


_TENSOR = """
import torch
held = torch.arange(1 << 26, device="cuda")
total = int(held.sum())
def is_there():
    return int(held.sum()) == total
"""
_GRAPH = """
static_in = torch.zeros(1 << 16, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        static_out = static_in * 3 + 1
side.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    static_out = static_in * 3 + 1
def replayed(value):
    static_in.fill_(value)
    graph.replay()
    torch.cuda.synchronize()
    return bool((static_out == value * 3 + 1).all())
assert replayed(2.0)
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
batches, taken = iter(loader), 0
def take():
    global taken
    rows = [float(one) for _ in range(8) for one in next(batches).cuda()[:, 0]]
    taken += len(rows)
    return rows == [float(one) for one in range(taken - len(rows), taken)]
assert take()
"""
_JAX = """
import jax, jax.numpy as jnp
held = jnp.arange(1 << 20, dtype=jnp.int32)
added = jax.jit(lambda one: (one + 1).sum())
before = int(added(held % 1000))
assert {device.platform for device in held.devices()} == {"gpu"}
"""
_CUPY = "import cupy\nheld = cupy.arange(1 << 20)\nbefore = int((held * 3).sum())"
_NUMBA = """
import numpy
from numba import cuda
@cuda.jit
def double(values):
    at = cuda.grid(1)
    if at < values.size:
        values[at] *= 2
held = cuda.to_device(numpy.arange(1 << 16))
double[256, 256](held)
"""
_DRIVER = """
from tests.gpu.holder_driver import DriverHolding
holding = DriverHolding(context=True)
holding.hold(32, 0)
holding.also["{kind}"](32)
"""
_NO_PREALLOCATION: Final = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # as kernels of the broker have it
_LOADED: Final = Held(_TENSOR + _LOADER, "assert is_there() and take()")
_HELD: Final = {
    "torch-graph": Held(_TENSOR + _GRAPH, "assert is_there() and replayed(4.0)"),
    "torch-expandable": Held(
        _TENSOR,
        "assert is_there() and any(one.get('is_expandable') for one in torch.cuda.memory_snapshot())",
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "torch-malloc-async": Held(
        _TENSOR,
        "assert is_there() and torch.cuda.get_allocator_backend() == 'cudaMallocAsync'",
        environment={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    ),
    "torch-compile": Held(_TENSOR + _COMPILE, "assert is_there() and is_right(777)", needs=("torch", "cc")),
    "torch-loader": _LOADED,
    "torch-loader-job-file": _LOADED._replace(job_file=True),
    "jax": Held(_JAX, "assert int(added(held % 1000)) == before", needs=("jax",), environment=_NO_PREALLOCATION),
    "cupy": Held(_CUPY, "assert int((held * 3).sum()) == before", needs=("cupy",)),
    "numba": Held(_NUMBA, "assert (held.copy_to_host() == 2 * numpy.arange(1 << 16)).all()", needs=("numba",)),
    **{
        kind: Held(_DRIVER.format(kind=kind), "assert holding.is_intact()", needs=())
        for kind in ("pinned", "registered", "mapped")
    },
}


def saved(setting: Setting, note: Note, name: str) -> None:
    """Whether a process that holds this can be saved, and still has all of it afterwards."""
    held = _HELD[name]
    if "cc" in held.needs and shutil.which("cc") is None:
        raise NotHereError("there is no C compiler")
    before_mib = sees(setting.backend)["used_mib"]
    arguments = ("-m", "tests.gpu.frameworks", name)
    process = Talker(arguments, environment=held.environment, job_file=held.job_file)
    with process, setting.caller() as caller:
        process.listen(_SETUP_S, f"setting up {name}")
        note("process", described(setting, caller, process.pid))
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            note(f"child {child}", described(setting, caller, int(child)))
        note("device_mib", round(sees(setting.backend)["used_mib"] - before_mib, 1))
        note("cycle", cycle(caller, process.pid, **process.given))
        note("intact", tried(lambda: process.ask(_ANSWER_S)["intact"]))


ITEMS: Final = {
    name: Item(
        act=partial(saved, name=name),
        longest_s=90,
        needs=("driver", *(one for one in held.needs if one != "cc"), *(["hardware"] if held.needs else [])),
    )
    for name, held in _HELD.items()
}


def _serve(held: Held) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # frameworks print
    for code in chain((held.setup,), (held.check for _ in sys.stdin)):
        try:
            exec(compile(code, "cell.py", "exec"), globals())  # noqa: S102 - the code above; compilers look for what is in __main__
            answers.write('{"intact": true}\n')
        except Exception as error:  # noqa: BLE001 - whatever a framework raises is the answer
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(_serve(_HELD[sys.argv[1]]))
