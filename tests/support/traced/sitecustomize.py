"""Counts the calls of our own functions in this process while a flag is up: Python imports this where this folder is in PYTHONPATH.

`JUPYTER_GPU_TRACE` names a folder with a file `flag` of one byte, which all processes map. While it is odd, each call of a function in one
of our packages is counted; when it is even again, the process writes what it counted into the folder. A process that counts says so by a
file `PID.counts`. tests/benchmarks/ways.py turns the flag.
"""

import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

_PERIOD_S = 0.02
_PACKAGES = (
    "provisioner",
    "kernelext",
    "hub_spawner",
)  # folders of a checkout, before and after they held packages of another name
_FOLDER = os.environ.get("JUPYTER_GPU_TRACE")
_ROOT = os.environ.get("JUPYTER_GPU_TRACE_ROOT", "")


def _begin(folder: Path) -> None:
    with (folder / "flag").open("rb") as file:
        flag = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    names: dict[CodeType, str] = {}
    calls: Counter[str] = Counter()

    def named(code: CodeType) -> str:
        path = code.co_filename
        ours = path.startswith(_ROOT) and path[len(_ROOT) + 1 :].split("/", 1)[0] in _PACKAGES
        return f"{path[len(_ROOT) + 1 :]}:{code.co_qualname}" if ours else ""

    def hook(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and flag[0] & 1:
            code = frame.f_code
            name = names.get(code)
            if name is None:
                name = names[code] = named(code)
            if name:
                calls[name] += 1

    def write(was: int) -> None:
        while True:
            time.sleep(_PERIOD_S)
            if flag[0] == was:
                continue
            was = flag[0]
            if not was & 1:
                part = folder / f"{os.getpid()}.part"
                part.write_text(json.dumps({"argv": sys.argv, "calls": calls}))
                part.rename(folder / f"{os.getpid()}-{time.monotonic_ns()}.json")
                calls.clear()

    threading.setprofile(hook)
    sys.setprofile(hook)
    writer = threading.Thread(target=write, args=(flag[0],), daemon=True)
    writer.start()
    (folder / f"{os.getpid()}.counts").touch()


if _FOLDER:
    _begin(Path(_FOLDER))
