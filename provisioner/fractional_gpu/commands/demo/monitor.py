"""Watches leases while the demonstration runs: tells what happens to them, and adds up how long they were being moved.

`Sampler` is pure: pictures of leases in, sentences out. `Watcher` feeds it from the broker in a thread of its own. A lease says for
how long it has been in its state, so two pictures give the exact duration of a state that both saw the end of.
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

__all__ = ["Sampler", "Watcher"]

INTERVAL_S = 0.05
_MOVING = frozenset({"suspending", "resuming"})


@dataclass(slots=True)
class _Seen:
    state: str
    entered_s: float
    moved_s: float = 0.0


class Sampler:
    """Follows leases through their states. `names` maps kernel ids to what people call them; other leases are ignored."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._seen: dict[str, _Seen] = {}

    def feed(self, now_s: float, leases: Sequence[LeaseStatus]) -> list[str]:
        """Take a picture made at `now_s` (any clock that only goes forward) and return a sentence for each change, oldest first."""
        told: list[tuple[float, str]] = []
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
                told.append((entered_s, f"{self.names[lease.kernel_id]}: {_news(lease)}"))
        return [sentence for _, sentence in sorted(told)]

    def moved_s(self, kernel_id: str) -> float:
        """Return how long the kernel's memory was on the move, seconds, as far as it was seen; moves under way do not count."""
        seen = self._seen.get(kernel_id)
        return seen.moved_s if seen is not None else 0.0


def _news(lease: LeaseStatus) -> str:
    """Return what just happened to a lease."""
    if lease.state == "suspended":
        return f"suspended, {format_memory(lease.saved_mib)} now in host memory"
    return state_words(lease.state)


class Watcher:
    """Asks the broker all the time, in a thread, until the `with` block ends. `tell` gets each sentence, in that thread."""

    def __init__(self, socket: str, sampler: Sampler, tell: Callable[[str], None]) -> None:
        self._socket = socket
        self._sampler = sampler
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-demo-watcher", daemon=True)

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
                for sentence in self._sampler.feed(time.monotonic(), client.status().leases):
                    self._tell(sentence)
        except FractionalGPUError as error:
            self._tell(f"cannot watch any more: {error}")
        finally:
            client.close()
