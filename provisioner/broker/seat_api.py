"""The routes of seats and pools. Administrators only: a hub's users learn of their seats from the hub."""

import asyncio
from contextlib import aclosing

from provisioner.broker.handler import Handler, Stream
from provisioner.protocol.errors import ForbiddenError
from provisioner.protocol.messages import Done
from provisioner.protocol.seats import OfferRequest, PoolChange, SeatRequest

__all__ = ["SEAT_ROUTES"]

_SEAT = r"/v1/seats/([0-9a-zA-Z_-]{1,64})"


class _AdminHandler(Handler):
    """A route that is the hub's."""

    def prepare(self) -> None:
        super().prepare()
        require_admin(self)


class _AdminStream(Stream):
    """A stream that is the hub's."""

    def prepare(self) -> None:
        super().prepare()
        require_admin(self)


def require_admin(handler: Handler) -> None:
    """Raise ForbiddenError unless the peer is an administrator."""
    if not handler.peer.admin:
        raise ForbiddenError(
            f"uid {handler.peer.credentials.uid} may not do this: seats are given by the hub (root, or the broker's own user)",
            reason="not-admin",
        )


class _Offers(_AdminHandler):
    def post(self) -> None:
        self.reply(self.service.seats.offers(self.take(OfferRequest)))


class _Seats(_AdminStream):
    def get(self) -> None:
        self.reply(self.service.seats.listing())

    async def post(self) -> None:
        request = self.take(SeatRequest)

        async def work() -> None:
            async with aclosing(self.service.seats.take(request)) as stream:
                async for progress in stream:
                    await self.line(progress)

        await self.run(asyncio.create_task(work()))


class _Seat(_AdminHandler):
    def delete(self, seat_id: str) -> None:
        self.service.seats.release(seat_id)
        self.reply(Done())


class _Confirm(_AdminHandler):
    def post(self, seat_id: str) -> None:
        self.reply(self.service.seats.confirm(seat_id))


class _Pools(_AdminHandler):
    def get(self) -> None:
        self.reply(self.service.seats.pools.listing())


class _Pool(_AdminHandler):
    def post(self, name: str) -> None:
        change = self.take(PoolChange)
        self.reply(self.service.seats.pools.change(name, change, uid=self.peer.credentials.uid))


SEAT_ROUTES: tuple[tuple[str, type[Handler]], ...] = (
    ("/v1/offers", _Offers),
    ("/v1/seats", _Seats),
    (_SEAT, _Seat),
    (_SEAT + "/confirm", _Confirm),
    ("/v1/pools", _Pools),
    (r"/v1/pools/([0-9a-z._-]{1,63})", _Pool),
)
