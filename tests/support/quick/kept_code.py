"""Keeps what `dataclasses` and `re` compile between processes: each one compiles the same methods and patterns again while it imports.

That takes a third of the time in which a broker or a kernel loads, and the tests start some two thousand of them. This file, run as a
script, writes the code for its interpreter; what is not there is compiled as always, so old code only costs time.
"""

import dataclasses
import importlib
import marshal
import os
import re._compiler  # type: ignore[import-not-found]  # private, so typeshed has no stub
import sys
from collections.abc import Mapping
from typing import Any

_FILE = os.path.join(os.path.dirname(__file__), "__pycache__", f"code-{sys.implementation.cache_tag}.marshal")  # noqa: PTH118, PTH120 - pathlib takes longer to import

_LOADED = (
    "fractional_gpu.broker.process.run",
    "fractional_gpu.commands.main",
    "fractional_gpu_hub.service.app",
    "fractional_gpu_kernel",
    "ipykernel.kernelapp",
    "IPython.core.oinspect",
    "jupyter_server.serverapp",
    "jupyterhub.app",
    "jupyterhub.singleuser",
)


def use() -> None:
    """Let `dataclasses` and `re` take their code from the file. Does nothing without a file."""
    try:
        with open(_FILE, "rb") as file:  # noqa: PTH123 - as above
            kept: Mapping[object, bytes] = marshal.load(file)  # noqa: S302 - our own
    except (OSError, EOFError, ValueError, TypeError):
        return
    compiled = re._compiler.compile

    def run(text: str, names: dict[str, Any], local: dict[str, Any]) -> None:
        code = kept.get(text)
        exec(text if code is None else marshal.loads(code), names, local)  # noqa: S102, S302 - what dataclasses gives to exec itself

    def pattern(text: object, flags: int = 0) -> object:
        code = kept.get((text, flags))
        return compiled(text, flags) if code is None else re._compiler._sre.compile(text, *marshal.loads(code))  # noqa: S302 - our own

    dataclasses.exec = run  # type: ignore[attr-defined]  # found before the built-in function of this name
    re._compiler.compile = pattern


def write() -> None:
    """Load what the processes of the tests load, and keep the code."""
    codes: dict[object, bytes] = {}
    compiled = re._compiler.compile

    def run(text: str, names: dict[str, Any], local: dict[str, Any]) -> None:
        code = compile(text, "<string>", "exec")
        codes[text] = marshal.dumps(code)
        exec(code, names, local)  # noqa: S102 - as above

    def pattern(text: str | bytes, flags: int = 0) -> "re.Pattern[Any]":
        made: re.Pattern[Any] = compiled(text, flags)
        code = re._compiler._code(re._compiler._parser.parse(text, flags), flags)
        names = {number: name for name, number in made.groupindex.items()}
        groups = made.groups, dict(made.groupindex), tuple(names.get(number) for number in range(made.groups + 1))
        codes[text, int(flags)] = marshal.dumps((made.flags, [*map(int, code)], *groups))
        return made

    dataclasses.exec = run  # type: ignore[attr-defined]
    re._compiler.compile = pattern
    re.purge()
    for name in _LOADED:
        importlib.import_module(name)

    os.makedirs(os.path.dirname(_FILE), exist_ok=True)  # noqa: PTH103, PTH120 - as above
    with open(f"{_FILE}.{os.getpid()}", "wb") as file:  # noqa: PTH123
        marshal.dump(codes, file)
    os.replace(file.name, _FILE)  # noqa: PTH105


if __name__ == "__main__":
    write()
