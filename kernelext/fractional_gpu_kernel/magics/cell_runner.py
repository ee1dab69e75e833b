"""Runs the code of `%%gpu measure` in a separate process. A measurement starts several such processes, in parallel or one by one.

    python -P cell_runner.py JOB

JOB is a JSON file with `setup` (a list of name and source pairs), `cell` (a source) and `from_start`. Sources are plain Python, after
IPython's transformations.

- The setup runs once, then the cell runs repeatedly. The first run is a warm-up. Each later run is one unit of work, reported by
  `measure.tick` once torch and CuPy have finished their work. A cell that calls `tick` itself counts its own units.
- With `from_start`, the setup and the cell run only once, and the whole process is the unit of work.
- All output except errors is discarded. `get_ipython()` works, but its `%gpu` magics do nothing.
"""

import ast
import asyncio
import builtins
import inspect
import json
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fractional_gpu_kernel.measure import FILE, tick

SETUP_HINT = "is not defined in the measured process, which runs only this cell: name the cells that define it, such as --setup 1-3"


def main(arguments: list[str]) -> int:
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, "")  # as in a kernel
    os.environ["MPLBACKEND"] = "Agg"
    reports = os.environ.pop(FILE, "")  # so that reports during the setup do not count
    module = ModuleType("__main__")
    sys.modules["__main__"] = module  # so that objects of classes in the code can be pickled
    setattr(builtins, "display", lambda *_, **__: None)  # noqa: B010 - IPython's kernels have it there
    sources = [*job["setup"], ("the cell", job["cell"])]
    if any("get_ipython" in source for _, source in sources):
        _make_shell(module)
    *setup, cell = [_compiled(name, source) for name, source in sources]
    with asyncio.Runner() as loop:
        try:
            for part in setup:
                _run(part, module, loop)
            if job["from_start"]:
                _run(cell, module, loop)
                _wait_for_device()
            else:
                _repeat(cell, module, loop, reports)
        except NameError as error:
            traceback.print_exc()
            print(f"{error.name or 'a name'!r} {SETUP_HINT}", file=sys.stderr)  # noqa: T201 - the measurement quotes the last line
            return 1
        except Exception:  # noqa: BLE001 - the user's code raised it
            traceback.print_exc()
            return 1
    return 0


def _repeat(cell: CodeType, module: ModuleType, loop: "asyncio.Runner", reports: str) -> None:
    if reports:
        os.environ[FILE] = reports
    before = Path(reports).stat().st_size if reports else 0
    _run(cell, module, loop)
    _wait_for_device()
    reports_itself = bool(reports) and Path(reports).stat().st_size > before
    while True:
        if not reports_itself:
            tick()
        _run(cell, module, loop)
        _wait_for_device()


def _compiled(name: str, source: str) -> CodeType:
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    code: CodeType = compile(source, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def _run(code: CodeType, module: ModuleType, loop: "asyncio.Runner") -> None:
    result = eval(code, module.__dict__)  # noqa: S307 - the user's own code; `exec` drops the coroutine of a top-level await
    if code.co_flags & inspect.CO_COROUTINE:
        loop.run(result)


def _wait_for_device() -> None:
    """Wait until torch and CuPy have finished their work on the device."""
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if cupy is not None:
        cupy.cuda.runtime.deviceSynchronize()


def _make_shell(module: ModuleType) -> None:
    from IPython.core.interactiveshell import InteractiveShell  # noqa: PLC0415 - most code does not need it
    from traitlets.config import Config  # noqa: PLC0415 - as above

    config = Config()
    config.HistoryManager.enabled = False
    shell: Any = InteractiveShell.instance(config=config, user_module=module, user_ns=module.__dict__)
    shell.register_magic_function(lambda _line: None, "line", "gpu")
    # Bursts do nothing either, because the measurement sets the share of the process.
    for name in ("gpu", "cpu"):
        shell.register_magic_function(lambda _line, cell: shell.run_cell(cell).raise_error(), "cell", name)
    sys.modules["__main__"] = module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
