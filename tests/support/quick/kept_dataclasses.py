"""Keeps the code of dataclasses' methods between processes: `dataclasses` compiles it again in each one, some thousand times in a broker.

That takes a quarter of the time in which a broker loads, and the tests start hundreds of them. This file, run as a script, writes the code
for its interpreter; what is not there is compiled as always, so old code only costs time.
"""

import dataclasses
import marshal
import os
import sys
from collections.abc import Mapping
from typing import Any

_FILE = os.path.join(os.path.dirname(__file__), "__pycache__", f"dataclasses-{sys.implementation.cache_tag}.marshal")  # noqa: PTH118, PTH120 - pathlib takes longer to import


def use() -> None:
    """Let `dataclasses` take its code from the file. Does nothing without a file."""
    try:
        with open(_FILE, "rb") as file:  # noqa: PTH123 - as above
            kept: Mapping[str, bytes] = marshal.load(file)  # noqa: S302 - our own
    except (OSError, EOFError, ValueError, TypeError):
        return

    def run(text: str, names: dict[str, Any], local: dict[str, Any]) -> None:
        code = kept.get(text)
        exec(text if code is None else marshal.loads(code), names, local)  # noqa: S102, S302 - what dataclasses gives to exec itself

    dataclasses.exec = run  # type: ignore[attr-defined]  # found before the built-in function of this name


def write() -> None:
    """Load what the processes of the tests load, and keep the code."""
    codes: dict[str, bytes] = {}

    def run(text: str, names: dict[str, Any], local: dict[str, Any]) -> None:
        code = compile(text, "<string>", "exec")
        codes[text] = marshal.dumps(code)
        exec(code, names, local)  # noqa: S102 - as above

    dataclasses.exec = run  # type: ignore[attr-defined]
    import fractional_gpu.broker.process.run  # noqa: PLC0415 - once `exec` is ours
    import fractional_gpu.commands.main  # noqa: F401, PLC0415
    import fractional_gpu_hub.service.app  # noqa: F401, PLC0415

    os.makedirs(os.path.dirname(_FILE), exist_ok=True)  # noqa: PTH103, PTH120 - as above
    with open(f"{_FILE}.{os.getpid()}", "wb") as file:  # noqa: PTH123
        marshal.dump(codes, file)
    os.replace(file.name, _FILE)  # noqa: PTH105


if __name__ == "__main__":
    write()
