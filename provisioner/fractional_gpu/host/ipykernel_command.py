"""How a command line starts ipykernel, and whether it loads our extension.

The provisioner reads the commands of kernelspecs; a broker that lost its ledger reads those of living processes.
"""

from collections.abc import Sequence
from typing import Final

EXTENSION_ARGUMENT: Final = "--IPKernelApp.extra_extensions=fractional_gpu_kernel"
_EARLIER_ARGUMENT: Final = "--IPKernelApp.extra_extensions=kernelext"
_EXTENSIONS: Final = ("fractional_gpu_kernel", "kernelext")  # the second: the extension's name in earlier versions
_EARLIER_LAUNCHER: Final = "provisioner.launcher"
_OPTIONS_WITH_VALUE: Final = frozenset({"-X", "-W"})


def find_ipykernel(argv: Sequence[str]) -> int | None:
    """Return the position of the `-m` or `-c` by which Python starts ipykernel; None for any other program.

    `argv[:position]` is the interpreter with its options.
    """
    position, what = _find_program(argv)
    if argv[position : position + 1] == ["-m"] and what in {"ipykernel_launcher", "ipykernel"}:
        return position
    return position if _is_launch_code(argv, position, what) else None


def loads_extension(argv: Sequence[str]) -> bool:
    """Return whether the command starts ipykernel with our extension, of this or an earlier version."""
    position, what = _find_program(argv)
    loading = EXTENSION_ARGUMENT in argv or _EARLIER_ARGUMENT in argv
    return _is_launch_code(argv, position, what) or (loading and find_ipykernel(argv) is not None)


def is_of_earlier_version(argv: Sequence[str]) -> bool:
    """Return whether the command is one that an earlier version wrote into its kernelspecs: it needs modules of that version."""
    position, what = _find_program(argv)
    return _EARLIER_ARGUMENT in argv or what == _EARLIER_LAUNCHER or _is_launch_code(argv, position, what)


def _find_program(argv: Sequence[str]) -> tuple[int, str]:
    """Return the position of the interpreter's `-m` or `-c`, and the module or code; past the end and "" where there is neither."""
    position = 1
    while position < len(argv) and argv[position].startswith("-"):
        if argv[position] in {"-m", "-c"}:
            return position, argv[position + 1] if position + 1 < len(argv) else ""
        position += 2 if argv[position] in _OPTIONS_WITH_VALUE else 1
    return len(argv), ""


def _is_launch_code(argv: Sequence[str], position: int, code: str) -> bool:
    """Whether `-c` has the code with which earlier versions started ipykernel: it imported the extension, then ipykernel."""
    is_code = argv[position : position + 1] == ["-c"]
    return is_code and "launch_new_instance" in code and any(name in code for name in _EXTENSIONS)
