"""The routes by which people steer leases that exist, and administrators steer devices."""

import asyncio
from dataclasses import asdict

from fractional_gpu.broker.api.handler import Handler, Stream
from fractional_gpu.protocol.messages import (
    Done,
    DrainRequest,
    EvictRequest,
    MoveRequest,
    PinRequest,
    ResizeRequest,
)

__all__ = ["POLICY_ROUTES"]

_LEASE = r"/v1/leases/([0-9a-zA-Z_-]{1,64})"
_DEVICE = r"/v1/devices/([^/]{1,200})"


class _Pin(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        request = self.take(PinRequest)
        async with self.steered("pin", kernel, **asdict(request)):
            status = await self.service.steering.pin(kernel, request)
        self.reply(status)


class _Unpin(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        async with self.steered("unpin", kernel):
            status = await self.service.steering.unpin(kernel, self.actor(kernel))
        self.reply(status)


class _Resize(Stream):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        request = self.take(ResizeRequest)

        async def work() -> None:
            async with self.steered("resize", kernel, **asdict(request)):
                status = await self.service.steering.resize(kernel, request)
            self.reply(status)

        await self.run(asyncio.create_task(work()))


class _Move(Stream):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        self.service.steering.must_administer(self.peer, "move kernels")
        request = self.take(MoveRequest)

        async def work() -> None:
            async with self.steered("move", kernel, even_own=True, **asdict(request)):
                to = None if request.device is None else self.service.steering.device(self.peer, request.device)
                status = await self.service.administering.move(kernel, to)
            self.reply(status)

        await self.run(asyncio.create_task(work()))


class _Evict(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        self.service.steering.must_administer(self.peer, "end kernels of others")
        request = self.take(EvictRequest)
        async with self.steered("evict", kernel, even_own=True, **asdict(request)):
            await self.service.administering.evict(self.peer, kernel, request)
        self.reply(Done())


class _End(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)
        async with self.steered("end", kernel, processes=[one.identity.pid for one in kernel.left]):
            await self.service.end(kernel)
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
        async with self.audited("drain", device, **asdict(request)):
            status = await self.service.steering.drain(self.peer, device, evict_busy=request.evict_busy)
        self.reply(status)


class _Undrain(Handler):
    async def post(self, device: str) -> None:
        async with self.audited("undrain", device):
            status = await self.service.steering.undrain(self.peer, device)
        self.reply(status)


POLICY_ROUTES: tuple[tuple[str, type[Handler]], ...] = (
    (_LEASE + "/pin", _Pin),
    (_LEASE + "/unpin", _Unpin),
    (_LEASE + "/resize", _Resize),
    (_LEASE + "/move", _Move),
    (_LEASE + "/evict", _Evict),
    (_LEASE + "/end", _End),
    (_LEASE + "/story", _Story),
    (_LEASE + "/history", _History),
    (_DEVICE + "/drain", _Drain),
    (_DEVICE + "/undrain", _Undrain),
)
