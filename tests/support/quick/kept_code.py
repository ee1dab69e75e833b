"""Keeps code between processes: each one compiles the same dataclasses and patterns again while it imports, and finds the same modules.

That takes a third of the time in which a broker or a kernel loads, and the tests start some two thousand of them. This file, run as a
script, writes the code for its interpreter; what is not there or has changed is loaded as always, so old code only costs time.
"""

import dataclasses
import importlib
import marshal
import mmap
import os
import re._compiler  # type: ignore[import-not-found]  # private, so typeshed has no stub
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

# The length of the index in 8 bytes, the index, and the code of modules.
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
    """Let `dataclasses`, `re` and imports take their code from the file. Does nothing without a file."""
    try:
        with open(_FILE, "rb") as file:  # noqa: PTH123 - as above
            content = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        after = 8 + int.from_bytes(content[:8])
        kept: Mapping[object, bytes]
        kept, modules = marshal.loads(content[8:after])  # noqa: S302 - our own
    except (OSError, EOFError, ValueError, TypeError):
        return
    _import_from(content[after:], modules)
    compiled = re._compiler.compile

    def run(text: str, names: dict[str, Any], local: dict[str, Any]) -> None:
        code = kept.get(text)
        exec(text if code is None else marshal.loads(code), names, local)  # noqa: S102, S302 - what dataclasses gives to exec itself

    def pattern(text: object, flags: int = 0) -> object:
        code = kept.get((text, flags))
        return compiled(text, flags) if code is None else re._compiler._sre.compile(text, *marshal.loads(code))  # noqa: S302 - our own

    dataclasses.exec = run  # type: ignore[attr-defined]  # found before the built-in function of this name
    re._compiler.compile = pattern


# The file of a module, whether it is a package, when it was changed (ns), its size, and where its code begins and ends.
_Module = tuple[str, bool, int, int, int, int]


def _import_from(codes: memoryview, modules: Mapping[str, _Module]) -> None:
    usual = SourceFileLoader.get_code

    def code_of(loader: SourceFileLoader, name: str) -> Any:  # noqa: ANN401 - code
        if (found := modules.get(name)) is not None:
            path, _, changed_ns, size, start, end = found
            if path == loader.path:
                now = os.stat(path)  # noqa: PTH116 - as above
                if (now.st_mtime_ns, now.st_size) == (changed_ns, size):
                    return marshal.loads(codes[start:end])  # noqa: S302 - our own
        return usual(loader, name)

    class Submodules:
        """Finds submodules where they were, if their package is still there, without a look through its folder."""

        @staticmethod
        def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG004
            if path is None or (found := modules.get(name)) is None:
                return None
            file, is_package, *_ = found
            folder, _, leaf = file.rpartition("/")
            if (folder.rpartition("/")[0] if is_package else folder) != path[0] or not os.path.exists(file):  # noqa: PTH110
                return None
            spec = ModuleSpec(name, SourceFileLoader(name, file), origin=file)
            spec.has_location = True
            spec.cached = f"{folder}/__pycache__/{leaf[:-3]}.{sys.implementation.cache_tag}.pyc"
            if is_package:
                spec.submodule_search_locations = [folder]
            return spec

    SourceFileLoader.get_code = code_of  # type: ignore[assignment, method-assign]
    sys.meta_path.insert(0, Submodules)


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

    modules: dict[str, _Module] = {}
    code_of_modules = bytearray()
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.name != name or type(spec.loader) is not SourceFileLoader:
            continue
        path = spec.loader.path
        start, status = len(code_of_modules), os.stat(path)  # noqa: PTH116 - as above
        code_of_modules += marshal.dumps(spec.loader.get_code(name))
        is_package = spec.submodule_search_locations is not None
        modules[name] = (path, is_package, status.st_mtime_ns, status.st_size, start, len(code_of_modules))
    index = marshal.dumps((codes, modules))

    os.makedirs(os.path.dirname(_FILE), exist_ok=True)  # noqa: PTH103, PTH120 - as above
    with open(f"{_FILE}.{os.getpid()}", "wb") as file:  # noqa: PTH123
        file.write(len(index).to_bytes(8) + index + code_of_modules)
    os.replace(file.name, _FILE)  # noqa: PTH105


if __name__ == "__main__":
    write()
