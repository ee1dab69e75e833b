"""The routes of seats and pools, for administrators only (the hub shows its users their seats); and of capacity, for any user."""

from contextlib import aclosing, nullcontext

from fractional_gpu.broker.api.handler import Handler, StreamHandler
from fractional_gpu.protocol.errors import ForbiddenError
from fractional_gpu.protocol.messages import Done, ProgressKind
from fractional_gpu.protocol.seats import OfferRequest, PoolChange, SeatRequest

_SEAT = r"/v1/seats/([0-9a-zA-Z_-]{1,64})"


class _AdminHandler(Handler):
    """A route for the hub."""

    def prepare(self) -> None:
        super().prepare()
        require_admin(self)


class _AdminStream(StreamHandler):
    """A streaming route for the hub."""

    def prepare(self) -> None:
        super().prepare()
        require_admin(self)


class _Capacity(Handler):
    async def get(self) -> None:
        self.reply(await self.service.seats.capacity())


def require_admin(handler: Handler) -> None:
    """Raise ForbiddenError unless the peer is an administrator."""
    if not handler.peer.admin:
        raise ForbiddenError(
            f"uid {handler.peer.credentials.uid} may not do this: "
            "only the hub (root, or the broker's own user) gives seats and changes pools",
            reason="not-admin",
        )


class _Offers(_AdminHandler):
    def post(self) -> None:
        self.reply(self.service.seats.offers(self.decode_body(OfferRequest)))


class _Seats(_AdminStream):
    def get(self) -> None:
        self.reply(self.service.seats.listing())

    async def post(self) -> None:
        request = self.decode_body(SeatRequest)

        async def work() -> None:
            last = None
            whose = _whose(request.owner, request.server)
            async with (
                self.audited("seat.give", whose, **_terms(request)) as act,
                aclosing(self.service.seats.take(request)) as stream,
            ):
                async for progress in stream:
                    if progress.kind == ProgressKind.WAITING:
                        await self.write_line(progress)
                        continue
                    last = progress  # sent when the audit log has it
                    if act is not None and progress.kind == ProgressKind.REFUSED:
                        act.refused(progress.reason, progress.sentence)
            if last is not None:
                await self.write_line(last)

        await self.run(work())


class _Seat(_AdminHandler):
    async def delete(self, seat_id: str) -> None:
        seat = self.service.seats.find(seat_id)
        if seat is not None:
            async with self.audited("seat.end", _whose(seat.owner, seat.server), seat=seat_id, pool=seat.pool):
                await self.service.seats.release(seat_id)
        self.reply(Done())


class _Confirm(_AdminHandler):
    async def post(self, seat_id: str) -> None:
        self.reply(await self.service.seats.confirm(seat_id))


class _Pools(_AdminHandler):
    def get(self) -> None:
        self.reply(self.service.seats.pools.listing())


class _Pool(_AdminHandler):
    async def post(self, name: str) -> None:
        change = self.decode_body(PoolChange)
        async with self.audited("pool.change", name, keys=change.keys) if change.keys else nullcontext():
            keys = self.service.seats.pools.change(name, change, uid=self.peer.credentials.uid)
        self.reply(keys)


def _whose(owner: str, server: str) -> str:
    return f"{owner}/{server}" if server else owner


def _terms(request: SeatRequest) -> dict[str, object]:
    return {
        "pool": request.pool,
        "fraction_milli": request.fraction_milli,
        "memory_mib": request.memory_mib,
        "server_uid": request.uid,
    }


SEAT_ROUTES: tuple[tuple[str, type[Handler]], ...] = (
    ("/v1/capacity", _Capacity),
    ("/v1/offers", _Offers),
    ("/v1/seats", _Seats),
    (_SEAT, _Seat),
    (_SEAT + "/confirm", _Confirm),
    ("/v1/pools", _Pools),
    (r"/v1/pools/([0-9a-z._-]{1,63})", _Pool),
)
