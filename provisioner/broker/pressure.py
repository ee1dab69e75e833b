"""Is host memory short where saved state lies? Then leases come back early, as far as devices have room.

What was saved from a device lies in the memory of the kernel's own process: it counts against the machine and against every control group
above that process. Two things are told to the arbiter: the budget of all saved state, which is less than what is saved already when the
machine itself is short, and each suspended lease whose own control group is.
"""

from collections.abc import Callable, Mapping
from typing import Final

from provisioner.host.memory import Headroom, Look, system_headroom

__all__ = ["KEPT_FREE_PARTS", "HostBudget", "pressed_leases"]

KEPT_FREE_PARTS: Final = 50  # 2 % of the machine's memory stay free beside what the headroom keeps already
_KEPT_FREE_LEAST_MIB: Final = 256


class HostBudget:
    """What saved state may take in all, MiB: the configured budget, and no more than leaves the machine some room."""

    def __init__(self, configured_mib: int, total_mib: int, room: Callable[[], Headroom] = system_headroom) -> None:
        self._configured_mib = configured_mib
        self._kept_free_mib = max(_KEPT_FREE_LEAST_MIB, total_mib // KEPT_FREE_PARTS)
        self._room = room

    def __call__(self, saved_mib: int) -> int:
        """Return the budget now; less than `saved_mib` means that so much should go back to devices. Raises OSError, ValueError."""
        return max(0, min(self._configured_mib, saved_mib + self._room().mib - self._kept_free_mib))


def pressed_leases(
    pids: Mapping[str, int],
    room: Callable[[int], Headroom] | None = None,
    system: Callable[[], Headroom] = system_headroom,
) -> set[str]:
    """Return those of the leases (with their kernels' pids) whose own control groups have no room left.

    Where the machine as a whole has none, nobody's group is to blame. Raises OSError, ValueError for a machine that cannot be read.
    """
    if not pids or system().mib == 0:
        return set()
    room = room or Look().headroom  # most kernels share a control group, which is read once
    pressed = set()
    for lease_id, pid in pids.items():
        try:
            if room(pid).mib == 0:
                pressed.add(lease_id)
        except (OSError, ValueError):
            continue  # it ended, or its groups cannot be read: a suspend would be refused for that, this is no pressure
    return pressed
