"""Prometheus metrics. Every event handled by the arbiter and every effect it returns passes through here.

- `COUNTED` lists the metrics counted here, and `metrics_routes.BOOK_METRICS` lists those read from the arbiter's state at each scrape.
  docs/metrics.md is generated from these two lists.
- Labels come from the configuration and from fixed sets in the code, not from users, leases, kernels or paths. The exceptions are metrics
  labelled with user names, which are in `full_registry` only (`accounting.counters`).
- Counters whose labels are known in advance start at 0, because Prometheus sees no increase in a counter that first appears as 1.
- A wait is measured from the first request to the grant. It is recorded as 0 s for a kernel that is already on its device.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import (
    CapBreached,
    Declined,
    Effect,
    Granted,
    LeaseAdmitted,
    LeaseEnded,
    LeaseRefused,
    Resume,
    StateChanged,
    Suspend,
)
from fractional_gpu.core.events import (
    Event,
    PoolConfigured,
    ProcessExited,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.model import Breach, LeaseState

PREFIX = "jupyter_gpu_"
_MIB = 2**20
_LAG_INTERVAL_S = 2.0
_WAITS_S = (0.0, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_SWAPS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_WRITES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LAGS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_NOT_SAVED = tuple(one for one in SuspendOutcome if one is not SuspendOutcome.SAVED)
_NOT_RESTORED = tuple(one for one in ResumeOutcome if one is not ResumeOutcome.RESTORED)
_SWAP_FAILURES = {"suspend": _NOT_SAVED, "resume": _NOT_RESTORED, "move": _NOT_RESTORED}


@dataclass(frozen=True, slots=True)
class Metric:
    kind: str  # counter, gauge or histogram
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


COUNTED = (
    Metric("counter", "leases_admitted", "Leases granted", ("pool",)),
    Metric("counter", "leases_refused", "Leases refused", ("reason",)),
    Metric("counter", "leases_ended", "Leases that ended; `evicted`: an administrator ended them", ("reason",)),
    Metric("counter", "grants", "Times a kernel got its GPU", ("pool",)),
    Metric("counter", "declined", "Requests about leases that were declined", ("about", "reason")),
    Metric("histogram", "wait_seconds", "Time from the request for the GPU to the grant", ("pool",), _WAITS_S),
    Metric("counter", "waits_over_target", "Waits longer than the pool's wait_target", ("pool",)),
    Metric("counter", "waits_abandoned", "Waits given up before the grant", ("pool",)),
    Metric("histogram", "swap_seconds", "Duration of suspends, resumes and moves", ("kind",), _SWAPS_S),
    Metric("counter", "swap_bytes", "Device memory moved by suspends, resumes and moves", ("kind",)),
    Metric("counter", "swap_failures", "Suspends, resumes and moves that failed", ("kind", "outcome")),
    Metric("counter", "preemptions", "Busy kernels suspended to make room for others", ("pool",)),
    Metric("counter", "quarantines", "Times the state of a kernel's GPU memory became unknown", ("pool",)),
    Metric("counter", "cap_breaches", "Times a kernel exceeded its memory cap", ("action",)),
    Metric("histogram", "ledger_write_seconds", "Duration of the ledger's transactions", (), _WRITES_S),
    Metric("histogram", "loop_lag_seconds", "Delay of the broker's event loop", (), _LAGS_S),
)  # fmt: skip


class Metrics:
    """One broker's counters, for use on its event loop.

    Any peer may read `registry`. `full_registry` is served only to administrators and on the TCP address.
    """

    def __init__(self, arbiter: Arbiter) -> None:
        self.registry = CollectorRegistry()
        self.full_registry = CollectorRegistry()
        self.full_registry.register(self.registry)
        # Returns the pool's current target, if it has one.
        self.wait_target_ms: Callable[[str], int | None] = lambda _pool: None
        self._arbiter = arbiter
        self._metrics: dict[str, Any] = {metric.name: self._create(metric) for metric in COUNTED}
        self._pools: dict[str, str] = {}  # by lease
        self._wanted_s: dict[str, float] = {}  # by lease: when the wait began
        self._swaps: dict[int, tuple[float, str, int]] = {}  # by operation: when the swap began, its kind, and MiB
        self._effects: dict[type[Effect], Callable[[Any, float], None]] = {
            LeaseAdmitted: lambda effect, _: self._count("leases_admitted", pool=self._pool_of(effect.lease_id)),
            LeaseRefused: lambda effect, _: self._count("leases_refused", reason=effect.reason),
            LeaseEnded: self._ended,
            Granted: self._granted,
            Declined: lambda effect, _: self._count("declined", about=effect.about or "suspend", reason=effect.reason),
            Suspend: self._suspend_began,
            Resume: self._resume_began,
            StateChanged: self._state_changed,
            CapBreached: lambda effect, _: self._count("cap_breaches", action=effect.action.value),
        }
        for kind, failures in _SWAP_FAILURES.items():
            self._of("swap_seconds", kind=kind)
            self._of("swap_bytes", kind=kind)
            for outcome in failures:
                self._of("swap_failures", kind=kind, outcome=str(outcome))
        for action in Breach:
            self._of("cap_breaches", action=action.value)

    def saw(self, event: Event, effects: Sequence[Effect]) -> None:
        """Count an event and its effects. This costs one dictionary lookup for each."""
        now_s = time.monotonic()
        match event:
            case Wanted(lease_id=lease_id):
                self._wanted_s.setdefault(lease_id, now_s)
            case Unwanted(lease_id=lease_id) | ProcessExited(lease_id=lease_id):
                self._abandoned(lease_id)
            case SuspendFinished():
                self._finished(event, event.outcome is SuspendOutcome.SAVED, event.saved_mib, now_s)
            case ResumeFinished():
                self._finished(event, event.outcome is ResumeOutcome.RESTORED, None, now_s)
            case PoolConfigured(pool=pool):
                for metric in COUNTED:
                    if metric.labels == ("pool",):
                        self._of(metric.name, pool=pool.name)
            case _:
                pass
        for effect in effects:
            if (count := self._effects.get(type(effect))) is not None:
                count(effect, now_s)

    def wrote(self, took_s: float) -> None:
        self._metrics["ledger_write_seconds"].observe(took_s)

    async def watch_loop(self) -> None:
        while True:
            due_s = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._metrics["loop_lag_seconds"].observe(max(0.0, time.monotonic() - due_s))

    def _create(self, metric: Metric) -> Counter | Histogram:
        name = PREFIX + metric.name
        if metric.kind == "counter":
            return Counter(name, metric.help, metric.labels, registry=self.registry)
        return Histogram(name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)

    def _of(self, metric: str, **labels: str) -> Any:  # noqa: ANN401 - a Counter or a Histogram
        return self._metrics[metric].labels(**labels)

    def _count(self, metric: str, amount: float = 1.0, **labels: str) -> None:
        self._of(metric, **labels).inc(amount)

    def _pool_of(self, lease_id: str) -> str:
        pool = self._pools.get(lease_id)
        if pool is None:  # a new lease, or an earlier broker's
            view = self._arbiter.lease(lease_id)
            pool = self._pools[lease_id] = view.spec.pool if view is not None else ""
        return pool

    def _ended(self, effect: LeaseEnded, _now_s: float) -> None:
        self._count("leases_ended", reason=effect.reason)
        self._abandoned(effect.lease_id)
        self._pools.pop(effect.lease_id, None)

    def _granted(self, effect: Granted, now_s: float) -> None:
        pool = self._pool_of(effect.lease_id)
        self._count("grants", pool=pool)
        since_s = self._wanted_s.pop(effect.lease_id, None)
        if since_s is not None:
            waited_s, target_ms = now_s - since_s, self.wait_target_ms(pool)
            self._of("wait_seconds", pool=pool).observe(waited_s)
            if target_ms is not None and waited_s * 1000 > target_ms:
                self._count("waits_over_target", pool=pool)

    def _abandoned(self, lease_id: str) -> None:
        if self._wanted_s.pop(lease_id, None) is not None:
            self._count("waits_abandoned", pool=self._pool_of(lease_id))

    def _suspend_began(self, effect: Suspend, now_s: float) -> None:
        self._swaps[effect.operation_id] = (now_s, "suspend", 0)
        if effect.preempt:
            self._count("preemptions", pool=self._pool_of(effect.lease_id))

    def _resume_began(self, effect: Resume, now_s: float) -> None:
        moved = bool(effect.from_device_ids) and effect.from_device_ids[0] != effect.device_id
        view = self._arbiter.lease(effect.lease_id)
        self._swaps[effect.operation_id] = (now_s, "move" if moved else "resume", view.saved_mib if view else 0)

    def _finished(
        self, event: SuspendFinished | ResumeFinished, well: bool, saved_mib: int | None, now_s: float
    ) -> None:
        begun_s, kind, mib = self._swaps.pop(event.operation_id, (now_s, "", 0))
        if not kind:
            return  # an earlier broker began this operation
        if not well:
            self._count("swap_failures", kind=kind, outcome=str(event.outcome))
            return
        self._of("swap_seconds", kind=kind).observe(now_s - begun_s)
        self._count("swap_bytes", (mib if saved_mib is None else saved_mib) * _MIB, kind=kind)

    def _state_changed(self, effect: StateChanged, _now_s: float) -> None:
        if effect.new is LeaseState.QUARANTINED:
            self._count("quarantines", pool=self._pool_of(effect.lease_id))
