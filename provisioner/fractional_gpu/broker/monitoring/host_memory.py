"""Is host memory short where saved state lies? Then leases come back early, as far as devices have room.

What was saved from a device lies in the memory of the kernel's own process: it counts against the machine and against every control group
above that process. The arbiter gets two things: the budget of all saved state, which is less than what is saved already when the machine
itself is short, and each suspended lease whose own control group is. A group is read the more rarely the more room it has.
"""

from collections.abc import Callable, Mapping
from typing import Final

from fractional_gpu.host.memory import Headroom, LimitReader, system_headroom

__all__ = ["KEPT_FREE_PARTS", "HostBudget", "HostMemoryPressure"]

KEPT_FREE_PARTS: Final = 50  # 2 % of the machine's memory stay free beside what the headroom keeps already
_KEPT_FREE_LEAST_MIB: Final = 256
# What processes take of the room in their control group within a second, at most and about: one thread alone fills a GiB or two.
_FILLED_MIB_S: Final = 8192.0
_LONGEST_S: Final = 10.0  # until a group is read again, however much room it has


class HostBudget:
    """What saved state may take in all, MiB: the configured budget, and no more than leaves the machine some room."""

    def __init__(self, configured_mib: int, total_mib: int, room: Callable[[], Headroom] = system_headroom) -> None:
        self._configured_mib = configured_mib
        self._kept_free_mib = max(_KEPT_FREE_LEAST_MIB, total_mib // KEPT_FREE_PARTS)
        self._room = room

    def __call__(self, saved_mib: int) -> int:
        """Return the budget now. What it is below `saved_mib` should go back to devices. Raises OSError, ValueError."""
        return max(0, min(self._configured_mib, saved_mib + self._room().mib - self._kept_free_mib))


class HostMemoryPressure:
    """Finds leases whose own control groups have no room left. `room(pid)` returns what one process may still take, for tests."""

    def __init__(
        self, room: Callable[[int], Headroom] | None = None, system: Callable[[], Headroom] = system_headroom
    ) -> None:
        self._room = room
        self._system = system
        self._rooms: dict[str, tuple[int, float]] = {}  # leases not to be read yet: pid, and until when

    def __call__(self, pids: Mapping[str, int], now_s: float) -> set[str]:
        """Return those of the leases (with their kernels' pids) that are pressed.

        Where the machine as a whole has no room, no group is to blame. Raises OSError, ValueError for a machine that cannot be read.
        """
        if not pids or self._system().mib == 0:
            return set()
        self._rooms = {
            lease_id: known
            for lease_id, known in self._rooms.items()
            if pids.get(lease_id) == known[0] and now_s < known[1]
        }
        room = self._room or LimitReader().headroom  # most kernels share a control group, which is read once
        pressed = set()
        for lease_id, pid in pids.items():
            if lease_id in self._rooms:
                continue
            try:
                left_mib = room(pid).mib
            except (OSError, ValueError):
                continue  # it ended, or its groups cannot be read: that makes a suspend refuse, and is no pressure
            if left_mib == 0:
                pressed.add(lease_id)
            self._rooms[lease_id] = pid, now_s + min(_LONGEST_S, left_mib / _FILLED_MIB_S)
        return pressed
