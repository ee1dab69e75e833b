"""Limits kernels to their server's seat, and records each user's daily use of each pool.

A lease request names a seat and includes its token. Kernels that use a pod's seat need no token, because their control group identifies
them. A kernel gets its owner, group and weight from its seat, and its priority can't exceed the seat's. A seat's kernels share its fraction
and memory, and each seat has a maximum number of kernels.
"""

import asyncio
import hmac
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.clock import CLOCKS, Clocks
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.seats.offers import HISTORY_DAYS, LAST_SEATS, PoolForecasts
from fractional_gpu.broker.seats.rules import SeatUsage, check_seat_usage, total_usage
from fractional_gpu.broker.seats.workloads import Workloads
from fractional_gpu.core.model import LeaseSpec, LeaseState, LeaseView
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import SeatRecord, UsageRecord
from fractional_gpu.protocol.errors import ForbiddenError, NoRoomError, UnauthorizedError
from fractional_gpu.protocol.messages import LeaseRequest

log = logging.getLogger(__name__)


class SeatDraws:
    """Checks lease requests against `seats`, which maps ids to current seats. If `required` is set, no kernel can start without a seat."""

    def __init__(
        self, broker: Broker, seats: Mapping[str, SeatRecord], workloads: Workloads, *, required: bool
    ) -> None:
        self._broker = broker
        self._seats = seats
        self._workloads = workloads
        self._required = required

    def apply_terms(self, peer: Peer, request: LeaseRequest, spec: LeaseSpec) -> LeaseSpec:
        """Return the lease with its seat's terms applied, or the same lease if it needs no seat. Log any refusal before raising it."""
        try:
            return self._apply_terms(peer, request, spec)
        except (ForbiddenError, UnauthorizedError, NoRoomError) as error:
            seat = self._seats.get(request.seat)
            log.warning(
                "uid %d (seat of %r) got no kernel: %s (%s)",
                peer.credentials.uid,
                seat.owner if seat else None,
                error,
                error.reason,
            )
            raise

    def _apply_terms(self, peer: Peer, request: LeaseRequest, spec: LeaseSpec) -> LeaseSpec:
        if not request.seat and (of_pod := self._workloads.of_pod(peer.credentials.pid)) is not None:
            return self._drawn(peer, request, spec, of_pod)
        if not request.seat:
            if self._required:
                raise ForbiddenError(
                    "only servers that the hub started with a GPU can use one, and this kernel has no seat; "
                    "choose a GPU when you start your server, and leave JUPYTER_GPU_SEAT_FILE as the hub set it",
                    reason="no-seat",
                )
            return spec
        seat = self._seats.get(request.seat)
        if seat is None or peer.token is None or not hmac.compare_digest(token_digest(peer.token), seat.token_sha256):
            raise UnauthorizedError(
                "this server's seat has ended, or the token does not match it; save your work, then stop the server on the "
                "hub's page and start it again (this ends its kernels)",
                reason="foreign-seat",
            )
        return self._drawn(peer, request, spec, seat)

    def _drawn(self, peer: Peer, request: LeaseRequest, spec: LeaseSpec, seat: SeatRecord) -> LeaseSpec:
        if seat.uid is not None and peer.credentials.uid not in {seat.uid, 0}:
            raise ForbiddenError("this seat belongs to another user of the machine", reason="wrong-uid")
        self._workloads.check(seat, peer.credentials.pid, "the requesting process")
        asked = SeatUsage(fraction_milli=spec.fraction_milli * spec.devices, memory_mib=spec.reserve_mib * spec.devices)
        check_seat_usage(
            seat, spec.pool, request.priority, asked, self.seat_usage(seat.seat_id), earlier=self._earlier(seat)
        )
        return replace(
            spec,
            seat=seat.seat_id,
            allowed_devices=seat.allowed_devices,
            owner=seat.owner,
            uid=None,
            group=seat.group,
            priority=min(spec.priority, seat.priority) if request.priority else seat.priority,
            owner_weight=seat.weight,
        )

    def check_process(self, view: LeaseView, pid: int) -> None:
        if (seat := self._seats.get(view.spec.seat)) is not None:
            self._workloads.check(seat, pid, f"process {pid}")

    def check_resize(self, kernel: Kernel, fraction_milli: int, reserve_mib: int) -> None:
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None or not view.spec.seat:
            return
        spec, seat = view.spec, self._seats.get(view.spec.seat)
        if seat is None:
            raise ForbiddenError("this kernel's seat has ended, so the kernel cannot be resized", reason="no-seat")
        asked = SeatUsage(fraction_milli=fraction_milli * spec.devices, memory_mib=reserve_mib * spec.devices)
        held = self.seat_usage(seat.seat_id, but=spec.lease_id)
        check_seat_usage(seat, spec.pool, spec.priority, asked, held, earlier=self._earlier(seat, but=spec.lease_id))
        kernel.requests.seat_size = (asked.fraction_milli, asked.memory_mib)

    def check_takeover(self, seat: SeatRecord, kernel: Kernel, view: LeaseView) -> None:
        spec = view.spec
        if (seat.uid is not None and kernel.uid not in {seat.uid, 0}) or spec.group != seat.group:
            raise ForbiddenError("the seat belongs to another user or group than the lease", reason="seat-terms")
        if spec.allowed_devices != seat.allowed_devices:
            raise ForbiddenError("the seat allows different devices from the lease", reason="seat-devices")
        if kernel.identity is not None:
            self._workloads.check(seat, kernel.identity.pid, "its kernel")
        check_seat_usage(seat, spec.pool, spec.priority, self.lease_usage(kernel, spec), self.seat_usage(seat.seat_id))

    def of_token(self, token: str | None) -> str | None:
        if token is None:
            return None
        digest = token_digest(token)
        for seat in self._seats.values():
            if hmac.compare_digest(digest, seat.token_sha256):
                return seat.seat_id
        for kernel, view in self._broker.views():
            if view.spec.seat and hmac.compare_digest(digest, kernel.token_sha256):
                return view.spec.seat
        return None

    def owner_of(self, seat_id: str | None) -> str:
        seat = self._seats.get(seat_id or "")
        return seat.owner if seat is not None else ""

    def opens(self, token: str, view: LeaseView) -> bool:
        seat_id = self.of_token(token)
        own = view.revoked and self.owner_of(seat_id) == view.spec.owner
        return bool(view.spec.seat) and (seat_id == view.spec.seat or own)

    def predates(self, kernel: Kernel, view: LeaseView) -> bool:
        """Return whether the kernel was started by an earlier server rather than by the one that holds the seat now."""
        return view.revoked or (kernel.taken_over and view.spec.seat in self._seats)

    def _earlier(self, seat: SeatRecord, *, but: str = "") -> list[str]:
        """Return the ids of the seat's leases left by earlier servers. Errors list them, because the current server doesn't show them."""
        return [
            kernel.lease_id
            for kernel, view in self._broker.views()
            if view.spec.seat == seat.seat_id and kernel.lease_id != but and self.predates(kernel, view)
        ]

    def seat_usage(self, seat_id: str, *, but: str = "") -> SeatUsage:
        return total_usage(
            self.lease_usage(kernel, view.spec)
            for kernel, view in self._broker.views()
            if view.spec.seat == seat_id and view.spec.lease_id != but
        )

    @staticmethod
    def lease_usage(kernel: Kernel, spec: LeaseSpec) -> SeatUsage:
        milli, mib = kernel.requests.seat_size if kernel.requests.resize is not None else (0, 0)
        return SeatUsage(
            fraction_milli=max(milli, spec.fraction_milli * spec.devices),
            memory_mib=max(mib, spec.reserve_mib * spec.devices),
        )


_EVERY_S = 2.0
_LONGEST_STEP_MS = 10_000  # a longer step means that the machine slept
_WRITE_EVERY_MS = 60_000
_DAY_MS = 86_400_000


class UsageRecorder:
    """Samples each user's use of each pool, and adds it to daily totals in the ledger and the forecasts.

    `live_ms` is how long the user had a kernel in the pool, and `busy_ms` is how long at least one of those kernels was busy on a device.
    Memory is summed over busy kernels.
    """

    def __init__(self, broker: Broker, forecasts: PoolForecasts, clocks: Clocks = CLOCKS) -> None:
        self._broker = broker
        self._forecasts = forecasts
        self._clocks = clocks
        self._last_ms = self._written_ms = clocks.now()
        self._unwritten: dict[tuple[str, str, int], UsageRecord] = {}

    def recover(self, ledger: Ledger) -> None:
        self._forecasts.learn(ledger.usage(self._clocks.wall() // _DAY_MS - HISTORY_DAYS))
        for pool in self._broker.arbiter.pools():
            self._forecasts.lasted_ms[pool] = ledger.seat_times_ms(pool, LAST_SEATS)

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(_EVERY_S)
                self.sample()
                if self._clocks.now() - self._written_ms >= _WRITE_EVERY_MS:
                    self.write()
        finally:
            self.sample()
            self.write()

    def sample(self) -> None:
        step_ms = min(max(0, self._clocks.now() - self._last_ms), _LONGEST_STEP_MS)
        self._last_ms = self._clocks.now()
        day = self._clocks.wall() // _DAY_MS
        seen: dict[tuple[str, str], tuple[bool, int]] = {}
        for kernel, view in self._broker.views():
            if kernel.identity is None:
                continue
            key = (view.spec.owner, view.spec.pool)
            busy = view.busy and view.state is LeaseState.RESIDENT
            was_busy, mib = seen.get(key, (False, 0))
            seen[key] = (was_busy or busy, mib + (view.used_mib if busy else 0))
        for (owner, pool), (busy, mib) in seen.items():
            busy_ms = step_ms if busy else 0
            more = UsageRecord(
                owner=owner, pool=pool, day=day, live_ms=step_ms, busy_ms=busy_ms, busy_mib_ms=busy_ms * mib
            )
            known = self._unwritten.get((owner, pool, day))
            self._unwritten[owner, pool, day] = more if known is None else known + more

    def write(self) -> None:
        fresh, self._unwritten = list(self._unwritten.values()), {}
        self._written_ms = self._clocks.now()
        self._forecasts.learn(fresh)
        self._forecasts.forget(self._clocks.wall() // _DAY_MS - HISTORY_DAYS)
        for usage in fresh:
            self._broker.writer.submit(partial(self._broker.writer.ledger.add_usage, usage), again=True)
