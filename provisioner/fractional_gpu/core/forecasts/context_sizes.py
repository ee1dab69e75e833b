"""What a CUDA context takes beside a framework's allocator, learnt for each kind of device.

The size of one kernel's context is what the device charges to its process less what its framework's allocator holds: the context, the
modules of cuBLAS, cuDNN and compiled kernels, NCCL's buffers. It differs between kernels, and allocations past the allocator add to it.
A framework's limit needs an upper estimate that a few odd kernels, or those of one user, cannot raise for all users. So it is the larger of

- the third quartile of the sizes of the last `KERNELS` kernels, of all users, and
- the largest size among these that is the user's own.

Sizes that cannot be a context (larger than `MOST_MIB`, or than three quarters of the kernel's cap) are left out.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["FLOOR_MIB", "KERNELS", "MOST_MIB", "ContextSize", "ContextSizes"]

FLOOR_MIB = 512
"""The estimate until larger contexts were seen."""
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
    """Estimates by the device's name, MiB. Each kernel counts once, with the largest size that was seen of it."""

    def __init__(self, seen: Mapping[str, Mapping[str, ContextSize]] | None = None) -> None:
        self._seen = {
            name: dict(sizes) for name, sizes in (seen or {}).items()
        }  # by device and kernel, the last ones last

    def saw(self, device_name: str, kernel: str, size: ContextSize, cap_mib: int) -> bool:
        """Take in a kernel's size; return whether the estimate for its user has changed."""
        if not 0 <= size.mib <= min(MOST_MIB, cap_mib * 3 // 4):
            return False
        before = self.estimate_mib(device_name, size.uid)
        sizes = self._seen.pop(device_name, {})
        self._seen[device_name] = sizes  # the last device is the last one
        earlier = sizes.pop(kernel, size)
        sizes[kernel] = ContextSize(size.uid, max(size.mib, earlier.mib))
        while len(sizes) > KERNELS:
            del sizes[next(iter(sizes))]
        while len(self._seen) > _DEVICES:
            del self._seen[next(iter(self._seen))]
        return self.estimate_mib(device_name, size.uid) != before

    def estimate_mib(self, device_name: str, uid: int) -> int:
        """Return what a context takes in a kernel of this user on a device of this name, MiB; at least `FLOOR_MIB`."""
        sizes = list(self._seen.get(device_name, {}).values())
        all_users = sorted(size.mib for size in sizes)
        quartile = all_users[-(-len(all_users) * 3 // 4) - 1] if all_users else 0
        own = max((size.mib for size in sizes if size.uid == uid), default=0)
        return max(FLOOR_MIB, -(-max(quartile, own) // _STEP_MIB) * _STEP_MIB)

    def state(self) -> dict[str, Any]:
        """Return what was learnt, for JSON."""
        devices = {name: [[kernel, *one] for kernel, one in sizes.items()] for name, sizes in self._seen.items()}
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
        for name, sizes in state["devices"].items():
            if not isinstance(sizes, list) or not all(_is_size(one) for one in sizes):
                raise ValueError(f"the context sizes of {name[:80]!r} are not lists of a kernel, a uid and MiB")
            seen[name] = {kernel: ContextSize(uid, mib) for kernel, uid, mib in sizes[-KERNELS:]}
        return ContextSizes(seen)


def _is_size(value: object) -> bool:
    match value:
        case [str(), int(), int(mib)]:
            return 0 <= mib <= MOST_MIB
        case _:
            return False
