"""What a CUDA context takes beside a framework's allocator, learnt for each kind of device.

The figure of one kernel is what the device charges to its process less what its framework's allocator holds: the context, the modules
of cuBLAS, cuDNN and compiled kernels, NCCL's buffers. It differs between kernels, and what allocates past the allocator adds to it.
A framework's limit needs an upper estimate that a few odd kernels, or one user's, cannot raise for everybody. So it is the larger of

- the third quartile of the figures of the last `KERNELS` kernels, of all users, and
- the largest figure among these that is the user's own.

What cannot be a context (larger than `MOST_MIB`, or than three quarters of the kernel's cap) is left out.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["FLOOR_MIB", "KERNELS", "MOST_MIB", "ContextSize", "ContextSizes"]

FLOOR_MIB = 512
"""What is taken for a context until more has been seen."""
MOST_MIB = 4096
KERNELS = 32
_STEP_MIB = 32  # estimates are rounded up to multiples, so that they seldom change
_DEVICES = 64  # names that are remembered
_VERSION = 1


class ContextSize(NamedTuple):
    """What one kernel's context took, MiB, and whose kernel it was."""

    uid: int
    mib: int


class ContextSizes:
    """Estimates by the device's name, MiB. Each kernel counts once, with the largest figure that was seen of it."""

    def __init__(self, seen: Mapping[str, Mapping[str, ContextSize]] | None = None) -> None:
        self._seen = {
            name: dict(figures) for name, figures in (seen or {}).items()
        }  # by device and kernel, the last ones last

    def saw(self, device_name: str, kernel: str, figure: ContextSize, cap_mib: int) -> bool:
        """Take in a kernel's figure; return whether the estimate for its user has changed."""
        if not 0 <= figure.mib <= min(MOST_MIB, cap_mib * 3 // 4):
            return False
        before = self.estimate_mib(device_name, figure.uid)
        figures = self._seen.pop(device_name, {})
        self._seen[device_name] = figures  # the last device is the last one
        earlier = figures.pop(kernel, figure)
        figures[kernel] = ContextSize(figure.uid, max(figure.mib, earlier.mib))
        while len(figures) > KERNELS:
            del figures[next(iter(figures))]
        while len(self._seen) > _DEVICES:
            del self._seen[next(iter(self._seen))]
        return self.estimate_mib(device_name, figure.uid) != before

    def estimate_mib(self, device_name: str, uid: int) -> int:
        """Return what a context takes in a kernel of this user on a device of this name, MiB; at least `FLOOR_MIB`."""
        figures = list(self._seen.get(device_name, {}).values())
        everybody = sorted(figure.mib for figure in figures)
        quartile = everybody[-(-len(everybody) * 3 // 4) - 1] if everybody else 0
        own = max((figure.mib for figure in figures if figure.uid == uid), default=0)
        return max(FLOOR_MIB, -(-max(quartile, own) // _STEP_MIB) * _STEP_MIB)

    def state(self) -> dict[str, Any]:
        """Return what was learnt, for JSON."""
        devices = {name: [[kernel, *one] for kernel, one in figures.items()] for name, figures in self._seen.items()}
        return {"version": _VERSION, "devices": devices}

    @staticmethod
    def from_state(state: object) -> "ContextSizes":
        """Return what `state` gave. Raises ValueError for anything else."""
        if (
            not isinstance(state, dict)
            or state.get("version") != _VERSION
            or not isinstance(state.get("devices"), dict)
        ):
            raise ValueError(f"{str(state)[:80]!r} are no context sizes of version {_VERSION}")
        seen: dict[str, dict[str, ContextSize]] = {}
        for name, figures in state["devices"].items():
            if not isinstance(figures, list) or not all(_is_figure(one) for one in figures):
                raise ValueError(f"the context sizes of {name[:80]!r} are not lists of a kernel, a uid and MiB")
            seen[name] = {kernel: ContextSize(uid, mib) for kernel, uid, mib in figures[-KERNELS:]}
        return ContextSizes(seen)


def _is_figure(value: object) -> bool:
    match value:
        case [str(), int(), int(mib)]:
            return 0 <= mib <= MOST_MIB
        case _:
            return False
