"""A broker inside the test's process: the real service on a real socket, with simulated devices, on a loop in a thread."""

import asyncio
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import to_builtins
from tornado.netutil import bind_unix_socket

from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.routes import make_server
from fractional_gpu.broker.api.server import Server
from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter, load_forecasts
from fractional_gpu.broker.process.run import configuration
from fractional_gpu.broker.swap.suspend import SwapTimes
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.config import load
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.gpu.open import open_monitor
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.accounts import ACCOUNTS
from fractional_gpu.host.process import identify
from fractional_gpu.protocol.messages import LeaseReply, LeaseRequest
from tests.broker.persistence.disk import Disk

__all__ = ["BECOME_NOBODY", "DEADLINE_S", "Answer", "LiveBroker", "live_broker", "started_for"]

DEADLINE_S = 30.0
# A program's first lines. It starts as root, because other users may be unable to run the interpreter.
BECOME_NOBODY = """
import os, pwd
nobody = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(nobody.pw_gid); os.setuid(nobody.pw_uid)
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """The answer to one request: `body` is the decoded JSON, or the first line of a stream."""

    status: int
    body: dict[str, Any]

    @property
    def error(self) -> dict[str, str]:
        """The error's code, reason and message; fails if this is not an error."""
        assert self.status >= 400, self
        assert set(self.body) == {"error"}, self
        error: dict[str, str] = self.body["error"]
        assert set(error) == {"code", "reason", "message"}, self
        return error


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("broker", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(self._path)


class LiveBroker:
    """The broker, and ways to talk to it. `on_loop` runs a coroutine on the broker's loop."""

    def __init__(self, folder: Path, devices: str, overrides: Mapping[str, Any]) -> None:
        # Tests that share a broker leave leases whose kernels never start.
        pools = {"default": {"unattached_leases": 512, "unattached_share": "100%"}}
        self._overrides = {"idle_exit": "never", "pools": pools, **overrides}
        self.socket = str(folder / "broker.sock")
        self._folder = folder
        self._simulated = devices
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self.disk: Disk
        self.broker: Broker
        self.service: LeaseService
        self.server: Server
        self.loop: asyncio.AbstractEventLoop
        self._seats: asyncio.Task[None]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def start(self) -> None:
        """Start it and wait until it serves."""
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)

    def stop(self) -> None:
        """Stop it and wait until its thread has ended."""
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        host = self._folder / "simulated"
        create(host, self._simulated)
        monitor = open_monitor(f"simulated:{host}")
        self.disk = Disk.open(self._folder / "ledger.sqlite")
        settings = load(None, self._overrides)
        ACCOUNTS.unknown = settings.account_of_unknown_uids
        worker = WorkerLink(f"simulated:{host}")
        swaps = Swaps(monitor, worker, SwapTimes(gate_s=5, lock_s=5, checkpoint_s=30))
        self.loop = asyncio.get_running_loop()
        devices = monitor.devices()
        by_id = {device.device_id: device for device in devices}
        arbiter = Arbiter(forecasts=load_forecasts(self.disk))
        self.broker = Broker(arbiter, monitor, swaps, LedgerWriter(self.disk), devices=by_id)
        specs = [DeviceSpec(device_id=one.device_id, name=one.name, memory_mib=one.memory_mib) for one in devices]
        for event in configuration(settings, specs, specs, host_budget_mib=4096):
            self.broker.dispatch(event)
        self.service = LeaseService(self.broker, settings)
        self.server = server = make_server(self.service, self.socket)
        server.add_socket(bind_unix_socket(self.socket, mode=0o666))
        self._seats = asyncio.create_task(self.service.seats.run())
        self._ready.set()
        await self._stop.wait()
        await self.stop_seats()
        server.stop()
        self.broker.costs.release()
        await server.close_all_connections()
        await self.broker.close()
        self.service.audit.close()
        await worker.close()
        monitor.close()
        destroy(host)

    async def stop_seats(self) -> None:
        """End what runs for the seats, as the broker does when it stops. Call it on the loop."""
        self._seats.cancel()
        await asyncio.wait([self._seats])

    def on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the broker's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(DEADLINE_S)

    def call(
        self, method: str, target: str, body: object = None, *, token: str | None = None, **headers: str
    ) -> Answer:
        """Make one request; a body that is not bytes is sent as JSON."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection = _Connection(self.socket)
        try:
            with suppress(BrokenPipeError):  # the request may be refused before its body is read
                connection.request(method, target, raw, {**authorization, **headers})
            reply = connection.getresponse()
            stream = reply.getheader("Transfer-Encoding") == "chunked"
            text = (b"{}" if target.endswith("/gate") else reply.readline()) if stream else reply.read()
            decoded: dict[str, Any] = json.loads(text)
            assert isinstance(decoded, dict)
            return Answer(reply.status, decoded)
        finally:
            connection.close()

    def raw(self, data: bytes, *, end: bool = False) -> bytes:
        """Send bytes and return everything received until the broker closes the connection; with `end`, close our side first."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(DEADLINE_S)
            line.connect(self.socket)
            received = b""
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the broker closed the connection while we were sending
                line.sendall(data)
                if end:
                    line.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while part := line.recv(65536):
                    received += part
            return received

    def lease(self, **fields: Any) -> LeaseReply:  # noqa: ANN401 - LeaseRequest's
        """Take a lease that is granted."""
        answer = self.call("POST", "/v1/leases", to_builtins(LeaseRequest(**{"fraction_milli": 250, **fields})))
        assert answer.status == 200, answer
        return LeaseReply(**answer.body)

    def state(self, lease_id: str) -> str:
        state: str = self.call("GET", f"/v1/leases/{lease_id}").body["lease"]["state"]
        return state

    def is_alive(self) -> bool:
        """Whether it still answers."""
        return bool(self.call("GET", "/v1/ping").body["pid"] == os.getpid())


@contextmanager
def live_broker(devices: str = "1x1GiB", **overrides: Any) -> Iterator[LiveBroker]:  # noqa: ANN401 - any setting
    """A broker for one block with simulated devices, in a folder that other users may enter; `revoke` holds settings."""
    folder = Path(tempfile.mkdtemp(prefix="jfg-"))
    folder.chmod(0o711)
    live = LiveBroker(folder, devices, overrides)
    try:
        live.start()
        yield live
    finally:
        live.stop()
        shutil.rmtree(folder)


@contextmanager
def started_for(
    lease_id: str, *, first: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Start a process with the lease's id in its environment; yields an attach request. The process ends with the block.

    `first` is what it runs before that, `environment` adds variables.
    """
    environment = {**(environment or {}), "JUPYTER_GPU_LEASE": lease_id, "PATH": os.environ["PATH"]}
    argv = [sys.executable, "-S", "-c", f"{first}\nprint(flush=True); open(0).read()"]
    process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # its program is running: /proc shows its environment
        try:
            yield attach_fields(process.pid)
        finally:
            process.kill()


def attach_fields(pid: int) -> dict[str, Any]:
    """Return an attach request that describes a process truthfully."""
    connection = {"transport": "tcp", "ip": "127.0.0.1", "iopub_port": 9, "shell_port": 9, "key": "k"}
    return {**identify(pid).to_dict(), "connection": connection}
