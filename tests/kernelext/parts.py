"""A kernel reduced to what a test of one of its parts needs."""

from types import SimpleNamespace
from typing import Any, cast

from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.extension import LeasedKernel

__all__ = ["a_kernel"]


def a_kernel(*, why_not: str = "", waiting: tuple[str, ...] = (), **parts: Any) -> LeasedKernel:  # noqa: ANN401 - of any part
    """Return a kernel with these parts, `why_not`: why it cannot be saved, `waiting`: its requests that wait for input."""
    quiet: dict[str, Any] = {
        "shell": None,
        "settings": None,
        "gate": Gate(lambda _: None),
        "blockers": SimpleNamespace(reason=lambda: why_not, seen=why_not),
        "inputs": SimpleNamespace(waiting=list(waiting)),
        "notices": SimpleNamespace(add=lambda _: None),
        "on_main_loop": lambda _: True,
        "has_gui_loop": lambda: False,
    }
    return cast("LeasedKernel", SimpleNamespace(**(quiet | parts)))
