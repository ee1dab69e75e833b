"""What the hub's own `/hub/metrics` says of GPUs: spawns by what became of them, and how long servers waited for a seat.

JupyterHub shows whatever is in the global registry of prometheus_client, so these are there as soon as a spawner is imported. One process
has them once, however often this module is imported or reloaded. Labels are never users or servers: pools are those that gave a seat, and
a reason is a code of the broker's or of ours; of more than 64 different ones the rest are `other`.
"""

from typing import TypeVar

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.registry import Collector
from tornado import web

__all__ = ["HUB_METRICS", "SEAT_WAIT", "SPAWNS", "spawn_ended", "spawn_failed"]

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
    """Return what is registered under the name already; prometheus_client has no public way to ask."""
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
    """Count a spawn that an error ended: `refused` for one that says why to the user, else `failed` by the error's class."""
    if isinstance(error, web.HTTPError):
        spawn_ended("refused", str(getattr(error, "reason", "") or "unknown"))
    else:
        spawn_ended("failed", type(error).__name__)
