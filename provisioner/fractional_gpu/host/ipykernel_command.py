"""How a process's command line names ipykernel, and whether it loads our extension.

The provisioner reads the commands of kernelspecs, and a broker that lost its ledger those of living processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["EXTENSION_ARGUMENT", "IPythonKernel", "find_ipykernel", "loads_extension"]

EXTENSION_ARGUMENT: Final = "--IPKernelApp.extra_extensions=fractional_gpu_kernel"
_EXTENSIONS: Final = ("fractional_gpu_kernel", "kernelext")  # the second: kernels that version 0.1.0 started
_ARGUMENTS: Final = frozenset(f"--IPKernelApp.extra_extensions={name}" for name in _EXTENSIONS)


@dataclass(frozen=True, slots=True)
class IPythonKernel:
    """Where a command names ipykernel.

    `argv[:start]` are the interpreter and its options, `argv[start:stop]` say what it runs.
    """

    start: int
    stop: int
    ours: bool


def find_ipykernel(argv: Sequence[str]) -> IPythonKernel | None:
    """Return where `argv` names ipykernel, or None if it starts something else, of which nothing is known."""
    position = 1
    while position < len(argv) and argv[position].startswith("-"):
        word, following = argv[position], argv[position + 1] if position + 1 < len(argv) else ""
        if word == "-m":
            known = following in {"ipykernel_launcher", "ipykernel"}
            return IPythonKernel(position, position + 2, ours=False) if known else None
        if word == "-c":
            return IPythonKernel(position, position + 2, ours=True) if _is_launch_code(following) else None
        position += 2 if word in {"-X", "-W"} else 1
    return None


def loads_extension(argv: Sequence[str]) -> bool:
    """Return whether the command starts ipykernel with our extension, of this or an earlier version."""
    found = find_ipykernel(argv)
    return found is not None and (found.ours or not _ARGUMENTS.isdisjoint(argv))


def _is_launch_code(code: str) -> bool:
    """Whether it is ours, of this or another version."""
    return any(name in code for name in _EXTENSIONS) and "launch_new_instance" in code
