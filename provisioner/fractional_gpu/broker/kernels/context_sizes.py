"""Estimates how much memory a CUDA context takes on each kind of device.

A context's size is the memory that the device charges to a kernel's process, less the memory held by the framework's allocator. It includes
the context itself, the modules of cuBLAS, cuDNN and compiled kernels, and NCCL's buffers. It varies between kernels, and allocations that
bypass the allocator add to it. The estimate must be high enough to keep frameworks within their caps, but a few odd kernels, or one user's
kernels, must not raise it for everyone. The estimate is therefore the larger of

- the third quartile of the sizes of all users' last `KERNELS` kernels, and
- the user's own largest size among them.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FLOOR_MIB = 512  # the estimate until larger contexts have been seen
MOST_MIB = 4096
KERNELS = 32
_STEP_MIB = 32  # estimates are multiples of this, so that they seldom change
_DEVICES = 64


class ContextSize(NamedTuple):
    """The size of one kernel's context in MiB, and its user's uid."""

    uid: int
    mib: int


@dataclass(slots=True)
class ContextSizes:
    """Context sizes in MiB, by device name. Each kernel counts once, with its largest size."""

    version: Literal[2] = 2
    seen: dict[str, dict[str, ContextSize]] = field(default_factory=dict)  # by device and kernel, oldest first

    def saw(self, device_name: str, kernel: str, size: ContextSize, cap_mib: int) -> bool:
        """Record the size of a kernel's context. Return whether the estimate for its user has changed."""
        if not 0 <= size.mib <= min(MOST_MIB, cap_mib * 3 // 4):
            return False  # too large to be a context
        before = self.estimate_mib(device_name, size.uid)
        sizes = self.seen[device_name] = self.seen.pop(device_name, {})  # moved to the end
        earlier = sizes.pop(kernel, size)
        sizes[kernel] = ContextSize(size.uid, max(size.mib, earlier.mib))
        if len(sizes) > KERNELS:
            del sizes[next(iter(sizes))]
        if len(self.seen) > _DEVICES:
            del self.seen[next(iter(self.seen))]
        return self.estimate_mib(device_name, size.uid) != before

    def estimate_mib(self, device_name: str, uid: int) -> int:
        """Return the estimated context size for this user and device in MiB, at least `FLOOR_MIB`."""
        sizes = self.seen.get(device_name, {}).values()
        all_users = sorted(size.mib for size in sizes)
        quartile = all_users[-(-len(all_users) * 3 // 4) - 1] if all_users else 0
        own = max((size.mib for size in sizes if size.uid == uid), default=0)
        return min(MOST_MIB, max(FLOOR_MIB, -(-max(quartile, own) // _STEP_MIB) * _STEP_MIB))
