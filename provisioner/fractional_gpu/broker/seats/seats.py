"""Manages seats from the time they are requested until they end. A seat entitles a hub's server to a fraction of a GPU.

- A seat is written to the ledger before the hub receives it, and expires unless the hub confirms that the seat has been saved. A confirmed
  seat survives restarts of the hub and the broker until it is ended, and an ended seat never comes back. A server has at most one seat, so
  if it gets another, the older one ends.
- A pool is full if one more seat would probably make cells wait too long (`core.seat_packing`), or if too little of its memory is left to
  promise to another seat. Depending on the configuration, further requests wait or are refused. Requests with the same priority are served
  in order of arrival. A request that the pool could never serve is refused at once.
- A request that fits can overtake earlier requests that do not. Once a request has been overtaken `max_passed_over` times, the pool keeps
  its free room for that request, unless even the empty pool could not serve it.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from fractional_gpu.broker.accounting.budgets import BudgetKeeper
from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.clock import now_ms, wall_ms, within
from fractional_gpu.broker.persistence.lease_files import read_records
from fractional_gpu.broker.seats.capacity import HostCapacity
from fractional_gpu.broker.seats.draws import SeatDraws, UsageRecorder
from fractional_gpu.broker.seats.offers import PoolForecasts
from fractional_gpu.broker.seats.revocation import Revocations
from fractional_gpu.broker.seats.rules import (
    PoolEditor,
    PoolFull,
    SeatUsage,
    check_limits,
    check_request,
    check_terms,
    counted_group,
    is_of_same_server,
    total_usage,
)
from fractional_gpu.broker.seats.workloads import Workloads
from fractional_gpu.broker.services.status import Viewer, times
from fractional_gpu.config.hub import GroupTerms
from fractional_gpu.config.pools import Pool
from fractional_gpu.config.settings import Settings
from fractional_gpu.core.forecasts.habits import Share
from fractional_gpu.core.metering.usage import Party
from fractional_gpu.core.model import LeaseView, PoolSpec, Span
from fractional_gpu.core.seat_packing import SeatLoad
from fractional_gpu.core.units import format_fraction
from fractional_gpu.host.process import boot_id
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError, SeatRecord
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NoRoomError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME, PULSE_S
from fractional_gpu.protocol.messages import ProgressKind
from fractional_gpu.protocol.nodes import Capacity
from fractional_gpu.protocol.seats import OfferRequest, Offers, PoolOffer, SeatList, SeatProgress, SeatRequest
from fractional_gpu.protocol.status import Seat, SeatStatus, SeatWait

log = logging.getLogger(__name__)

_LONGEST_TTL_MS = 24 * 3_600_000
_LONGEST_WAIT_MS = 3_600_000
_DAY_S = 24 * 3600
_MOST_SEATS = 10_000
_MOST_WAITING = 2000


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request in its pool's queue, compared by identity. `seat` or `refused` is set when the request is granted or refused."""

    request: SeatRequest
    group: str
    terms: GroupTerms
    memory_mib: int
    seat: SeatRecord | None = None  # reserved, and being written to the ledger ...
    written: asyncio.Future[None] | None = None  # ... until this future is done
    token: str = ""
    given: bool = False  # whether the caller has received the seat
    since_ms: int = field(default_factory=now_ms)
    passed_over: int = 0  # how many later requests got a seat first
    forecast: tuple[Span, Span] | None = None  # the first forecast of its wait: as computed, and as shown
    refused: NoRoomError | None = None  # set if its owner or group reached a limit while it waited


class Seats:
    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._settings = settings
        self._seats: dict[str, SeatRecord] = {}
        self._waiting: dict[str, list[_Waiter]] = {}
        self._changed = asyncio.Event()
        self.workloads = Workloads(broker, self._seats, gone=self._workload_gone, changed=self._keep)
        self.draws = SeatDraws(broker, self._seats, self.workloads, required=settings.seats_required)
        self.forecasts = PoolForecasts(broker, settings)
        self._capacity = HostCapacity(broker, self.forecasts, default_milli=settings.first_fraction)
        self.budgets = BudgetKeeper(broker, broker.writer, settings.budgets, self.forecasts.hub)
        broker.metering.followers.append(self.budgets.counted)
        broker.habits.seat_share = self._share
        self._usage_recorder = UsageRecorder(broker, self.forecasts)
        self.revocations = Revocations(broker)
        self.pools = PoolEditor(broker, self.forecasts.hubs, self._pool_changed, self._capacity.fitting)

    def recover(self, ledger: Ledger) -> None:
        self._seats.update((record.seat_id, record) for record in ledger.live_seats())
        files = self._broker.records.files
        for seat in read_records(files.folder, SeatRecord) if files is not None else ():
            if not ledger.has_seat(seat.seat_id):
                log.warning(
                    "the ledger has no record of seat %s of %r: restored the seat from its backup record",
                    seat.seat_id[:8],
                    seat.owner,
                )
                self._seats[seat.seat_id] = seat
                self._broker.writer.submit(partial(ledger.save_seat, seat))
        for seat in self._seats.values():
            self._save_backup_record(seat)
        self._usage_recorder.recover(ledger)
        self.budgets.recover(ledger)
        self.revocations.recover(ledger, self._seats)
        if self._settings.seats_required:
            for said in map(self._capacity.fitting, self._broker.arbiter.pools().values()):
                log.info("%s", said or "a pool has no devices, so it has no room for seats")

    def live(self) -> list[SeatRecord]:
        return list(self._seats.values())

    def listing(self) -> SeatList:
        return SeatList(seats=self.seen_by(Viewer()), waiting=self.waiting())

    async def capacity(self) -> Capacity:
        return await self._capacity.now(self.live())

    def waiting(self) -> dict[str, int]:
        return {pool: len(line) for pool, line in sorted(self._waiting.items()) if line}

    def seen_by(self, viewer: Viewer) -> list[SeatStatus]:
        seen = [
            seat
            for seat in self._seats.values()
            if (seat.seat_id == viewer.seat if viewer.seat is not None else viewer.uid in {None, seat.uid})
        ]
        draws: dict[str, list[SeatUsage]] = {seat.seat_id: [] for seat in seen}
        for kernel, view in self._broker.views() if seen else ():
            if view.spec.seat in draws:
                draws[view.spec.seat].append(self.draws.lease_usage(kernel, view.spec))
        return [self.status(seat, total_usage(draws[seat.seat_id])) for seat in seen]

    def queue_seen_by(self, viewer: Viewer) -> list[SeatWait]:
        return [
            self._seat_wait(waiter, position)
            for _, line in sorted(self._waiting.items())
            for position, waiter in enumerate(line, start=1)
            if viewer.seat is None and viewer.uid in {None, waiter.request.uid}
        ]

    def _seat_wait(self, waiter: _Waiter, position: int) -> SeatWait:
        expected = self._expected(waiter, position, first=False)
        return SeatWait(
            pool=waiter.request.pool,
            position=position,
            owner=waiter.request.owner,
            server=waiter.request.server,
            fraction_milli=waiter.request.fraction_milli,
            memory_mib=waiter.memory_mib,
            waited_ms=now_ms() - waiter.since_ms,
            **times(expected),
            passed_over=waiter.passed_over,
        )

    def status(self, seat: SeatRecord, held: SeatUsage | None = None) -> SeatStatus:
        held = held or self.draws.seat_usage(seat.seat_id)
        now = self._broker.deadlines.now_ms()
        return SeatStatus(
            **{name: getattr(seat, name) for name in Seat.__struct_fields__},
            kernels=held.kernels,
            used_milli=held.fraction_milli,
            confirmed=seat.expires_ms is None,
            age_ms=max(0, wall_ms() - seat.created_ms),
            expires_ms=None if seat.expires_ms is None else max(0, seat.expires_ms - now),
            warning=self.workloads.warnings.get(seat.seat_id, ""),
        )

    def offers(self, request: OfferRequest) -> Offers:
        waiting = {pool: len(line) for pool, line in self._waiting.items()}
        kept = {pool for pool in waiting if not self._lets_pass(pool)}
        offers = self.forecasts.offers(request, self.live(), waiting, kept)
        return structs.replace(offers, pools=[self._with_advice_and_budget(request, one) for one in offers.pools])

    def _share(self, seat_id: str) -> Share | None:
        seat = self._seats.get(seat_id)
        return Share(seat.fraction_milli, seat.memory_mib) if seat is not None else None

    def _with_advice_and_budget(self, request: OfferRequest, offer: PoolOffer) -> PoolOffer:
        """Return the offer with the remaining budgets and advice based on past use. If a budget is used up, `why_not` says so."""
        spec, hub = self._pool(offer.pool)
        terms = hub.terms(request.groups)
        group = counted_group(terms[0] if terms is not None else "", request.groups, spec)
        party = Party(offer.pool, request.owner, group or self.budgets.group_of(request.groups), seated=True)
        left = "; ".join(f"{one.left_text} of {one.text} left" for one in self.budgets.status(party))
        why_not = offer.why_not or self.budgets.refusal(party)
        advice = self._broker.habits.of_seats(offer.pool, request.owner)
        if advice is not None:
            offer = structs.replace(offer, advice=advice.brief)
        return structs.replace(offer, budget=left, why_not=why_not)

    async def take(self, request: SeatRequest) -> AsyncGenerator[SeatProgress, None]:
        """Yield a request's progress, then `granted` or `refused`. Closing the generator withdraws the request. Raises BadRequestError."""
        pool, hub = self._pool(request.pool)
        check_request(request, pool)
        if len(self._seats) >= _MOST_SEATS or sum(map(len, self._waiting.values())) >= _MOST_WAITING:
            raise NoRoomError("this broker already has the maximum number of seats or waiting requests")
        try:
            group, terms = check_terms(pool.name, hub, request.groups, wall_ms() / 1000)
            group = counted_group(group, request.groups, pool) or self.budgets.group_of(request.groups)
            self.budgets.check(Party(pool.name, request.owner, group, seated=True))
            memory_mib = self.forecasts.memory_mib(
                pool, request.fraction_milli, request.memory_mib, request.allowed_devices
            )
            check_limits(request, group, pool, self._others(request), self._revoked(request))
            self.forecasts.check_ever(request, pool, hub, memory_mib)
        except (ForbiddenError, NoRoomError) as error:
            yield self._refused(request, error.reason, str(error))
            return
        waiter = _Waiter(request, group, terms, memory_mib)
        async with aclosing(self._wait_in_line(waiter)) as line:
            async for progress in line:
                yield progress

    async def _wait_in_line(self, waiter: _Waiter) -> AsyncGenerator[SeatProgress, None]:
        request, line = waiter.request, self._waiting.setdefault(waiter.request.pool, [])
        line.insert(sum(_precedes(other, waiter) for other in line), waiter)
        deadline_ms = now_ms() + min(request.wait_ms, _LONGEST_WAIT_MS)
        told: SeatProgress | None = None
        try:
            while True:
                changed, last_look = self._changed, now_ms() >= deadline_ms
                _, hub = self._pool(request.pool)  # in each turn, because an administrator may change the pool
                full = None
                if line[:1] == [waiter] or told is None or last_look or hub.when_full == "refuse":
                    # Serve the queue when a request arrives, since it may pass others. Serve it also before a refusal, since requests ahead
                    # that can be served now do not justify refusing this one. Otherwise the first request serves the queue for all.
                    full = self._serve(request.pool)
                if waiter.seat is not None:
                    yield await self._hand_out(waiter, waiter.seat)
                    return
                if waiter.refused is not None:
                    yield self._refused(request, waiter.refused.reason, str(waiter.refused))
                    return
                position = line.index(waiter) + 1
                if full is None or position > 1:
                    full = PoolFull(
                        "seat-queue", f"{_others_wait(position - 1)} ahead of you for a place in pool {request.pool!r}"
                    )
                if last_look or hub.when_full == "refuse":
                    waited = " and no seat became free in time" if hub.when_full == "wait" and request.wait_ms else ""
                    remedy = "try again later, or choose a smaller fraction or another pool"
                    yield self._refused(request, full.reason, f"{full.sentence}{waited}; {remedy}")
                    return
                expected = self._expected(waiter, position, first=told is None)
                progress = SeatProgress(
                    kind=ProgressKind.WAITING,
                    reason=full.reason,
                    sentence=full.sentence,
                    position=position,
                    **times(expected),
                )
                if progress != told:
                    yield progress
                    told = progress
                # Memory and habits change without events, so check again after a while.
                await within(min(PULSE_S, (deadline_ms - now_ms()) / 1000), changed)
        finally:
            if waiter in line:
                line.remove(waiter)
                self._notify()
            elif waiter.seat is not None and not waiter.given and waiter.seat.seat_id in self._seats:
                self._end(waiter.seat, "abandoned")

    def _expected(self, waiter: _Waiter, position: int, *, first: bool) -> Span | None:
        """Return the expected wait for a request at this position. If `first` is set, save it, to compare it with the actual wait later."""
        pool, seats = waiter.request.pool, len(self._of_pool(waiter.request.pool))
        stated = self.forecasts.expected(pool, position, seats)
        if first and stated is not None:
            worked_out = self.forecasts.worked_out(pool, position, seats)
            waiter.forecast = None if worked_out is None else (worked_out, stated)
        return stated

    def _serve(self, pool_name: str) -> PoolFull | None:
        """Reserve seats for the queued requests that fit. Return why the first remaining request does not fit.

        A request that gets a seat leaves the queue at once, so that the others don't have to wait for the seat to be written to the ledger.
        If the first request would exceed a limit, it is refused. A later one stays, because it may be within the limit when its turn comes.
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
                if waiter.forecast is not None:
                    waited_ms = now_ms() - waiter.since_ms
                    self._broker.arbiter.forecasts.seat_given(pool_name, *waiter.forecast, waited_ms)
                line.remove(waiter)
                left = True
            if any(self._is_kept_for(one, pool, hub) for one in passed):
                break
        if left:
            self._notify()
        return first_full

    def _place(
        self, waiter: _Waiter, pool: PoolSpec, hub: Pool, unplaced: list[tuple[int, SeatLoad, PoolFull]]
    ) -> PoolFull | str | None:
        """Return a device for the seat, or a `PoolFull` that explains why it does not fit. Raises NoRoomError if a limit would be exceeded.

        `unplaced` lists earlier requests that do not fit, and why. If this request needs at least as much as one of them, return the same
        answer without computing a new forecast.
        """
        request = waiter.request
        others = self._others(request)
        load = self.forecasts.load(request.owner, pool, waiter.memory_mib)
        check_limits(request, waiter.group, pool, others, self._revoked(request))
        self.budgets.check(Party(pool.name, request.owner, waiter.group, seated=True))
        comparable = not request.admitted and request.allowed_devices is None
        if comparable and len(others) == len(self._of_pool(request.pool)):  # it replaces no seat, which would free room
            for mib, other, full in unplaced:
                if waiter.memory_mib >= mib and load.mib >= other.mib and load.duty_milli >= other.duty_milli:
                    return full
        place = self.forecasts.full(request, pool, hub, waiter.memory_mib, others)
        if isinstance(place, PoolFull) and comparable:
            unplaced.append((waiter.memory_mib, load, place))
        return place

    def _is_kept_for(self, waiter: _Waiter, pool: PoolSpec, hub: Pool) -> bool:
        if waiter.passed_over < pool.max_passed_over:
            return False
        return not isinstance(self.forecasts.full(waiter.request, pool, hub, waiter.memory_mib, []), PoolFull)

    def _lets_pass(self, pool_name: str) -> bool:
        pool, hub = self._pool(pool_name)
        return not any(self._is_kept_for(waiter, pool, hub) for waiter in self._waiting.get(pool_name, ()))

    @staticmethod
    def _refused(request: SeatRequest, reason: str, sentence: str) -> SeatProgress:
        log.warning("no seat for %r: %s (%s)", request.owner, sentence, reason)
        return SeatProgress(kind=ProgressKind.REFUSED, reason=reason, sentence=sentence)

    def _reserve(self, waiter: _Waiter, hub: Pool, device_id: str | None) -> None:
        """Create the seat, which reserves room for it, and start writing it to the ledger. End all earlier seats of the same server."""
        request = waiter.request
        waiter.token = secrets.token_urlsafe(32)
        waiter.seat = seat = SeatRecord(
            seat_id=secrets.token_hex(12),
            owner=request.owner,
            server=request.server,
            group=waiter.group,
            pool=request.pool,
            fraction_milli=request.fraction_milli,
            memory_mib=waiter.memory_mib,
            priority=waiter.terms.priority,
            weight=waiter.terms.weight,
            max_kernels=hub.kernels_per_seat,
            uid=request.uid,
            device_id=device_id,
            token_sha256=token_digest(waiter.token),
            created_ms=wall_ms(),
            expires_ms=self._broker.deadlines.now_ms() + min(request.ttl_ms, _LONGEST_TTL_MS),
            hub=request.hub,
            admitted=request.admitted,
            allowed_devices=tuple(request.allowed_devices or ()),
            workload=request.workload,
            boot_id=boot_id() if request.workload is not None else "",
        )
        for older in [one for one in self._seats.values() if is_of_same_server(one, request)]:
            self._end(older, "replaced")
        self._seats[seat.seat_id] = seat
        waiter.written = self._broker.writer.submit(partial(self._broker.writer.ledger.save_seat, seat))

    async def _hand_out(self, waiter: _Waiter, seat: SeatRecord) -> SeatProgress:
        """Return the granted seat once it is in the ledger. Raises LedgerError. If this call is cancelled, the caller must end the seat."""
        if waiter.written is not None:
            try:
                await asyncio.shield(waiter.written)
            except LedgerError:
                if self._seats.pop(seat.seat_id, None) is not None:
                    self._notify()
                raise
        warning = await self.workloads.warning(seat)
        if seat.seat_id not in self._seats:
            return SeatProgress(
                kind=ProgressKind.REFUSED,
                reason="seat-ended",
                sentence="the seat ended while the broker was saving it: its time to live ran out, or a later request for the same "
                "server replaced it; start the server again",
            )
        waiter.given = True
        self.revocations.take_over(seat, partial(self.draws.check_takeover, seat))
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
            warning=warning,
        )

    async def confirm(self, seat_id: str) -> SeatStatus:
        """Make a seat permanent, now that the hub has saved it. Return once this has been recorded in the ledger.

        Raises NotFoundError or LedgerError.
        """
        seat = self._known(seat_id)
        if seat.expires_ms is not None:
            confirmed = structs.replace(seat, expires_ms=None)
            await self._broker.writer.run(partial(self._broker.writer.ledger.save_seat, confirmed))
            # The seat may have ended by now. Or its workload's group may have become known, which was then written with the expiry.
            seat = structs.replace(self._known(seat_id), expires_ms=None)
            self._keep(seat)
        return self.status(seat)

    def _save_backup_record(self, seat: SeatRecord) -> None:
        """Back up the record of a confirmed seat. An unconfirmed seat needs no backup, because the hub can request another."""
        if self._broker.records.files is not None and seat.expires_ms is None:
            self._broker.records.files.put(seat)

    def _known(self, seat_id: str) -> SeatRecord:
        seat = self._seats.get(seat_id)
        if seat is None:
            raise NotFoundError(f"unknown seat {seat_id[:MAX_NAME]!r}; it may have expired", reason="unknown-seat")
        return seat

    def find(self, seat_id: str) -> SeatRecord | None:
        return self._seats.get(seat_id)

    async def release(self, seat_id: str) -> None:
        if (seat := self._seats.get(seat_id)) is not None:
            await asyncio.wait([self._end(seat, "released")])

    def _keep(self, seat: SeatRecord) -> None:
        self._seats[seat.seat_id] = seat
        self._broker.writer.submit(partial(self._broker.writer.ledger.save_seat, seat))
        self._save_backup_record(seat)

    def _workload_gone(self, seat: SeatRecord) -> None:
        self._end(seat, "workload-gone")
        self.revocations.end_leases(seat.seat_id)

    def _end(self, seat: SeatRecord, reason: str) -> asyncio.Future[None]:
        del self._seats[seat.seat_id]
        if self._broker.records.files is not None:
            self._broker.records.files.drop(seat.seat_id, SeatRecord)
        log.info("seat %s of %r ended: %s", seat.seat_id[:8], seat.owner, reason)
        ended_ms = wall_ms()
        self.forecasts.seat_ended(seat.pool, ended_ms - seat.created_ms)
        end = partial(self._broker.writer.ledger.end_seat, seat.seat_id, ended_ms, reason)
        written = self._broker.writer.submit(end, again=True)  # otherwise the next broker would restore it forever
        self.revocations.seat_ended(seat)
        self._notify()
        return written

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._expire())
                group.create_task(self._usage_recorder.run())
                group.create_task(self.workloads.run())
        finally:
            await self.revocations.close()

    async def _expire(self) -> None:
        while True:
            now = self._broker.deadlines.now_ms()
            for seat in self.live():
                if seat.expires_ms is not None and seat.expires_ms <= now:
                    self._end(seat, "expired")
            due = min((seat.expires_ms - now for seat in self.live() if seat.expires_ms is not None), default=None)
            await within(_DAY_S if due is None else max(0.05, due / 1000), self._changed)

    def _pool(self, name: str) -> tuple[PoolSpec, Pool]:
        pool = self._broker.arbiter.pools().get(name)
        if pool is None:
            names = ", ".join(sorted(self._broker.arbiter.pools())) or "none"
            raise BadRequestError(f"there is no pool named {name[:MAX_NAME]!r}; pools: {names}", reason="unknown-pool")
        return pool, self.forecasts.hub(name)

    def _pool_changed(self, pool: Pool) -> None:
        self._broker.metering.set_tariff(pool.name, pool.tariff)
        self._notify()  # waiting requests check again

    def _of_pool(self, pool: str) -> list[SeatRecord]:
        return [seat for seat in self._seats.values() if seat.pool == pool]

    def _others(self, request: SeatRequest) -> list[SeatRecord]:
        return [seat for seat in self._of_pool(request.pool) if not is_of_same_server(seat, request)]

    def _revoked(self, request: SeatRequest) -> list[LeaseView]:
        return self.revocations.of_user(request.pool, request.owner, request.server)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _precedes(other: _Waiter, waiter: _Waiter) -> bool:
    """Return whether `other`, which is already queued, stays ahead of a new request. Requests from Slurm and Kubernetes go first."""
    if waiter.request.admitted or other.request.admitted:
        return other.request.admitted
    return other.terms.priority >= waiter.terms.priority


def _others_wait(count: int) -> str:
    return "1 other is waiting" if count == 1 else f"{count} others are waiting"
