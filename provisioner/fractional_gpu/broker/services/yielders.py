"""Asks model servers to release GPU memory that a kernel waits for, and later wakes those that only sleep (`c.GPUBroker.yielders`).

- A server is asked if one of its processes holds memory of the device, and if it is the waiting kernel's user's or `yield_for_everyone` is
  set. Its owner is the user who opened the listening socket. A seat's kernels have no user here: containers share uids.
- Servers are not trusted: answers are bounded in time and size, redirects are not followed, and no proxy is used. The names of a
  server's models are shown only to its own user. Memory is free when the device says so.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Annotated

from msgspec import Meta, MsgspecError, Struct
from msgspec.json import decode
from tornado.httpclient import HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import within
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.config.model_servers import ModelServer
from fractional_gpu.core.units import format_memory
from fractional_gpu.host.accounts import user_name
from fractional_gpu.host.process import PROC, entries, holds_open, owner_uid, read_stat
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.status import Stranger

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0  # for all requests to a server at one time
_MOST_BYTES, _MOST_MODELS, _LONGEST_NAME = 65_536, 16, 60
_PAUSE_S, _PERIOD_S = 0.1, 1.0  # between two looks: at least, and at most
_AGAIN_S = 10.0  # a server is asked at most this often
_LOOKS = 6  # at the devices after an answer: servers free their memory a moment later
_DEEPEST = 8  # generations from a process on a device to the server that started it
# Addresses of sockets that answer for a host, as /proc/net writes them.
_ADDRESSES = {
    "127.0.0.1": (b"0100007F", b"0" * 8, b"0" * 32, b"0000000000000000FFFF00000100007F"),
    "[::1]": (b"0" * 24 + b"01000000", b"0" * 32),
}

Refresh = Callable[[], Coroutine[None, None, None]]


class _Model(Struct):
    name: str = ""
    model: str = ""
    size_vram: Annotated[int, Meta(ge=0, lt=1 << 50)] | None = None  # bytes


class _Loaded(Struct):
    """What is loaded: Ollama answers with `models`, llama-swap with `running`, vLLM with `is_sleeping`."""

    models: list[_Model] = []
    running: list[_Model] = []
    is_sleeping: bool = False


class _Asked(Struct):
    """A server that was asked, its owners, and the MiB that it used of each device; the models it had, and what went wrong."""

    server: ModelServer
    uids: set[int]
    used_mib: dict[str, int]
    models: str = ""
    but: str = ""

    def sentence(self, *, own: bool) -> str:
        who = self.server.title if own else f"{self.server.title} of user {user_name(min(self.uids))}"
        what = "sleep" if self.server.wake else f"unload {(own and self.models) or 'its models'}"
        return f"asked {who} to {what}{self.but}"


class Yielders:
    """Asks `servers`; for all users' kernels if `everyone`. `refresh` samples the devices."""

    def __init__(self, broker: Broker, servers: Collection[ModelServer], *, everyone: bool, refresh: Refresh) -> None:
        self._broker, self._servers, self._everyone, self._refresh = broker, servers, everyone, refresh
        self._next_s = dict.fromkeys(servers, 0.0)
        self._asked: list[_Asked] = []  # those that are not due again
        self._asleep: dict[ModelServer, dict[str, int]] = {}  # what each used of each device before, MiB

    async def run(self) -> None:
        while True:
            queue = self._broker.queue_changed
            try:
                await self.look()
            except (OSError, ValueError) as error:  # no descriptors, or /proc is unreadable
                log.error("cannot look for model servers: %s", error)  # noqa: TRY400 - the sentence says it
            await asyncio.sleep(_PAUSE_S)
            await within(_PERIOD_S, queue)

    async def look(self) -> None:
        """Ask servers for memory for the kernels that wait now, and wake servers. A cancelled request may already have been sent."""
        due = [one for one in self._servers if time.monotonic() >= self._next_s[one]]
        self._asked = [one for one in self._asked if one.server not in due]
        if waiting := self._waiting():
            found = await asyncio.gather(*(self._ask(server, waiting) for server in due))
            self._asked += [one for one in found if one is not None]
            looks = _LOOKS if any(found) else 0
            while looks > 0 and self._waiting():
                await self._refresh()
                looks -= 1
        for server in due:
            if server in self._asleep:
                await self._wake(server)

    def _waiting(self) -> dict[Kernel, set[str]]:
        """Return the kernels that wait for memory without a lease, and its devices. Tell each what was asked for it."""
        waiting = {}
        for kernel in self._broker.kernels.values():
            if device_ids := set(self._broker.arbiter.stranger_devices(kernel.lease_id)):
                waiting[kernel] = device_ids
            told = [one for one in self._asked if self._concerns(one, kernel, device_ids)]
            sentence = "; ".join(one.sentence(own=self._uid(kernel) in one.uids) for one in told)
            if sentence != kernel.asked_server:
                kernel.asked_server = sentence
                if sentence:
                    self._broker.record_line(kernel.lease_id, "wait.asked-server", sentence)
                kernel.notify()
        return waiting

    def _concerns(self, asked: _Asked, kernel: Kernel, device_ids: set[str]) -> bool:
        """Whether the server may be asked for the kernel, and has memory of one of these devices."""
        return bool(device_ids & asked.used_mib.keys()) and (self._everyone or asked.uids == {self._uid(kernel)})

    def _uid(self, kernel: Kernel) -> int | None:
        view = self._broker.arbiter.lease(kernel.lease_id)
        return None if view is None or view.spec.seat else kernel.uid

    async def _ask(self, server: ModelServer, waiting: Mapping[Kernel, set[str]]) -> _Asked | None:
        """Ask the server if it may be asked for one of the kernels."""
        self._next_s[server] = time.monotonic() + _PERIOD_S
        asked = _Asked(server, *await asyncio.to_thread(_holdings, server, dict(self._broker.enforcement.strangers)))
        if not any(self._concerns(asked, kernel, device_ids) for kernel, device_ids in waiting.items()):
            return None
        self._next_s[server] = time.monotonic() + _AGAIN_S
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                loaded = await _loaded(server)
                models = [one for one in loaded.models + loaded.running if one.size_vram != 0][:_MOST_MODELS]
                if loaded.is_sleeping or (server.loaded and not server.wake and not models):
                    raise ConnectionError("says that nothing is loaded")  # noqa: TRY301 - as if the request had failed
                asked.models = ", ".join(map(_described, models))
                if server.wake:
                    self._asleep[server] = asked.used_mib
                for one in models if "MODEL" in server.body else [_Model()]:
                    await _fetch(server, server.path, server.body.replace("MODEL", json.dumps(one.name)))
        except ConnectionError as error:
            asked.but = f", but it {error}"
        except TimeoutError:
            asked.but = f", but it has not answered within {_TIMEOUT_S:g} s"
        log.info("%s (it loses %s)", asked.sentence(own=True), server.loses)
        return asked

    async def _wake(self, server: ModelServer) -> None:
        """Wake the server once no kernel waits for its devices, and what it released fits on them."""
        self._next_s[server] = time.monotonic() + _PERIOD_S
        arbiter, before_mib = self._broker.arbiter, self._asleep[server]
        pools = {name for name, pool in arbiter.pools().items() if before_mib.keys() & set(pool.devices)}
        if any(view.spec.pool in pools and arbiter.waits(view.spec.lease_id) for view in arbiter.leases()):
            return
        _, used_mib = await asyncio.to_thread(_holdings, server, dict(self._broker.enforcement.strangers))
        free_mib = {one.device_id: one.leasable_mib - one.reserved_mib - one.stranger_mib for one in arbiter.devices()}
        if any(free_mib.get(one, 0) < mib - used_mib.get(one, 0) for one, mib in before_mib.items()):
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                if (await _loaded(server)).is_sleeping:
                    await _fetch(server, server.wake, "")
                    log.info("woke %s", server.title)
        except TimeoutError:
            return  # a later look asks again whether it sleeps
        except ConnectionError as error:
            log.warning("cannot wake %s: it %s", server.title, error)
        del self._asleep[server]


async def _loaded(server: ModelServer) -> _Loaded:
    try:
        return decode(await _fetch(server, server.loaded), type=_Loaded) if server.loaded else _Loaded()
    except (MsgspecError, RecursionError):
        raise ConnectionError("does not say what is loaded") from None


async def _fetch(server: ModelServer, path: str, body: str | None = None) -> bytes:
    """GET the path, or POST a body. Raises ConnectionError that says what went wrong. Once begun, a request ends only by its timeout."""
    client = SimpleAsyncHTTPClient(force_instance=True, max_body_size=_MOST_BYTES)
    request = HTTPRequest(
        f"http://{server.host}:{server.port}{path}",
        method="GET" if body is None else "POST",
        headers={"Content-Type": "application/json"},
        body=body,
        request_timeout=_TIMEOUT_S,
        follow_redirects=False,
        decompress_response=False,
    )
    try:
        response = await client.fetch(request, raise_error=False)
    except Exception as error:  # what the server sends decides which one
        raise ConnectionError(f"does not answer ({type(error).__name__})") from error
    finally:
        client.close()
    if response.code // 100 != 2:
        raise ConnectionError(f"answered with status {response.code}")
    return response.body


def _described(model: _Model) -> str:
    size = f" ({format_memory(model.size_vram >> 20)})" if model.size_vram else ""
    return f"{printable(model.name or model.model)[:_LONGEST_NAME]}{size}"


def _holdings(server: ModelServer, strangers: Mapping[str, Iterable[Stranger]]) -> tuple[set[int], dict[str, int]]:
    """Return the owners of the server's listening sockets, and the MiB that its processes use of each device. Blocks."""
    locals_ = {b"%s:%04X" % (address, server.port) for address in _ADDRESSES[server.host]}
    owners: dict[str, int] = {}  # by socket
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # no IPv6
            for fields in map(bytes.split, entries(f"{PROC}/net/{table}", b"\n")):
                if len(fields) > 9 and fields[1] in locals_ and fields[3] == b"0A":
                    owners[f"socket:[{int(fields[9])}]"] = int(fields[7])
    users = {
        id_: [one.used_mib for one in there if _is_of(one.pid, owners, server)] for id_, there in strangers.items()
    }
    return set(owners.values()), {device_id: sum(used) for device_id, used in users.items() if used}


def _is_of(pid: int, owners: Mapping[str, int], server: ModelServer) -> bool:
    """Whether the process or an ancestor listens, or is a process of an owner with one of the server's names."""
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or is hidden
        named = read_stat(pid).comm.startswith(server.commands)
        for _ in range(_DEEPEST):
            if owner_uid(pid) not in owners.values():
                break
            if named or holds_open(pid, owners.__contains__):
                return True
            pid = read_stat(pid).ppid
    return False
