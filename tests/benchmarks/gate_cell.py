"""What the extension adds to a trivial cell on an open gate, and to loading: times with and without it, within one process.

    python tests/benchmarks/gate_cell.py [--cells 3000] [--json]

The two kinds of cells take turns, so that whatever else the machine does falls on both.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_ROUNDS = 20


def seconds_per_cell(shell: Any, cells: int) -> float:  # noqa: ANN401 - IPython is untyped
    """Run trivial cells."""
    start = time.perf_counter()
    for _ in range(cells):
        shell.run_cell("x = 1")
    return (time.perf_counter() - start) / cells


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, default=3000, help="trivial cells per kind (default: 3000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    shell = InteractiveShell.instance()
    _ = shell.Completer  # made at first use; a kernel has it when extensions are loaded
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "token").write_text("token")
        os.environ["JUPYTER_GPU_SOCKET"] = f"{folder}/broker.sock"  # nobody listens: an open gate needs nobody
        os.environ["JUPYTER_GPU_LEASE"] = "benchmark"
        os.environ["JUPYTER_GPU_TOKEN_FILE"] = f"{folder}/token"
        result = measure(shell, max(1, arguments.cells // _ROUNDS))
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"loading         {result['load_ms']:8.2f} ms")
    print(f"plain cell      {result['plain_us']:8.2f} us")
    print(f"guarded cell    {result['guarded_us']:8.2f} us")
    print(f"added           {result['added_us']:8.2f} us ({result['ratio']:.3f} times a plain cell)")


def measure(shell: Any, cells: int) -> dict[str, float]:  # noqa: ANN401 - as above
    """Load once for the time it takes, then let plain and guarded cells take turns."""
    start = time.perf_counter()
    import fractional_gpu_kernel  # noqa: PLC0415 - its import is part of what is measured

    fractional_gpu_kernel.load_ipython_extension(shell)
    load_s = time.perf_counter() - start
    fractional_gpu_kernel.unload_ipython_extension(shell)
    plain: list[float] = []
    guarded: list[float] = []
    kinds: list[tuple[list[float], Callable[[Any], None]]] = [(plain, lambda _: None), (guarded, load_open)]
    seconds_per_cell(shell, cells)
    for _ in range(_ROUNDS):
        for times, prepare in kinds:
            prepare(shell)
            times.append(seconds_per_cell(shell, cells))
            fractional_gpu_kernel.unload_ipython_extension(shell)
    plain_us, guarded_us = statistics.median(plain) * 1e6, statistics.median(guarded) * 1e6
    return {
        "load_ms": load_s * 1e3,
        "plain_us": plain_us,
        "guarded_us": guarded_us,
        "added_us": guarded_us - plain_us,
        "ratio": guarded_us / plain_us,
    }


def load_open(shell: Any) -> None:  # noqa: ANN401 - as above
    """Load the extension with its gate open, as after a first grant."""
    import fractional_gpu_kernel  # noqa: PLC0415 - see `measure`

    fractional_gpu_kernel.load_ipython_extension(shell)
    fractional_gpu_kernel._loaded[id(shell)].gate.open({})  # no broker here to open it


if __name__ == "__main__":
    main()
