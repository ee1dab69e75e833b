"""After a warning, ends kernels that have been idle for a long time or whose saved state fills host memory (`c.GPUBroker.cull_...`).

When this is configured, Jupyter servers hide kernels with GPU state from idle cullers, which don't know what it costs to keep a kernel. A
kernel is kept if its user uses, resumes or pins it after the warning.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.core.model import LeaseState, LeaseView
from fractional_gpu.core.units import format_duration
from fractional_gpu.protocol.errors import ConflictError

log = logging.getLogger(__name__)

_LONGEST_PERIOD_S = 30.0

End = Callable[[Kernel, str], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CullRule:
    """A rule for ending kernels: after `after_ms` without use, or if saved state exceeds `above_percent` of the host memory allowed for it.

    Set `after_ms` to None to turn off the first condition, and `above_percent` to 100 to turn off the second.
    """

    after_ms: int | None
    above_percent: int
    warning_ms: int


def to_cull(views: Iterable[LeaseView], at_ms: int, budget_mib: int, rule: CullRule) -> dict[str, str]:
    """Return the leases whose kernels should be ended, with the reason for each. Those idle for longest come first."""
    found: dict[str, str] = {}
    holders = [view for view in views if view.state in (LeaseState.SUSPENDED, LeaseState.RESIDENT)]
    kept_mib = sum(view.saved_mib for view in holders)
    for view in sorted(holders, key=lambda one: (one.last_active_ms, one.spec.lease_id)):
        idle_ms = at_ms - view.last_active_ms
        is_old = rule.after_ms is not None and idle_ms >= rule.after_ms
        is_scarce = view.saved_mib > 0 and 100 * kept_mib > rule.above_percent * budget_mib
        if view.busy or view.spec.claim_ms or view.pinned_until_ms > at_ms or not (is_old or is_scarce):
            continue
        kept_mib -= view.saved_mib
        scarce = (
            ""
            if is_old
            else f", and suspended kernels fill over {rule.above_percent} % of the host memory allowed for them"
        )
        found[view.spec.lease_id] = f"it has been idle for {format_duration(idle_ms)}{scarce}"
    return found


class Culler:
    """Ends kernels that match `rule`. `end` ends a kernel and its lease, and tells the replacement kernel why."""

    def __init__(self, broker: Broker, rule: CullRule, end: End) -> None:
        self._broker = broker
        self._rule = rule
        self._end = end
        self._warned_ms: dict[str, int] = {}  # by lease

    async def run(self) -> None:
        period_s = min(_LONGEST_PERIOD_S, max(1.0, self._rule.warning_ms / 4_000))
        while True:
            if not await self.look():
                await asyncio.sleep(period_s)

    async def look(self) -> bool:
        """Warn users whose kernels will be ended. End the first kernel whose warning period is over, and return whether there was one.

        Only one kernel is ended per call, because the others may have been used in the meantime. Processes that have already been signalled
        still exit if this call is cancelled.
        """
        broker = self._broker
        views = [view for kernel, view in broker.views() if not kernel.busy and not kernel.launch.command]
        due = to_cull(views, now_ms(), broker.arbiter.host_budget_mib, self._rule)
        for lease_id in self._warned_ms.keys() - due.keys():
            del self._warned_ms[lease_id]
            if lease_id in broker.kernels:
                self._announce(broker.kernels[lease_id], "")
        for lease_id, why in due.items():
            kernel, is_new = broker.kernels[lease_id], lease_id not in self._warned_ms
            left_ms = self._warned_ms.setdefault(lease_id, now_ms()) + self._rule.warning_ms - now_ms()
            if left_ms > 0 or is_new:
                soon = f"will be ended in {format_duration(max(0, left_ms))}: {why}; run a cell to keep its variables"
                self._announce(kernel, f"this kernel {soon}")
                if is_new:
                    broker.record_line(lease_id, "cull.warned", f"this kernel {soon}")
                    broker.announce_deadline(kernel, f"This kernel {soon}.")
                continue
            log.warning("lease %s: ended, because %s", lease_id[:8], why)
            try:
                await self._end(kernel, f", because {why}")
            except ConflictError as error:
                log.warning("lease %s: %s", lease_id[:8], error)
                continue
            return True
        return False

    def _announce(self, kernel: Kernel, sentence: str) -> None:
        if kernel.ending.announced != sentence:
            kernel.ending.announced = sentence
            self._broker.note_change()
