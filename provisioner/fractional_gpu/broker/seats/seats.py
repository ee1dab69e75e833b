"""Seats: what a hub's servers are entitled to, how they are given, and what kernels may draw on them.

- A seat is on the disk before its taker hears of it. Until the taker confirms that it has saved it, it has a time to live: a hub that
  dies between taking and saving leaves nothing behind. Confirmed (which is on the disk before it is answered), it lives until it is
  ended, over restarts of hub and broker.
- An end that cannot be written down (a full disk) is tried again until it is: the next broker would have the seat back, for good.
- One server has one seat: taking another one for it ends the older.
- A pool that is full by the forecast (`core.packing`) or by what it may promise lets who asks wait, first come, first served within a
  priority, or refuses, as the pool says. Who could never be served, or is not to be, is refused at once.
- A request that fits passes those before it that do not: `max_passed_over` times at most, then the pool keeps its room for the one that
  was passed. One that not even the empty pool could serve (its devices became fewer, or its terms stricter) keeps none.
- A kernel of a seat gets owner, group, priority and weight from the seat, whatever it asks. What ends is the entitlement, not the
  kernels: the leases of a seat that ends are revoked (`revoking`).
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

from fractional_gpu.broker.broker import (
    Broker,
    now_ms,
    token_digest,
    wall_ms,
)
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.persistence.lease_files import read_seat_files
from fractional_gpu.broker.seats.offers import PoolForecasts
from fractional_gpu.broker.seats.pools import PoolEditor
from fractional_gpu.broker.seats.revocation import Revocations
from fractional_gpu.broker.seats.rules import (
    PoolFull,
    SeatUsage,
    check_limits,
    check_request,
    check_seat_usage,
    check_terms,
    counted_group,
    total_usage,
)
from fractional_gpu.broker.seats.usage import UsageRecorder
from fractional_gpu.config.hub import GroupTerms, HubPool
from fractional_gpu.config.pools import PoolSettings
from fractional_gpu.config.settings import Settings
from fractional_gpu.core.model import LeaseSpec, LeaseView, PoolSpec
from fractional_gpu.core.seat_packing import SeatLoad
from fractional_gpu.core.units import format_fraction
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError, SeatRecord
from fractional_gpu.protocol.errors import (
    BadRequestError,
    ForbiddenError,
    NoRoomError,
    NotFoundError,
    UnauthorizedError,
)
from fractional_gpu.protocol.limits import MAX_NAME, PULSE_S
from fractional_gpu.protocol.messages import LeaseRequest, SeatWait
from fractional_gpu.protocol.seats import (
    OfferRequest,
    Offers,
    ProgressKind,
    SeatList,
    SeatProgress,
    SeatRequest,
    SeatStatus,
)

__all__ = ["Seats"]

log = logging.getLogger(__name__)

_LONGEST_TTL_MS = 24 * 3_600_000
_LONGEST_WAIT_MS = 3_600_000
_MOST_SEATS = 10_000
_MOST_WAITING = 2000
_WRITE_AGAIN_S = 1.0


class _Waiter:
    """A request in the line of its pool. Compared by identity. `seat` or `refused` is set when the request leaves the line."""

    def __init__(self, request: SeatRequest, group: str, terms: GroupTerms, memory_mib: int) -> None:
        self.request = request
        self.group = group
        self.terms = terms
        self.memory_mib = memory_mib
        self.seat: SeatRecord | None = None  # reserved for it, and on its way to the disk ...
        self.written: asyncio.Future[None] | None = None  # ... until this is done
        self.token = ""
        self.given = False  # the caller has heard of the seat
        self.since_ms = now_ms()
        self.passed_over = 0  # how many later requests got a seat before this one
        self.refused: NoRoomError | None = None  # its owner or group reached a limit while it waited


class Seats:
    """All seats of one broker; everything runs on the broker's loop."""

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._settings = settings
        self._seats: dict[str, SeatRecord] = {}
        self._waiting: dict[str, list[_Waiter]] = {}
        self._changed = asyncio.Event()
        self._unwritten: dict[str, Callable[[], None]] = {}  # by seat: the end that could not be written down
        self.forecasts = PoolForecasts(broker, settings)
        self._usage_recorder = UsageRecorder(broker, self.forecasts)
        self.revocations = Revocations(broker)
        self.pools = PoolEditor(broker, settings, self._pool_changed, self.forecasts.unshared)

    # -- what is there -----------------------------------------------------------------------------------------------------

    def recover(self, ledger: Ledger) -> None:
        """Take over the seats of the ledger, and what it knows of users. Seats that expired meanwhile go with the next look.

        A confirmed seat that the ledger does not know, because an earlier one was lost, is taken from its second record.
        """
        self._seats = {record.seat_id: record for record in ledger.live_seats()}
        files = self._broker.records.files
        for seat in read_seat_files(files.folder) if files is not None else ():
            if not ledger.has_seat(seat.seat_id):
                log.warning(
                    "seat %s of %r is not in the ledger: taken back from its second record",
                    seat.seat_id[:8],
                    seat.owner,
                )
                self._seats[seat.seat_id] = seat
                self._broker.writer.submit(partial(ledger.save_seat, seat))
        for seat in self._seats.values():
            self._note(seat)
        self._usage_recorder.recover(ledger)
        self.revocations.recover(ledger, self._seats)
        for pool in self._broker.arbiter.pools():
            self._warn(pool)

    def live(self) -> list[SeatRecord]:
        """Return all seats, oldest first."""
        return list(self._seats.values())

    def listing(self) -> SeatList:
        """Return all seats as messages."""
        return SeatList(
            seats=self.seen_by(None, None),
            waiting=self.waiting(),
        )

    def waiting(self) -> dict[str, int]:
        """Return how many wait for a seat in each pool where somebody does."""
        return {pool: len(line) for pool, line in sorted(self._waiting.items()) if line}

    def seen_by(self, uid: int | None, seat_id: str | None) -> list[SeatStatus]:
        """Return the seats that a peer is told of: of this uid (None: all), or the one whose token it has."""
        seen = [
            seat
            for seat in self._seats.values()
            if (seat.seat_id == seat_id if seat_id is not None else uid is None or seat.uid == uid)
        ]
        draws: dict[str, list[SeatUsage]] = {seat.seat_id: [] for seat in seen}
        for kernel, view in self._broker.views() if seen else ():
            if view.spec.seat in draws:
                draws[view.spec.seat].append(self._lease_usage(kernel, view.spec))
        return [self.status(seat, total_usage(draws[seat.seat_id])) for seat in seen]

    def queue_seen_by(self, uid: int | None, seat_id: str | None) -> list[SeatWait]:
        """Return the requests for a seat that a peer is told of, by pool and position; a seat's token shows none."""
        return [
            SeatWait(
                pool=pool,
                position=position,
                owner=waiter.request.owner,
                server=waiter.request.server,
                fraction_milli=waiter.request.fraction_milli,
                memory_mib=waiter.memory_mib,
                waited_ms=now_ms() - waiter.since_ms,
                expected_ms=self.forecasts.expected_ms(pool, position, len(self._of_pool(pool))),
                passed_over=waiter.passed_over,
            )
            for pool, line in sorted(self._waiting.items())
            for position, waiter in enumerate(line, start=1)
            if seat_id is None and (uid is None or waiter.request.uid == uid)
        ]

    def status(self, seat: SeatRecord, held: SeatUsage | None = None) -> SeatStatus:
        """Return one seat as a message. `held`: what its kernels have, where that is known already."""
        held = held or self._seat_usage(seat.seat_id)
        now = self._broker.deadlines.now_ms()
        return SeatStatus(
            seat_id=seat.seat_id,
            owner=seat.owner,
            server=seat.server,
            group=seat.group_name,
            pool=seat.pool,
            fraction_milli=seat.fraction_milli,
            memory_mib=seat.memory_mib,
            device_id=seat.device_id,
            priority=seat.priority,
            weight=seat.weight,
            max_kernels=seat.max_kernels,
            uid=seat.uid,
            kernels=held.kernels,
            used_milli=held.fraction_milli,
            confirmed=seat.expires_ms is None,
            age_ms=max(0, wall_ms() - seat.created_ms),
            expires_ms=None if seat.expires_ms is None else max(0, seat.expires_ms - now),
            hub=seat.hub,
        )

    def offers(self, request: OfferRequest) -> Offers:
        """Return the pools as this user would meet them now."""
        waiting = {pool: len(line) for pool, line in self._waiting.items()}
        kept = {pool for pool in waiting if not self._lets_pass(pool)}
        return self.forecasts.offers(request, self.live(), waiting, kept)

    # -- giving and ending ---------------------------------------------------------------------------------------------------

    async def take(self, request: SeatRequest) -> AsyncGenerator[SeatProgress, None]:
        """Yield why the seat is waited for, whenever that changes, then `granted` or `refused`. Closing it leaves the queue.

        Raises BadRequestError for what makes no sense; a refusal that the user should read is the last line.
        """
        pool, hub = self._pool(request.pool)
        check_request(request, pool)
        if len(self._seats) >= _MOST_SEATS or sum(map(len, self._waiting.values())) >= _MOST_WAITING:
            raise NoRoomError("there are more seats, or more who wait for one, than this broker keeps track of")
        try:
            group, terms = check_terms(pool.name, hub, request.groups, wall_ms() / 1000)
            group = counted_group(group, request.groups, pool)
            memory_mib = self.forecasts.memory_mib(pool, request.fraction_milli, request.memory_mib)
            check_limits(request, group, pool, self._others(request), self._revoked(request))
            self.forecasts.check_ever(request, pool, hub, memory_mib)
        except (ForbiddenError, NoRoomError) as error:
            yield self._limited(request, error)
            return
        waiter = _Waiter(request, group, terms, memory_mib)
        async with contextlib.aclosing(self._line_up(waiter)) as line:
            async for progress in line:
                yield progress

    async def _line_up(self, waiter: _Waiter) -> AsyncGenerator[SeatProgress, None]:
        """Wait in the pool's line until the seat is reserved or refused, then write it down."""
        request, line = waiter.request, self._waiting.setdefault(waiter.request.pool, [])
        line.insert(sum(other.terms.priority >= waiter.terms.priority for other in line), waiter)
        deadline_ms = now_ms() + min(request.wait_ms, _LONGEST_WAIT_MS)
        told: SeatProgress | None = None
        try:
            while True:
                changed, last_look = self._changed, now_ms() >= deadline_ms
                _, hub = self._pool(request.pool)  # a change of the pool counts at once
                full = None
                if line[:1] == [waiter] or told is None or last_look or not hub.waits_when_full:
                    # When it arrives, since it may pass the others, and before a refusal: requests ahead that can be served now are no
                    # reason to refuse this one. In between the first one in the line looks for all of them.
                    full = self._serve(request.pool)
                if waiter.seat is not None:
                    yield await self._give(waiter, waiter.seat)
                    return
                if waiter.refused is not None:
                    yield self._limited(request, waiter.refused)
                    return
                position = line.index(waiter) + 1
                if full is None or position > 1:
                    full = PoolFull(
                        "seat-queue", f"{_others_wait(position - 1)} before you for a place in pool {request.pool!r}"
                    )
                if last_look or not hub.waits_when_full:
                    yield self._refused(request, hub, full)
                    return
                progress = SeatProgress(
                    kind=ProgressKind.WAITING,
                    reason=full.reason,
                    sentence=full.sentence,
                    position=position,
                    expected_ms=self.forecasts.expected_ms(request.pool, position, len(self._of_pool(request.pool))),
                )
                if progress != told:
                    yield progress
                    told = progress
                with contextlib.suppress(
                    TimeoutError
                ):  # memory and habits change without a signal: look again then, too
                    async with asyncio.timeout(min(PULSE_S, max(0.0, (deadline_ms - now_ms()) / 1000))):
                        await changed.wait()
        finally:
            if waiter in line:
                line.remove(waiter)
                self._notify()
            elif waiter.seat is not None and not waiter.given and waiter.seat.seat_id in self._seats:
                self._end(waiter.seat, "abandoned")

    def _serve(self, pool_name: str) -> PoolFull | None:
        """Reserve seats for the requests in the pool's line that fit, in their order; return why the first one left does not.

        A request that is served leaves the line here, before anything is awaited: while the ledger is being written nobody waits
        behind it. So does the first one if it is refused for a limit; a later one may have room below its limit at its turn.
        """
        pool, hub = self._pool(pool_name)
        line = self._waiting.get(pool_name, [])
        passed: list[_Waiter] = []  # requests that do not fit
        unplaced: list[tuple[int, SeatLoad, PoolFull]] = []
        first_full, left = None, False
        for waiter in line.copy():
            try:
                place = self._place(waiter, pool, hub, unplaced)
            except NoRoomError as error:
                if not passed:
                    waiter.refused = error
                    line.remove(waiter)
                    left = True
                continue
            if isinstance(place, PoolFull):
                first_full = first_full or place
                passed.append(waiter)
            else:
                for one in passed:
                    one.passed_over += 1
                self._reserve(waiter, hub, place)
                line.remove(waiter)
                left = True
            if any(self._is_kept_for(one, pool, hub) for one in passed):
                break
        if left:
            self._notify()
        return first_full

    def _place(
        self, waiter: _Waiter, pool: PoolSpec, hub: HubPool, unplaced: list[tuple[int, SeatLoad, PoolFull]]
    ) -> PoolFull | str | None:
        """Return where the seat would be placed, or why not. Raises NoRoomError for a limit.

        `unplaced`: memory and load of earlier requests that do not fit, and why. One that needs as much as any of them costs no forecast.
        """
        request = waiter.request
        others = self._others(request)
        load = self.forecasts.load(request.owner, pool, waiter.memory_mib)
        check_limits(request, waiter.group, pool, others, self._revoked(request))
        if len(others) == len(self._of_pool(request.pool)):  # it replaces no seat, whose room would be free for it
            for mib, other, full in unplaced:
                if waiter.memory_mib >= mib and load.mib >= other.mib and load.duty_milli >= other.duty_milli:
                    return full
        place = self.forecasts.full(request, pool, hub, waiter.memory_mib, others)
        if isinstance(place, PoolFull):
            unplaced.append((waiter.memory_mib, load, place))
        return place

    def _is_kept_for(self, waiter: _Waiter, pool: PoolSpec, hub: HubPool) -> bool:
        """Whether the pool keeps its room for this request: it was passed often enough, and the pool could serve it."""
        if waiter.passed_over < pool.max_passed_over:
            return False
        return not isinstance(self.forecasts.full(waiter.request, pool, hub, waiter.memory_mib, []), PoolFull)

    def _lets_pass(self, pool_name: str) -> bool:
        """Whether a request that fits gets a seat before those that wait in the pool's line."""
        pool, hub = self._pool(pool_name)
        return not any(self._is_kept_for(waiter, pool, hub) for waiter in self._waiting.get(pool_name, ()))

    @staticmethod
    def _refused(request: SeatRequest, hub: HubPool, full: PoolFull) -> SeatProgress:
        waited = " and no seat became free in time" if hub.waits_when_full and request.wait_ms else ""
        sentence = f"{full.sentence}{waited}; try again later, or choose a smaller fraction or another pool"
        log.warning("no seat for %r: %s (%s)", request.owner, sentence, full.reason)
        return SeatProgress(kind=ProgressKind.REFUSED, reason=full.reason, sentence=sentence)

    @staticmethod
    def _limited(request: SeatRequest, error: ForbiddenError | NoRoomError) -> SeatProgress:
        log.warning("no seat for %r: %s (%s)", request.owner, error, error.reason)
        return SeatProgress(kind=ProgressKind.REFUSED, reason=error.reason, sentence=str(error))

    def _reserve(self, waiter: _Waiter, hub: HubPool, device_id: str | None) -> None:
        """Take room for the seat at once: no other request gets it. An older seat of the same server ends."""
        request = waiter.request
        waiter.token = secrets.token_urlsafe(32)
        waiter.seat = seat = SeatRecord(
            seat_id=secrets.token_hex(12),
            owner=request.owner,
            server=request.server,
            group_name=waiter.group,
            pool=request.pool,
            fraction_milli=request.fraction_milli,
            memory_mib=waiter.memory_mib,
            devices=1,
            priority=waiter.terms.priority,
            weight=waiter.terms.weight,
            max_kernels=hub.kernels_per_seat,
            uid=request.uid,
            device_id=device_id,
            token_sha256=token_digest(waiter.token),
            created_ms=wall_ms(),
            expires_ms=self._broker.deadlines.now_ms() + min(request.ttl_ms, _LONGEST_TTL_MS),
            hub=request.hub,
        )
        for older in [one for one in self._seats.values() if (one.owner, one.server) == (seat.owner, seat.server)]:
            self._end(older, "replaced")
        self._seats[seat.seat_id] = seat
        waiter.written = self._broker.writer.submit(partial(self._broker.writer.ledger.save_seat, seat))

    async def _give(self, waiter: _Waiter, seat: SeatRecord) -> SeatProgress:
        """Hand the reserved seat out once it is on the disk. Raises LedgerError. Cancelled: the caller ends the seat."""
        if waiter.written is not None:
            try:
                await asyncio.shield(waiter.written)
            except LedgerError:
                if self._seats.pop(seat.seat_id, None) is not None:
                    self._notify()
                raise
        if seat.seat_id not in self._seats:
            return SeatProgress(
                kind=ProgressKind.REFUSED,
                reason="seat-ended",
                sentence="the seat ended while it was being written down: its time to live was over, or a later request for the same "
                "server has taken its place; start the server again",
            )
        waiter.given = True
        self.revocations.take_over(seat, partial(self._check_takeover, seat))
        log.info(
            "seat %s: %s GPU of pool %r for %r",
            seat.seat_id[:8],
            format_fraction(seat.fraction_milli),
            seat.pool,
            seat.owner,
        )
        return SeatProgress(
            kind=ProgressKind.GRANTED,
            seat_id=seat.seat_id,
            token=waiter.token,
            memory_mib=seat.memory_mib,
            priority=seat.priority,
            sentence=f"{format_fraction(seat.fraction_milli)} GPU of pool {seat.pool!r}",
        )

    async def confirm(self, seat_id: str) -> SeatStatus:
        """The taker has saved it: it no longer expires. Returns once that is on the disk. Raises NotFoundError, LedgerError."""
        seat = self._known(seat_id)
        if seat.expires_ms is not None:
            kept = replace(seat, expires_ms=None)
            await self._broker.writer.run(partial(self._broker.writer.ledger.save_seat, kept))
            self._known(seat_id)  # it may have ended meanwhile
            seat = self._seats[seat_id] = kept
            self._note(seat)
        return self.status(seat)

    def _note(self, seat: SeatRecord) -> None:
        """Have the seat in the second records once it is confirmed; before that its taker can ask anew."""
        if self._broker.records.files is not None and seat.expires_ms is None:
            self._broker.records.files.put_seat(seat)

    def _known(self, seat_id: str) -> SeatRecord:
        seat = self._seats.get(seat_id)
        if seat is None:
            raise NotFoundError(f"there is no seat {seat_id[:MAX_NAME]!r}; it may have expired", reason="unknown-seat")
        return seat

    def find(self, seat_id: str) -> SeatRecord | None:
        """Return the seat, None if there is none such (any more)."""
        return self._seats.get(seat_id)

    def release(self, seat_id: str) -> None:
        """End the seat. One that is unknown is left alone."""
        if (seat := self._seats.get(seat_id)) is not None:
            self._end(seat, "released")

    def _end(self, seat: SeatRecord, reason: str) -> None:
        del self._seats[seat.seat_id]
        if self._broker.records.files is not None:
            self._broker.records.files.drop_seat(seat.seat_id)
        log.info("seat %s of %r ended: %s", seat.seat_id[:8], seat.owner, reason)
        self._write_end(seat.seat_id, partial(self._broker.writer.ledger.end_seat, seat.seat_id, wall_ms(), reason))
        self.revocations.seat_ended(seat)
        self._notify()

    def _write_end(self, seat_id: str, end: Callable[[], None]) -> None:
        def keep() -> None:
            self._unwritten[seat_id] = end
            asyncio.get_running_loop().call_later(_WRITE_AGAIN_S, self._write_ends)

        self._broker.writer.submit(end, unwritten=keep)

    def _write_ends(self) -> None:
        if not self._broker.stopping:
            unwritten, self._unwritten = self._unwritten, {}
            for seat_id, end in unwritten.items():
                self._write_end(seat_id, end)

    async def run(self) -> None:
        """End what expires and measure who uses what, for as long as the broker serves; what is not written yet is then tried again."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._expire())
                group.create_task(self._usage_recorder.run())
        finally:
            self._write_ends()
            await self.revocations.close()

    async def _expire(self) -> None:
        while True:
            now = self._broker.deadlines.now_ms()
            for seat in self.live():
                if seat.expires_ms is not None and seat.expires_ms <= now:
                    self._end(seat, "expired")
            due = min((seat.expires_ms - now for seat in self.live() if seat.expires_ms is not None), default=None)
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.05, due / 1000)):
                    await changed.wait()

    # -- drawing on a seat ---------------------------------------------------------------------------------------------------

    def apply_terms(self, peer: Peer, request: LeaseRequest, spec: LeaseSpec) -> LeaseSpec:
        """Return the lease as its seat allows it; without a seat as it is, unless this broker requires one.

        Raises ForbiddenError, UnauthorizedError or NoRoomError, and logs who asked for what.
        """
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
        if not request.seat:
            if self._settings.seats_required:
                raise ForbiddenError(
                    "GPUs are given to servers that the hub started with one, and this kernel names no seat of such a server; "
                    "choose a GPU when you start your server, and leave JUPYTER_GPU_SEAT_FILE as the hub has set it",
                    reason="no-seat",
                )
            return spec
        seat = self._seats.get(request.seat)
        if seat is None or peer.token is None or not hmac.compare_digest(token_digest(peer.token), seat.token_sha256):
            raise UnauthorizedError(
                "the seat of this server is over, or what was sent is not its token; stop the server on the hub's page and "
                "start it again, which ends its kernels: save what you need of them first",
                reason="foreign-seat",
            )
        if seat.uid is not None and peer.credentials.uid not in {seat.uid, 0}:
            raise ForbiddenError("this seat belongs to another user of the machine", reason="wrong-uid")
        asked = SeatUsage(fraction_milli=spec.fraction_milli * spec.devices, memory_mib=spec.reserve_mib * spec.devices)
        check_seat_usage(
            seat, spec.pool, request.priority, asked, self._seat_usage(seat.seat_id), earlier=self._earlier(seat)
        )
        return replace(
            spec,
            seat=seat.seat_id,
            owner=seat.owner,
            group=seat.group_name,
            priority=min(spec.priority, seat.priority) if request.priority else seat.priority,
            owner_weight=seat.weight,
        )

    def _check_takeover(self, seat: SeatRecord, kernel: Kernel, view: LeaseView) -> None:
        """Raise ForbiddenError or NoRoomError for a revoked lease that the seat has no room for, or other terms than the lease has."""
        spec = view.spec
        if (seat.uid is not None and kernel.uid not in {seat.uid, 0}) or spec.group != seat.group_name:
            raise ForbiddenError("it was given on other terms", reason="seat-terms")
        check_seat_usage(
            seat, spec.pool, spec.priority, self._lease_usage(kernel, spec), self._seat_usage(seat.seat_id)
        )

    def check_resize(self, kernel: Kernel, fraction_milli: int, reserve_mib: int) -> None:
        """Refuse another size of an existing lease that is more than its seat has left. Raises NoRoomError or ForbiddenError."""
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None or not view.spec.seat:
            return
        spec, seat = view.spec, self._seats.get(view.spec.seat)
        if seat is None:
            raise ForbiddenError("the seat of this kernel is over; it keeps the size that it has", reason="no-seat")
        asked = SeatUsage(fraction_milli=fraction_milli * spec.devices, memory_mib=reserve_mib * spec.devices)
        held = self._seat_usage(seat.seat_id, but=spec.lease_id)
        check_seat_usage(seat, spec.pool, spec.priority, asked, held, earlier=self._earlier(seat, but=spec.lease_id))
        kernel.requests.seat_size = (asked.fraction_milli, asked.memory_mib)

    def of_token(self, token: str | None) -> str | None:
        """Return the seat whose token it is, or whose lease's token it is."""
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
        """Return whose seat it is, "" if there is none such (any more)."""
        seat = self._seats.get(seat_id or "")
        return seat.owner if seat is not None else ""

    def opens(self, token: str, view: LeaseView) -> bool:
        """Whether the token is that of the seat that the lease draws on, or of a seat of the user whose revoked lease it is."""
        seat_id = self.of_token(token)
        own = view.revoked and self.owner_of(seat_id) == view.spec.owner
        return bool(view.spec.seat) and (seat_id == view.spec.seat or own)

    def predates(self, kernel: Kernel, view: LeaseView) -> bool:
        """Whether the kernel is of an earlier server than the one whose seat it draws on, if it draws on one."""
        seat = self._seats.get(view.spec.seat)
        return view.revoked or (seat is not None and kernel.created_ms < seat.created_ms)

    def _earlier(self, seat: SeatRecord, *, but: str = "") -> list[str]:
        """Return the leases that the seat has taken over from an earlier server: no list of the present one's kernels shows these."""
        return [
            kernel.lease_id
            for kernel, view in self._broker.views()
            if view.spec.seat == seat.seat_id and kernel.lease_id != but and self.predates(kernel, view)
        ]

    def _seat_usage(self, seat_id: str, *, but: str = "") -> SeatUsage:
        """Return what the seat's kernels have, and what those that wait for another size may get at any moment."""
        return total_usage(
            self._lease_usage(kernel, view.spec)
            for kernel, view in self._broker.views()
            if view.spec.seat == seat_id and view.spec.lease_id != but
        )

    @staticmethod
    def _lease_usage(kernel: Kernel, spec: LeaseSpec) -> SeatUsage:
        milli, mib = kernel.requests.seat_size if kernel.requests.resize is not None else (0, 0)
        return SeatUsage(
            fraction_milli=max(milli, spec.fraction_milli * spec.devices),
            memory_mib=max(mib, spec.reserve_mib * spec.devices),
        )

    # -- helpers -------------------------------------------------------------------------------------------------------------

    def _pool(self, name: str) -> tuple[PoolSpec, HubPool]:
        pool = self._broker.arbiter.pools().get(name)
        if pool is None:
            names = ", ".join(sorted(self._broker.arbiter.pools())) or "none"
            raise BadRequestError(f"there is no pool {name[:MAX_NAME]!r}; pools: {names}", reason="unknown-pool")
        return pool, self.forecasts.hub(name)

    def _pool_changed(self, pool: PoolSettings) -> None:
        self.forecasts.pool_changed(pool)
        self._warn(pool.name)
        self._notify()  # who waits looks again

    def _warn(self, name: str) -> None:
        """Log what the pool's terms make of its largest fraction, where a hub gives seats in it."""
        if self._settings.seats_required and (sentence := self.forecasts.unshared(self._pool(name)[0])):
            log.warning("%s", sentence)

    def _of_pool(self, pool: str) -> list[SeatRecord]:
        return [seat for seat in self._seats.values() if seat.pool == pool]

    def _others(self, request: SeatRequest) -> list[SeatRecord]:
        """Return the pool's seats but the one that this request would replace."""
        return [
            seat for seat in self._of_pool(request.pool) if (seat.owner, seat.server) != (request.owner, request.server)
        ]

    def _revoked(self, request: SeatRequest) -> list[LeaseView]:
        return self.revocations.of_user(request.pool, request.owner, request.server)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _others_wait(count: int) -> str:
    return "somebody else waits" if count == 1 else f"{count} others wait"
