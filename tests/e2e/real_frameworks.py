"""The real CPU packages of torch, JAX and Dask in real kernels on a simulated GPU, which are suspended in between.

    tests/run frameworks [--venv FOLDER]

Each kernel has a share of the simulated GPU and bytes on it, and uses its framework on the CPU. A neighbour takes the GPU twice. Each
time the idle kernel is suspended, and its next cell must find everything: the bytes, the framework's state, and its worker
processes. It also shows which variables hold the limit and that the installed release accepts them, what torch reports as the
device's memory, and what the kernel freed when asked to shrink. Prints a table, and exits with 1 if anything fails.

The packages are installed into a virtual environment (`build/frameworks`), which is reused until the requirements change. Needs a
network for pip: about 300 MB with a CPU build of torch, several GB with the default Linux build.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.paths import COMPLETE_PYTHONPATH, ROOT
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, new_world

REQUIREMENTS = ("torch==2.13.0", "numpy", "jax[cpu]", "dask[distributed]", "jupyter_server", "websocket-client")
ROUNDS = 2

PREPARE = """
import os, subprocess, sys
from fractional_gpu_kernel import memory as limits
def installed(name):
    from importlib.metadata import version
    return version(name)
def fraction():
    mib = limits.framework_mib(int(os.environ["JUPYTER_GPU_MEMORY_MIB"]), int(os.environ["JUPYTER_GPU_CONTEXT_MIB"]))
    return f"{mib / int(os.environ['JUPYTER_GPU_DEVICE_MIB']):.4f}"
freed = []
def noting(free=limits.free_caches):
    freed.append(free())
    return freed[-1]
limits.free_caches = noting
"""


class Program(NamedTuple):
    """The cells of one kernel. `begin` checks the limits, creates state and prints `figure: value` lines; `check` finds it all again."""

    name: str
    begin: str
    check: str
    end: str = ""


# Everything but the driver is the CPU build's real code; only the missing driver is replaced.
TORCH = Program(
    "torch",
    begin="""
import torch
print("release:", torch.__version__)
setting = os.environ["PYTORCH_CUDA_ALLOC_CONF"]
assert setting == f"per_process_memory_fraction:{fraction()}", setting
code = "import os, torch; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'], torch.zeros(2).sum().item())"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
assert child.split() == [setting, "0.0"], child
queued = [call for call, _ in torch.cuda._queued_calls if call.__module__ == limits.__name__]
assert len(queued) == 1, torch.cuda._queued_calls
class Driver:
    @staticmethod
    def cudaMemGetInfo(index): return 1 << 30, 1 << 30
real, torch.cuda.cudart = torch.cuda.cudart, lambda: Driver
mib = limits.framework_mib(int(os.environ["JUPYTER_GPU_MEMORY_MIB"]), int(os.environ["JUPYTER_GPU_CONTEXT_MIB"]))
assert torch.cuda.mem_get_info(0) == torch.cuda.mem_get_info(torch.device("cuda:0")) == (mib << 20, mib << 20)
assert torch.cuda.mem_get_info.__wrapped__(0) == (1 << 30, 1 << 30)
torch.cuda.cudart = real
print("limits:", setting, "(children too), mem_get_info", mib, "MiB, the call for a limit queued")

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, index): return torch.full((16,), float(index))
loader = torch.utils.data.DataLoader(Numbers(), batch_size=16, num_workers=2, persistent_workers=True)
batches, taken = iter(loader), 0
def take():
    global taken
    found = sum(next(batches)[:, 0].sum().item() for _ in range(8))
    assert found == sum(range(taken, taken + 128)), found
    taken += 128
take()
workers = [worker.pid for worker in batches._workers]
weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(5))
""",
    check="""
assert torch.equal(weights, torch.randn(256, 256, generator=torch.Generator().manual_seed(5)))
assert all(worker.is_alive() for worker in batches._workers) and workers == [worker.pid for worker in batches._workers]
take()
alive = f"{len(workers)} DataLoader workers, the same"
""",
    end="del batches, loader",
)
JAX = Program(
    "jax",
    begin="""
import jax, jax.numpy as jnp
from jaxlib import xla_client
print("release:", jax.__version__, "with jaxlib", installed("jaxlib"))
NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
def memory_fraction(): return xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"]
assert (os.environ.get(NEW), os.environ.get(OLD)) == (fraction(), None)
assert memory_fraction() == float(fraction())
os.environ[OLD] = "0.5"  # as a cell does that was written for an older release: refused together with ours
assert memory_fraction() == 0.5 and NEW not in os.environ
del os.environ[OLD]
assert memory_fraction() == float(os.environ[NEW]) == float(fraction())
print("limits:", f"{NEW}={fraction()}, a user's own one instead of it")

held = jnp.arange(1 << 16)
total = jax.jit(lambda numbers: (numbers % 1000).sum())
before = int(total(held))
""",
    check="""
assert int(total(held)) == before == sum(number % 1000 for number in range(1 << 16))
alive = "-"
""",
)
DASK = Program(
    "dask",
    begin="""
import dask.array
from dask.distributed import Client, LocalCluster
print("release:", installed("dask"))
cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
client = Client(cluster)
limited = client.run(lambda: os.environ["CUPY_GPU_MEMORY_LIMIT"])
assert set(limited.values()) == {os.environ["CUPY_GPU_MEMORY_LIMIT"]}, limited
print("limits:", "the kernel's variables in both workers")
workers = sorted(client.run(os.getpid).values())
numbers = dask.array.arange(1 << 16, chunks=1 << 12).persist()
kept = client.submit(lambda: [os.getpid()] * 3)
""",
    check="""
assert sorted(client.run(os.getpid).values()) == workers
assert int(numbers.sum().compute()) == sum(range(1 << 16))
assert set(kept.result()) <= set(workers), "the future was computed again, by another process"
alive = f"{len(workers)} workers of a LocalCluster, the same"
""",
    end="client.close(); cluster.close()",
)


def play(world: World, server: Server, spec: str, neighbour: Notebook, program: Program) -> dict[str, str]:
    notebook = server.start(spec)
    notebook.must(fill(1) + PREPARE)
    figures = dict(re.findall(r"^(\w+): (.*)$", notebook.must(program.begin).text, re.MULTILINE))
    for _ in range(ROUNDS):
        neighbour.must(fill(2))
        world.await_state(notebook.kernel_id, "suspended")
        notebook.must(CHECK + program.check)
    suspends = world.lease(notebook.kernel_id).suspends
    assert suspends >= ROUNDS, f"{suspends} suspends in {ROUNDS} rounds"
    figures["suspended"] = f"{suspends} times, all back"
    figures["workers"] = notebook.must("print(alive)").text.strip()
    figures["freed"] = notebook.must("assert freed\nprint(freed[-1])").text.strip()
    assert "gc" in figures["freed"], figures["freed"]
    assert program.name != "torch" or "torch" in figures["freed"], figures["freed"]
    notebook.must(program.end)
    notebook.shut_down()
    return figures


def run() -> bool:
    columns = ("release", "limits", "suspended", "workers", "freed")
    rows, good = [("framework", *columns), ("---",) * (len(columns) + 1)], True
    with new_world() as world:
        world.environment["PYTHONPATH"] = COMPLETE_PYTHONPATH
        with Server(world) as server:
            (spec,) = world.install(750)
            neighbour = server.start(spec)
            for program in (TORCH, JAX, DASK):
                print(f"{program.name} ...", file=sys.stderr, flush=True)
                try:
                    figures = play(world, server, spec, neighbour, program)
                except AssertionError as error:
                    good = False
                    print(error, world.logs(), file=sys.stderr, sep="\n")
                    figures = {"release": "FAILED"}
                rows.append((program.name, *(figures.get(column, "") for column in columns)))
    print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    return good


def environment(folder: Path) -> Path:
    """Return the Python of a virtual environment with everything; create it if it is missing or has other requirements."""
    stamp, python = folder / "stamp", folder / "bin" / "python"
    wanted = hashlib.sha256("\n".join((*REQUIREMENTS, sys.version, (ROOT / "pyproject.toml").read_text())).encode())
    if not stamp.exists() or stamp.read_text() != wanted.hexdigest():
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *REQUIREMENTS, "--editable", str(ROOT)], check=True)
        stamp.write_text(wanted.hexdigest())
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / "build" / "frameworks", metavar="FOLDER")
    folder = parser.parse_args().venv.absolute()
    if Path(sys.prefix) != folder:
        python = environment(folder)
        os.execv(python, [str(python), __file__, *sys.argv[1:]])  # noqa: S606 - this file, in the other environment
    return 0 if run() else 1


if __name__ == "__main__":
    raise SystemExit(main())
