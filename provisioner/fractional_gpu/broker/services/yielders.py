"""Asks model servers to release GPU memory that a kernel is waiting for, and later wakes those it put to sleep (`c.GPUBroker.yielders`).

- A server is asked if one of its processes holds memory on the device, and if either the server belongs to the waiting kernel's user or
  `yield_for_everyone` is set. A server's owner is the user who opened its listening socket. For a seat's kernels, only `yield_for_everyone`
  matters, because containers share uids.
- Servers are not trusted: answers are limited in time and size, redirects are not followed, and no proxy is used. Memory counts as free
  only when the device reports it as free.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import closing, suppress

from msgspec import MsgspecError, Struct
from msgspec.json import decode
from tornado.httpclient import HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import within
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.config.model_servers import ModelServer
from fractional_gpu.host.process import PROC, entries, holds_open, read_stat
from fractional_gpu.protocol.status import Stranger

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0  # for all requests that are sent to a server at once
_MOST_BYTES, _MOST_MODELS = 65_536, 16
_PAUSE_S, _PERIOD_S = 0.1, 1.0  # least and longest time between two looks
_AGAIN_S = 10.0  # a server is asked at most this often
_LOOKS = 6  # looks at the devices after an answer, since servers free their memory a moment later
_DEEPEST = 8  # generations from a process on a device up to the server that started it
# Addresses of sockets that accept connections to 127.0.0.1, as /proc/net writes them.
_ADDRESSES = (b"0100007F", b"0" * 8, b"0" * 32, b"0000000000000000FFFF00000100007F")

Refresh = Callable[[], Coroutine[None, None, None]]
Held = dict[str, list[Stranger]]  # by device: a server's processes, and what they used at that time


class _Model(Struct):
    name: str
    size_vram: int = 1  # bytes


class _Loaded(Struct):
    """What a server has loaded. Ollama answers with `models`, and vLLM with `is_sleeping`."""

    models: list[_Model] = []
    is_sleeping: bool | None = None


class Yielder:
    """Asks `server` to release memory for its owner's kernels, or for everyone's if `everyone` is set. `refresh` samples the devices."""

    def __init__(self, broker: Broker, server: ModelServer, *, everyone: bool, refresh: Refresh) -> None:
        self._broker, self._server, self._everyone, self._refresh = broker, server, everyone, refresh
        self._next_s = 0.0  # when the server may be asked again
        self._asked = ""  # a sentence that says what it was asked to do
        self._uids: set[int] = set()  # the server's owners
        self._held: Held = {}  # what the server held when it was asked
        self._released: Held = {}  # what the server held before its sleep
        broker.asked_servers.append(self.asked)

    async def run(self) -> None:
        while True:
            queue = self._broker.queue_changed
            try:
                await self.look()
            except (OSError, ValueError) as error:  # out of descriptors, or /proc is unreadable
                log.error("cannot look for model servers: %s", error)  # noqa: TRY400 - the sentence says it
            await asyncio.sleep(_PAUSE_S)
            await within(_PERIOD_S, queue)

    async def look(self) -> None:
        """Ask the server to release memory that kernels are waiting for. Wake it once no kernel is waiting for its devices.

        If this call is cancelled, a request may already have been sent.
        """
        if time.monotonic() >= self._next_s and any(
            self._broker.arbiter.stranger_devices(one) for one in self._broker.kernels
        ):
            self._next_s = time.monotonic() + _PERIOD_S
            await self._ask()
        if self._released:
            await self._wake()

    def asked(self, kernel: Kernel) -> str:
        """Return what the server was asked to do for this waiting kernel, or "" once it has released most of its memory."""
        uses = {device_id: self._use(self._held, device_id) for device_id in self._held}
        there = {device_id for device_id, (before_mib, now_mib) in uses.items() if now_mib > before_mib / 2}
        return self._asked if self._may_ask(kernel, there) else ""

    def _use(self, held: Held, device_id: str) -> tuple[int, int]:
        """Return how many MiB of the device the `held` processes used when they were recorded, and how many they use now."""
        now_mib = {one.pid: one.used_mib for one in self._broker.enforcement.strangers.get(device_id, ())}
        return sum(one.used_mib for one in held[device_id]), sum(now_mib.get(one.pid, 0) for one in held[device_id])

    def _may_ask(self, kernel: Kernel, device_ids: Collection[str]) -> bool:
        """Return whether the kernel is waiting for memory on one of these devices and the settings allow asking the server for it."""
        arbiter = self._broker.arbiter
        view = arbiter.lease(kernel.lease_id)
        is_own = view is not None and not view.spec.seat and self._uids == {kernel.uid}
        return (self._everyone or is_own) and not set(device_ids).isdisjoint(arbiter.stranger_devices(kernel.lease_id))

    async def _ask(self) -> None:
        """Ask the server to release memory if `_may_ask` is true for any kernel. Tell those kernels' users, and measure the effect."""
        server, strangers, self._asked = self._server, dict(self._broker.enforcement.strangers), ""
        self._uids, self._held = await asyncio.to_thread(_holdings, server, strangers)
        if not any(self._may_ask(kernel, self._held) for kernel in self._broker.kernels.values()):
            return
        self._next_s = time.monotonic() + _AGAIN_S
        but = ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                loaded = await _loaded(server)
                self._released = self._held if server.wake and loaded else self._released
                for name in loaded:
                    await _fetch(server, server.path, server.body.replace("MODEL", json.dumps(name)))
                but = "" if loaded else ", but it says that nothing is loaded"
        except ConnectionError as error:
            but = f", but it {error}"
        except TimeoutError:
            but = f", but it did not respond within {_TIMEOUT_S:g} s"
        self._asked = f"asked {server.title} to {'sleep' if server.wake else 'unload its models'}{but}"
        log.info("%s (it loses %s)", self._asked, server.loses)
        told = [kernel for kernel in self._broker.kernels.values() if self.asked(kernel)]
        for kernel in told:
            self._broker.record_line(kernel.lease_id, "wait.asked-server", self._asked)
            kernel.notify()
        for _ in range(_LOOKS):
            if any(map(self.asked, told)):
                await self._refresh()

    async def _wake(self) -> None:
        """Wake the server once no kernel is waiting for its devices and they have room for the memory that it released."""
        arbiter, server = self._broker.arbiter, self._server
        pools = {name for name, pool in arbiter.pools().items() if self._released.keys() & set(pool.devices)}
        if any(view.spec.pool in pools and arbiter.waits(view.spec.lease_id) for view in arbiter.leases()):
            return
        free_mib = {one.device_id: one.leasable_mib - one.reserved_mib - one.stranger_mib for one in arbiter.devices()}
        for device_id in self._released:
            before_mib, now_mib = self._use(self._released, device_id)
            if free_mib.get(device_id, 0) < before_mib - now_mib:
                return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                if not await _loaded(server):
                    await _fetch(server, server.wake, "")
                    log.info("woke %s", server.title)
        except TimeoutError:
            return  # a later look will check again whether it sleeps
        except ConnectionError as error:
            log.warning("cannot wake %s: it %s", server.title, error)
        self._released = {}


async def _loaded(server: ModelServer) -> list[str]:
    """Return the names of the loaded models ("" means all models). The list is empty if the server is asleep.

    Raises ConnectionError with a message that explains what went wrong.
    """
    if not server.loaded:
        return [""]
    try:
        answer = decode(await _fetch(server, server.loaded), type=_Loaded)
    except (MsgspecError, RecursionError):
        raise ConnectionError("does not report what is loaded") from None
    return [one.name for one in answer.models if one.size_vram][:_MOST_MODELS] + [""] * (answer.is_sleeping is False)


async def _fetch(server: ModelServer, path: str, body: str | None = None) -> bytes:
    """Send a GET request, or a POST request if there is a body. Return the answer. A timeout stops the request, but cancellation does not.

    Raises ConnectionError with a message that explains what went wrong.
    """
    request = HTTPRequest(
        f"http://127.0.0.1:{server.port}{path}",
        method="GET" if body is None else "POST",
        headers={"Content-Type": "application/json"},
        body=body,
        request_timeout=_TIMEOUT_S,
        follow_redirects=False,
        decompress_response=False,
    )
    try:
        with closing(SimpleAsyncHTTPClient(force_instance=True, max_body_size=_MOST_BYTES)) as client:
            response = await client.fetch(request, raise_error=False)
    except Exception as error:  # what the server sends decides which error this is
        raise ConnectionError(f"is not responding ({type(error).__name__})") from error
    if response.code // 100 != 2:
        raise ConnectionError(f"responded with status {response.code}")
    return response.body


def _holdings(server: ModelServer, strangers: Mapping[str, Sequence[Stranger]]) -> tuple[set[int], Held]:
    """Return the owners of the server's listening sockets, and the server's processes on each device. Blocks."""
    locals_ = {b"%s:%04X" % (address, server.port) for address in _ADDRESSES}
    owners: dict[str, int] = {}  # by socket
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # the machine has no IPv6
            for fields in map(bytes.split, entries(f"{PROC}/net/{table}", b"\n")):
                if len(fields) > 9 and fields[1] in locals_ and fields[3] == b"0A":
                    owners[f"socket:[{int(fields[9])}]"] = int(fields[7])
    held = {device_id: [one for one in there if _is_of(one, owners, server)] for device_id, there in strangers.items()}
    return set(owners.values()), {device_id: there for device_id, there in held.items() if there}


def _is_of(one: Stranger, owners: Mapping[str, int], server: ModelServer) -> bool:
    """Return whether the process belongs to the server.

    It does if it or one of its ancestors has the socket open, or if its user owns the socket and it runs one of the server's commands.
    """
    if one.uid in owners.values() and one.command.startswith(server.commands):
        return True
    pid = one.pid
    with suppress(ProcessLookupError, PermissionError):  # the process has ended, or is hidden
        for _ in range(_DEEPEST):
            if holds_open(pid, owners.__contains__):
                return True
            pid = read_stat(pid).ppid
    return False
