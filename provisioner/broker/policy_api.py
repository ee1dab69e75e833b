"""The routes by which people steer leases that exist, and administrators steer devices."""

import asyncio

from provisioner.broker.handler import Handler, Stream
from provisioner.protocol.messages import Done, DrainRequest, EvictRequest, MoveRequest, PinRequest, ResizeRequest

__all__ = ["POLICY_ROUTES"]

_LEASE = r"/v1/leases/([0-9a-zA-Z_-]{1,64})"
_DEVICE = r"/v1/devices/([^/]{1,200})"


class _Pin(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        self.reply(await self.service.steering.pin(kernel, self.take(PinRequest)))


class _Unpin(Handler):
    async def post(self, lease_id: str) -> None:
        self.reply(await self.service.steering.unpin(self.service.find(self.peer, lease_id)))


class _Resize(Stream):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        request = self.take(ResizeRequest)

        async def work() -> None:
            self.reply(await self.service.steering.resize(kernel, request))

        await self.run(asyncio.create_task(work()))


class _Move(Stream):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        self.service.steering.must_administer(self.peer, "move kernels")
        request = self.take(MoveRequest)
        to = None if request.device is None else self.service.steering.device(self.peer, request.device)

        async def work() -> None:
            self.reply(await self.service.administering.move(kernel, to))

        await self.run(asyncio.create_task(work()))


class _Evict(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        self.service.steering.must_administer(self.peer, "end kernels of others")
        await self.service.administering.evict(kernel, self.take(EvictRequest))
        self.reply(Done())


class _Story(Handler):
    async def get(self, lease_id: str) -> None:
        self.reply(await self.service.steering.story(self.service.find(self.peer, lease_id)))


class _History(Handler):
    async def get(self, lease_id: str) -> None:
        self.reply(await self.service.steering.history(self.service.find(self.peer, lease_id)))


class _Drain(Handler):
    async def post(self, device: str) -> None:
        request = self.take(DrainRequest)
        self.reply(await self.service.steering.drain(self.peer, device, evict_busy=request.evict_busy))


class _Undrain(Handler):
    async def post(self, device: str) -> None:
        self.reply(await self.service.steering.undrain(self.peer, device))


POLICY_ROUTES: tuple[tuple[str, type[Handler]], ...] = (
    (_LEASE + "/pin", _Pin),
    (_LEASE + "/unpin", _Unpin),
    (_LEASE + "/resize", _Resize),
    (_LEASE + "/move", _Move),
    (_LEASE + "/evict", _Evict),
    (_LEASE + "/story", _Story),
    (_LEASE + "/history", _History),
    (_DEVICE + "/drain", _Drain),
    (_DEVICE + "/undrain", _Undrain),
)
