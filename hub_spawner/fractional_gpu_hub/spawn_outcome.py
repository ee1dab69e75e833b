"""What a hub shows of a spawn: the error that stopped it, the progress of the start, and the metrics.

An error has a reason for the hub's metrics, a sentence for its API, and HTML for the page, in JupyterHub 5 and 6.

Metrics are on the hub's own `/hub/metrics`: spawns by their outcome, and how long servers waited for a seat. JupyterHub shows everything
in the global registry of prometheus_client, so they are there as soon as a spawner is imported, and once in a process, however often this
module is imported or reloaded. Labels are never users or servers: pools are those that gave a seat, and a reason is a code of the
broker's or of this package; of more than 64 different ones the rest are `other`.
"""

import asyncio
from collections.abc import AsyncGenerator
from html import escape
from typing import Any, TypeVar

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.registry import Collector
from tornado import web

from fractional_gpu.protocol.errors import FractionalGPUError

try:
    from jupyterhub.spawner import SpawnException
except ImportError:  # JupyterHub 5
    SpawnException = None

_STATUS = {
    "pool-group": 403,
    "user-limit": 403,
    "group-limit": 403,
    "pool-closed": 503,
    "pool-full": 503,
    "seat-queue": 503,
    "no-device": 503,
    "broker": 503,
}


class _SpawnError(web.HTTPError):
    """For JupyterHub 5, whose spawn page shows the exception's text."""

    def __str__(self) -> str:
        return str(getattr(self, "jupyterhub_message", super().__str__()))


def spawn_error(sentence: str, *, reason: str, hint: str = "") -> web.HTTPError:
    """Return the error that stops a spawn. `hint` is shown on the page only."""
    status = _STATUS.get(reason, 400)
    text = f"{_capital(sentence)}." + (f" {hint}" if hint else "")
    html = f"<strong>Your server was not started.</strong> {escape(text)}"
    if SpawnException is not None:
        error: web.HTTPError = SpawnException(sentence, reason=reason, message_html=html, status_code=status)
    else:
        error = _SpawnError(status, "%s", sentence, reason=reason)
    # The page shows these in either version; without them it shows the exception's own text.
    error.jupyterhub_message = f"Your server was not started. {text}"  # type: ignore[attr-defined]
    error.jupyterhub_html_message = html  # type: ignore[attr-defined]
    return error


def spawn_error_of(error: FractionalGPUError) -> web.HTTPError:
    """Return the error that stops a spawn because of the broker's answer, or because it gave none."""
    reason = "broker" if error.status >= 500 else error.reason
    return spawn_error(str(error), reason=reason)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:].rstrip(".")


class ProgressLog:
    """Progress events of one start after the other; any number of viewers follow them, each from the beginning of a start.

    Viewers may come at any time: before a start has begun, and after its end.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._closed = False
        self._begun = 0
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """The number of events."""
        return len(self._events)

    def add(self, progress: int, message: str) -> None:
        """Add an event; `progress` is out of 100."""
        self._events.append({"progress": progress, "message": message})
        self._wake()

    def begin(self) -> None:
        """Another start begins: viewers of it see its events only."""
        self._events = []
        self._closed = False
        self._begun += 1
        self._wake()

    def close(self) -> None:
        """The start has ended: there are no more events."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield every event of the present start, until there are no more. Cancellation ends this viewer only."""
        sent, begun = 0, self._begun
        while True:
            changed = self._changed
            if begun != self._begun:
                sent, begun = 0, self._begun
            while sent < len(self._events):
                sent += 1
                yield self._events[sent - 1]
            if self._closed:
                return
            await changed.wait()


_MOST_REASONS = 64
_WAITS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_M = TypeVar("_M", bound=Collector)
HUB_METRICS = (
    (
        "counter",
        "jupyter_gpu_hub_spawns_total",
        ("outcome", "reason"),
        "Servers that were asked for: `gpu` and `without` were started, `refused` and `failed` were not (with the reason's code)",
    ),
    (
        "histogram",
        "jupyter_gpu_hub_seat_wait_seconds",
        ("pool",),
        "From the wish for a seat to the seat, of servers that got one",
    ),
)
"""Kind, name, labels and help of each, for docs/metrics.md."""


def _registered(kind: type[_M], name: str) -> _M | None:
    """Return what is registered under the name already; prometheus_client has no public way to find it."""
    known = REGISTRY._names_to_collectors.get(name)  # noqa: SLF001
    return known if isinstance(known, kind) else None


def _spawns() -> Counter:
    _, name, labels, text = HUB_METRICS[0]
    return _registered(Counter, name) or Counter(name, text, labels)


def _seat_wait() -> Histogram:
    _, name, labels, text = HUB_METRICS[1]
    return _registered(Histogram, name) or Histogram(name, text, labels, buckets=_WAITS_S)


SPAWNS = _spawns()
SEAT_WAIT = _seat_wait()
_reasons: set[str] = set()


def spawn_ended(outcome: str, reason: str = "") -> None:
    """Count a spawn."""
    if reason not in _reasons:
        if len(_reasons) >= _MOST_REASONS:
            reason = "other"
        else:
            _reasons.add(reason)
    SPAWNS.labels(outcome=outcome, reason=reason).inc()


def spawn_failed(error: BaseException) -> None:
    """Count a spawn that an error ended: `refused` for an error with a sentence for the user, else `failed` with the error's class."""
    if isinstance(error, web.HTTPError):
        spawn_ended("refused", str(getattr(error, "reason", "") or "unknown"))
    else:
        spawn_ended("failed", type(error).__name__)
