"""What the line of a waiting cell says: why, the place in the queue, how long it may still take, and what happens next."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractional_gpu.protocol.messages import LeaseStatus, Progress

__all__ = ["WaitLine", "resizing", "rough"]

_NEXT = {
    "wait.restoring": "The cell runs as soon as they are there",
    "wait.own-suspend": "Then the cell runs",
    "wait.making-room": "Then this kernel gets the room and the cell runs",
    "wait.busy-neighbour": "When that is over, its memory is saved to the host and this kernel gets the room",
    "wait.swap-channel": "Then it is this kernel's turn",
    "wait.user-limit": "It goes on when another kernel of yours gives its share back",
    "wait.group-limit": "It goes on when another kernel of your group gives its share back",
    "wait.preempted": "It goes on when it is this kernel's turn again",
    "broker-silent": "The cell goes on by itself when the broker answers again",
    "wait.device-draining": "It goes on when the administrator lets kernels onto the device again",
}


def rough(ms: int) -> str:
    """Return a duration as people say it: nobody's forecast is as exact as `format_duration`, and a line should change rarely."""
    seconds = max(0, ms) / 1000
    if seconds < 1:
        return "under 1 s"
    if seconds < 10:
        return f"{seconds:.0f} s"
    if seconds < 57.5:
        return f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{max(1, minutes)} min"
    hours, minutes = divmod(round(seconds / 600) * 10, 60)
    return f"{hours} h" + (f" {minutes} min" if minutes else "")


class WaitLine:
    """One wait. `begun_s` and the times given to `text` are `time.monotonic`'s."""

    def __init__(self, begun_s: float) -> None:
        self._begun_s = begun_s
        self._told: Progress | None = None
        self._told_s = begun_s

    def tell(self, progress: "Progress") -> None:
        """Take what the broker says now."""
        self._told, self._told_s = progress, time.monotonic()

    def text(self, now_s: float) -> str:
        """Return what the line says at this moment; "" while the broker has said nothing."""
        told = self._told
        if told is None:
            return ""
        facts = [f"place {told.position} in the queue"] if told.position is not None else []
        facts.append(
            _left(told.expected_ms, told.low_ms, told.high_ms, int((now_s - self._told_s) * 1000))
            or _so_far(now_s - self._begun_s)
        )
        about = "; ".join(fact for fact in facts if fact)
        why = (told.sentence or "the GPU is in use").rstrip(".")
        sentences = [
            f"This cell waits for the GPU{f' ({about})' if about else ''}: {why}",
            _NEXT.get(told.reason, ""),
            "Interrupt the kernel to stop waiting",
        ]
        return ". ".join(sentence for sentence in sentences if sentence) + "."


def resizing(status: "LeaseStatus") -> str:
    """Return what the line says while a larger share is waited for."""
    left = _left(status.expected_ms, status.low_ms, status.high_ms, 0)
    place = f"place {status.position} in the queue" if status.position is not None else ""
    about = "; ".join(fact for fact in (place, left) if fact)
    why = f": {status.sentence.rstrip('.')}" if status.position is not None and status.sentence else ""
    return (
        f"This kernel waits for its new share{f' ({about})' if about else ''}{why}. "
        "Idle neighbours step aside. Interrupt the kernel to stop waiting."
    )


def _left(expected_ms: int | None, low_ms: int | None, high_ms: int | None, passed_ms: int) -> str:
    if expected_ms is None:
        return ""
    if expected_ms <= passed_ms:
        late = "longer than expected"
        left_ms = 0 if high_ms is None else high_ms - passed_ms
        return f"{late}, likely up to {rough(left_ms)} more" if left_ms >= 1000 else late
    about = rough(expected_ms - passed_ms)
    text = f"{'' if about.startswith('under') else 'about '}{about} more"
    if low_ms is None or high_ms is None:
        return text
    low, high = rough(low_ms - passed_ms), rough(high_ms - passed_ms)
    return text if low == high else f"{text}, likely {low} to {high}"


def _so_far(seconds: float) -> str:
    return f"{rough(int(seconds * 1000))} so far" if seconds >= 10 else ""
