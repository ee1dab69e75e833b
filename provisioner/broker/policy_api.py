"""The routes by which people steer leases that exist, and administrators steer devices."""

import asyncio

from provisioner.broker.handler import Handler, Stream
from provisioner.protocol.messages import DrainRequest, PinRequest, ResizeRequest

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
    (_LEASE + "/story", _Story),
    (_LEASE + "/history", _History),
    (_DEVICE + "/drain", _Drain),
    (_DEVICE + "/undrain", _Undrain),
)
