"""Follows leases while the demonstration runs: prints each change of state, and adds up how long their memory was on the move.

`LeaseTracker` is pure: statuses of leases in, sentences out. `LeaseMonitor` feeds it from the broker in a thread of its own. A status says
for how long a lease has been in its state, so the begin of each state is exact although the broker is polled.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.core.units import format_memory
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import LeaseStatus
from fractional_gpu.protocol.states import state_words

__all__ = ["LeaseMonitor", "LeaseTracker"]

INTERVAL_S = 0.05
_MOVING = frozenset({"suspending", "resuming"})


@dataclass(slots=True)
class _Seen:
    state: str
    entered_s: float
    moved_s: float = 0.0


class LeaseTracker:
    """Follows leases through their states. `names` maps kernel ids to names for people; other leases are ignored."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._seen: dict[str, _Seen] = {}

    def feed(self, now_s: float, leases: Sequence[LeaseStatus]) -> list[str]:
        """Take the leases at `now_s` (of any monotonic clock) and return a sentence for each change, oldest first."""
        changes: list[tuple[float, str]] = []
        for lease in leases:
            if lease.kernel_id not in self.names:
                continue
            entered_s = now_s - lease.age_ms / 1000
            seen = self._seen.get(lease.kernel_id)
            if seen is None:
                self._seen[lease.kernel_id] = _Seen(lease.state, entered_s)
            elif seen.state != lease.state:
                if seen.state in _MOVING:
                    seen.moved_s += max(0.0, entered_s - seen.entered_s)
                seen.state, seen.entered_s = lease.state, entered_s
                changes.append((entered_s, f"{self.names[lease.kernel_id]}: {_news(lease)}"))
        return [sentence for _, sentence in sorted(changes)]

    def moved_s(self, kernel_id: str) -> float:
        """Return how long the kernel's memory was on the move, seconds, as far as it was seen; a move that is under way does not count."""
        seen = self._seen.get(kernel_id)
        return seen.moved_s if seen is not None else 0.0


def _news(lease: LeaseStatus) -> str:
    """Return what just happened to a lease."""
    if lease.state == "suspended":
        return f"suspended, {format_memory(lease.saved_mib)} now in host memory"
    return state_words(lease.state)


class LeaseMonitor:
    """Polls the broker in a thread until the `with` block ends. `tell` gets each sentence, in that thread."""

    def __init__(self, socket: str, tracker: LeaseTracker, tell: Callable[[str], None]) -> None:
        self._socket = socket
        self._tracker = tracker
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-demo-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        client = BrokerClient(self._socket)
        try:
            while not self._over.wait(INTERVAL_S):
                for sentence in self._tracker.feed(time.monotonic(), client.status().leases):
                    self._tell(sentence)
        except FractionalGPUError as error:
            self._tell(f"cannot watch any more: {error}")
        finally:
            client.close()
