"""The routes that change existing leases, and those by which administrators move, evict and drain."""

from msgspec import to_builtins

from fractional_gpu.broker.api.handler import Handler, StreamHandler
from fractional_gpu.protocol.messages import (
    Done,
    DrainRequest,
    EvictRequest,
    ExpectRequest,
    MoveRequest,
    PinRequest,
    ResizeRequest,
)

_LEASE = r"/v1/leases/([0-9a-zA-Z_-]{1,64})"
_DEVICE = r"/v1/devices/([^/]{1,200})"


class _Expect(Handler):
    def post(self, lease_id: str) -> None:
        self.service.lease_control.expect(self.find(lease_id), self.decode_body(ExpectRequest))
        self.reply(Done())


class _Pin(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        request = self.decode_body(PinRequest)
        async with self.audited_for_lease("pin", kernel, **to_builtins(request)):
            status = await self.service.lease_control.pin(kernel, request)
        self.reply(status)


class _Unpin(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        async with self.audited_for_lease("unpin", kernel):
            status = await self.service.lease_control.unpin(kernel, self.actor(kernel))
        self.reply(status)


class _Resize(StreamHandler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        request = self.decode_body(ResizeRequest)

        async def work() -> None:
            async with self.audited_for_lease("resize", kernel, **to_builtins(request)):
                status = await self.service.lease_control.resize(kernel, request)
            self.reply(status)

        await self.run(work())


class _Move(StreamHandler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        self.service.lease_control.must_administer(self.peer, "move kernels")
        request = self.decode_body(MoveRequest)

        async def work() -> None:
            async with self.audited_for_lease("move", kernel, even_own=True, **to_builtins(request)):
                to = None if request.device is None else self.service.lease_control.device(self.peer, request.device)
                status = await self.service.admin.move(kernel, to)
            self.reply(status)

        await self.run(work())


class _Evict(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        self.service.lease_control.must_administer(self.peer, "end kernels of others")
        request = self.decode_body(EvictRequest)
        async with self.audited_for_lease("evict", kernel, even_own=True, **to_builtins(request)):
            await self.service.admin.evict(self.peer, kernel, request)
        self.reply(Done())


class _End(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        async with self.audited_for_lease(
            "end", kernel, processes=[one.identity.pid for one in kernel.ending.survivors]
        ):
            await self.service.end(kernel)
        self.reply(Done())


class _Story(Handler):
    async def get(self, lease_id: str) -> None:
        self.reply(await self.service.lease_control.story(self.find(lease_id)))


class _History(Handler):
    async def get(self, lease_id: str) -> None:
        self.reply(await self.service.lease_control.history(self.find(lease_id)))


class _Drain(Handler):
    async def post(self, device: str) -> None:
        request = self.decode_body(DrainRequest)
        async with self.audited("drain", device, **to_builtins(request)):
            status = await self.service.lease_control.drain(
                self.peer, device, evict_busy=request.evict_busy, deadline_in_ms=request.deadline_in_ms
            )
        self.reply(status)


class _Undrain(Handler):
    async def post(self, device: str) -> None:
        async with self.audited("undrain", device):
            status = await self.service.lease_control.undrain(self.peer, device)
        self.reply(status)


CONTROL_ROUTES: tuple[tuple[str, type[Handler]], ...] = (
    (_LEASE + "/expect", _Expect),
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
