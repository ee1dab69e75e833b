"""A worker that another container's service starts: the same promises as for the broker's own child, and who may connect."""

import asyncio
import ctypes
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.gpu import worker_link, worker_process, worker_service
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.worker_link import WorkerClaim, WorkerLink
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.host.process import ProcessIdentity, identify
from tests.gpu_sim.kernels import Kernel, eventually
from tests.support import faults
from tests.support.paths import PYTHONPATH
from tests.support.stopping import stop

pytestmark = pytest.mark.promise("worker-container")

C, S = GPUErrorCode, ProcessState
_PIDFD_GETFD = 438  # the system call's number on all machines


class Service:
    """A service in a separate process, in a short folder."""

    def __init__(self, path: str, backend: str = "simulated") -> None:
        self.path = path
        self._backend = backend
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []

    def start(self) -> None:
        """Start it, and return when it listens."""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "fractional_gpu.commands.main"),
                *("node", "worker", "--socket", self.path, "--backend", self._backend),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
        self.until("is listening on")

    def until(self, text: str) -> str:
        """Return the next line of the log with the text."""
        assert self.process is not None
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"the service ended without {text!r}: {self.lines}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def terminate(self) -> int:
        """End it in order, and return its exit code."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(60)
        assert self.process.stderr is not None
        self.lines += self.process.stderr.read().splitlines()
        self.process.stderr.close()
        return code


@contextmanager
def _serving(backend: str = "simulated") -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="jfg-") as folder:
        service = Service(str(Path(folder) / "worker.sock"), backend)
        service.start()
        try:
            yield service
        finally:
            if service.process is not None and service.process.returncode is None:
                service.kill()


@pytest.fixture
def service() -> Iterator[Service]:
    with _serving() as service:
        yield service


@pytest.fixture(scope="module")
def standing() -> Iterator[Service]:
    """One service for the requests that start nothing."""
    with _serving() as service:
        yield service


@pytest.fixture
async def link(service: Service, simulated: host.SimulatedHost, tmp_path: Path) -> AsyncIterator[WorkerLink]:
    claim = WorkerClaim(tmp_path / "worker.lock")
    link = WorkerLink(f"simulated:{simulated.directory}", claim=claim, service=service.path)
    yield link
    faults.clear(simulated.directory)
    await link.close()
    claim.close()


@pytest.fixture
def target(kernel: Kernel) -> ProcessIdentity:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'ab')")
    return identify(kernel.pid)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_gone(pid: int) -> bool:
    """Whether the process has ended; an orphan may stay a zombie where process 1 reaps none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def _begun_checkpoint(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity, deadline_s: float = 60
) -> asyncio.Task[int]:
    """Begin a checkpoint that ends when the faults are cleared."""
    await link.lock(target, 1000)
    faults.inject(simulated.directory, "checkpoint", "hang")
    operation = asyncio.create_task(link.checkpoint(target, deadline_s))
    await asyncio.to_thread(
        eventually, lambda: faults.listed(simulated.directory)[0].taken == 1, "the checkpoint begins"
    )
    return operation


async def test_a_lease_goes_out_and_comes_back_by_the_services_worker(
    link: WorkerLink, service: Service, kernel: Kernel, target: ProcessIdentity
) -> None:
    await link.start()
    assert link.pid is not None
    assert service.process is not None
    assert _parent(link.pid) == service.process.pid
    worker = link.pid
    await link.lock(target, 1000)
    assert await link.checkpoint(target, 10) > 0
    assert await link.state(target) is S.CHECKPOINTED
    await link.restore(target, None, 10)
    await link.unlock(target)
    assert link.pid == worker
    assert kernel.run("x.read(2).decode()") == "ab"
    await link.close()
    assert _is_gone(worker)


async def test_a_hung_worker_is_killed_by_the_service_and_replaced(
    link: WorkerLink, service: Service, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    await link.lock(target, 1000)
    hung = link.pid
    assert hung is not None
    faults.inject(simulated.directory, "checkpoint", "hang")
    with pytest.raises(GPUError, match=r"checkpoint of process \d+ within 0.1 s") as caught:
        await link.checkpoint(target, 0.1)
    assert caught.value.code is C.WORKER_HUNG
    assert _is_gone(hung)
    faults.clear(simulated.directory)
    assert await link.state(target) is S.LOCKED
    assert link.pid not in (None, hung)
    await asyncio.to_thread(service.until, "killing")


async def test_a_worker_that_died_is_replaced_unnoticed(link: WorkerLink, target: ProcessIdentity) -> None:
    await link.start()
    dead = link.pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    async with asyncio.timeout(60):
        while link.pid is not None:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.002)
    assert await link.state(target) is S.RUNNING
    assert link.pid not in (None, dead)


async def test_a_container_that_restarts_costs_no_state(
    link: WorkerLink, service: Service, simulated: host.SimulatedHost, kernel: Kernel, target: ProcessIdentity
) -> None:
    """The runtime kills the service and its worker in the middle of a checkpoint; the next ones finish it."""
    operation = await _begun_checkpoint(link, simulated, target)
    worker = link.pid
    assert worker is not None
    service.kill()
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(GPUError) as caught:
        await operation
    assert caught.value.code is C.WORKER_DIED
    faults.clear(simulated.directory)
    state = asyncio.create_task(link.state(target))  # the service is not back yet
    service.start()
    assert await state is S.LOCKED
    assert await link.checkpoint(target, 10) > 0
    await link.restore(target, None, 10)
    await link.unlock(target)
    assert kernel.run("x.read(2).decode()") == "ab"


async def test_a_service_that_has_no_descriptor_left_serves_the_peers_that_wait_as_soon_as_it_has(
    link: WorkerLink, service: Service, target: ProcessIdentity
) -> None:
    assert service.process is not None
    before = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    starting = asyncio.create_task(link.start())
    await asyncio.to_thread(service.until, "cannot accept")
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, before)
    await starting
    assert await link.state(target) is S.RUNNING


async def test_a_worker_that_dies_with_its_service_and_with_a_request_unread_is_replaced(
    service: Service, link: WorkerLink, target: ProcessIdentity
) -> None:
    """The pipe is reset then. A worker whose end was missed would count as one that cannot be killed, for ever."""
    await link.start()
    worker = link.pid
    assert worker is not None
    stop(worker)
    asked = asyncio.create_task(link.state(target))
    await asyncio.to_thread(eventually, lambda: _unread(worker), "the request lies in the pipe")
    service.kill()
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(GPUError) as caught:
        await asked
    assert caught.value.code is C.WORKER_DIED
    service.start()
    assert await link.state(target) is S.RUNNING
    assert link.pid != worker


def _unread(pid: int) -> bool:
    """Whether bytes wait at the process's standard input."""
    process = os.pidfd_open(pid)
    copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, 0, 0)
    os.close(process)
    assert copy >= 0
    try:
        return bool(select.select([copy], [], [], 0)[0])
    finally:
        os.close(copy)


async def test_a_worker_that_outlives_its_service_keeps_every_other_worker_out(
    link: WorkerLink,
    service: Service,
    simulated: host.SimulatedHost,
    target: ProcessIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "_KILL_S", 0.1)
    # Its worker must not have ended itself before it is stopped, below.
    operation = await _begun_checkpoint(link, simulated, target, deadline_s=3)
    orphan = link.pid
    assert orphan is not None
    service.kill()
    stop(orphan)  # as in a call of the driver that never returns: its own deadline does not end it
    with pytest.raises(GPUError) as caught:
        await operation
    assert caught.value.code is C.WORKER_HUNG
    service.start()
    # It hangs, and nothing can kill it: the link starts no second worker while it lives.
    assert not _is_gone(orphan)
    with pytest.raises(GPUError, match=f"worker {orphan} is hung in the driver and cannot be killed"):
        await link.state(target)
    faults.clear(simulated.directory)
    os.kill(orphan, signal.SIGCONT)
    async with asyncio.timeout(60):
        while link._unkillable is None or not link._unkillable.has_ended:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
    # Its pipe closes a moment before it is gone; it does nothing in between.
    await asyncio.to_thread(eventually, lambda: _is_gone(orphan), "the orphan is gone")
    assert await link.state(target) in (S.CHECKPOINTED, S.LOCKED)


async def test_the_worker_of_a_killed_broker_finishes_and_the_next_broker_waits(
    service: Service, simulated: host.SimulatedHost, target: ProcessIdentity, tmp_path: Path
) -> None:
    claims = [WorkerClaim(tmp_path / "worker.lock") for _ in range(2)]
    dying, heir = (
        WorkerLink(f"simulated:{simulated.directory}", claim=claim, service=service.path) for claim in claims
    )
    try:
        operation = await _begun_checkpoint(dying, simulated, target)
        worker = dying.pid
        assert worker is not None
        # What a kill does: its descriptors close, all at once.
        remote = dying._worker
        assert remote is not None
        assert remote._service is not None
        claims[0].close()
        operation.cancel()
        remote._service.shutdown(socket.SHUT_RDWR)
        remote.channel.shutdown(socket.SHUT_WR)
        with pytest.raises(GPUError, match="still running") as caught:
            await heir.start()
        assert caught.value.code is C.WORKER_BUSY
        alone = asyncio.create_task(heir.wait_for_previous_worker())
        faults.clear(simulated.directory)
        await asyncio.wait_for(alone, 60)
        await asyncio.to_thread(eventually, lambda: _is_gone(worker), "the worker ends")
        assert await heir.state(target) is S.CHECKPOINTED
    finally:
        faults.clear(simulated.directory)
        await dying.close()
        await heir.close()
        for claim in claims:
            claim.close()


async def test_sigterm_lets_the_worker_finish_its_operation(
    link: WorkerLink, service: Service, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    operation = await _begun_checkpoint(link, simulated, target)
    ending = asyncio.create_task(asyncio.to_thread(service.terminate))
    await asyncio.to_thread(eventually, lambda: not Path(service.path).exists(), "the service stops listening")
    assert not operation.done()
    faults.clear(simulated.directory)
    assert await operation > 0
    assert await ending == 0


# -- who may connect -------------------------------------------------------------------------------------------------------


def _ask(path: str, message: object, *descriptors: int) -> dict[str, Any]:
    """Send the service one message and return its answer."""
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(path)
        socket.send_fds(connection, [data], descriptors)
        found: dict[str, Any] = json.loads(connection.recv(1 << 16))
    return found


def _request(**changes: object) -> dict[str, object]:
    return {"backend": "simulated:/nowhere", "pid": os.getpid(), **changes}


@pytest.mark.parametrize(
    ("message", "code", "sentence"),
    [
        (b"\xff", "unknown", "this is not a message from a checkpoint worker"),
        (b"[" * 4000, "unknown", "this is not a message from a checkpoint worker"),
        ([1], "unknown", r"Expected `object`, got `array` .b'\[1\]'"),
        (b" " * 70_000, "unknown", "at most 65536 bytes"),
        ({}, "unknown", "missing required field `backend`"),
        (_request(pid=1), "not-supported", "hostPID: true"),
        (_request(backend="nvidia"), "not-supported", "'nvidia', but this service drives simulated"),
        (_request(backend=None), "unknown", "Expected `str`, got `null`"),
        (_request(backend="simulated"), "not-supported", "this service drives simulated"),
        (_request(backend="kind:other"), "not-supported", "'kind:other', but this service drives simulated"),
        (_request(), "not-permitted", "sent no lock file"),
    ],
)
def test_a_request_that_is_not_the_brokers_starts_nothing(
    standing: Service, message: object, code: str, sentence: str
) -> None:
    fatal = _ask(standing.path, message)["error"]
    assert (fatal["code"], bool(re.search(sentence, fatal["message"]))) == (code, True), fatal
    assert standing.process is not None
    children = Path(f"/proc/{standing.process.pid}/task/{standing.process.pid}/children").read_text()
    assert children == ""


def test_a_claim_that_another_broker_holds_starts_nothing(standing: Service, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as held, path.open("w") as other:
        fcntl.flock(held, fcntl.LOCK_EX)
        fatal = _ask(standing.path, _request(), other.fileno())["error"]
        assert fatal["code"] == C.WORKER_BUSY.value
    read, write = os.pipe()
    fatal = _ask(standing.path, _request(), read)["error"]
    assert (fatal["code"], fatal["message"]) == (
        C.NOT_PERMITTED.value,
        "the broker's lock file is not a regular file; run the broker and this service from the same image",
    )
    os.close(read)
    os.close(write)


def test_a_second_broker_is_refused_while_the_first_has_a_worker(
    service: Service, simulated: host.SimulatedHost, tmp_path: Path
) -> None:
    request = _request(backend=f"simulated:{simulated.directory}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first, (tmp_path / "a").open("w") as claim:
        first.settimeout(60)
        first.connect(service.path)
        socket.send_fds(first, [json.dumps(request).encode()], [claim.fileno()])
        data, descriptors, _, _ = socket.recv_fds(first, 4096, 4)
        assert json.loads(data)["pid"] > 0
        with (tmp_path / "b").open("w") as other:
            assert _ask(service.path, request, other.fileno())["error"]["code"] == C.WORKER_BUSY.value
        for descriptor in descriptors:
            os.close(descriptor)
        assert first.recv(4096) == b""


async def test_a_worker_that_is_no_longer_needed_ends_and_makes_room(
    link: WorkerLink, service: Service, simulated: host.SimulatedHost, target: ProcessIdentity, tmp_path: Path
) -> None:
    """A broker that is killed right after its request: the pipe that is on its way to it closes with the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as given_up, (tmp_path / "a").open("w") as claim:
        given_up.connect(service.path)
        request = json.dumps(_request(backend=f"simulated:{simulated.directory}")).encode()
        socket.send_fds(given_up, [request], [claim.fileno()])
        await asyncio.to_thread(service.until, "started checkpoint worker")
    ended = await asyncio.to_thread(service.until, "ended with status")
    assert "status 0" in ended
    assert await link.state(target) is S.RUNNING


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_process_gets_no_worker(service: Service) -> None:
    Path(service.path).chmod(0o666)  # as if it had been opened up
    Path(service.path).parent.chmod(0o755)
    program = (
        "import os, socket, sys; os.setuid(12345); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.connect(sys.argv[1]); print(s.recv(4096).decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, service.path], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    assert "of uid 12345 is connected" in json.loads(done.stdout)["error"]["message"]
    assert "12345" in service.until("refused a connection")


@pytest.fixture
def path() -> Iterator[str]:
    """Where a socket may be made."""
    with tempfile.TemporaryDirectory(prefix="jfg-") as folder:
        yield str(Path(folder) / "s")


async def test_a_socket_of_another_user_is_not_believed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "peer_credentials", lambda _socket: PeerCredentials(pid=7, uid=54321, gid=1))
    with worker_service.listen(path), pytest.raises(GPUError, match="uid 54321 is connected"):
        await worker_process.connect(path, "simulated:x", (), patience_s=1)


async def test_without_a_service_the_container_is_named(path: str) -> None:
    with pytest.raises(GPUError, match=r"is not responding: .* check the container that runs"):
        await worker_process.connect(path, "simulated:x", (), patience_s=0)


async def test_a_service_of_another_version_is_named(path: str) -> None:
    with worker_service.listen(path) as listener:
        connecting = asyncio.create_task(worker_process.connect(path, "simulated:x", (), patience_s=60))
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            await worker_process.readable(connection.fileno())
            connection.recv(4096)
            connection.send(b'{"begun": {"process": 7}}')
            with pytest.raises(GPUError, match=r"and this broker have different versions.*from the same image"):
                await connecting


def test_the_socket_replaces_a_dead_one_only() -> None:
    with tempfile.TemporaryDirectory(prefix="jfg-") as folder:
        path = Path(folder) / "s"
        with worker_service.listen(str(path)):
            assert path.stat().st_mode & 0o777 == 0o600
            with pytest.raises(OSError, match="another checkpoint worker's service is listening there"):
                worker_service.listen(str(path))
        with worker_service.listen(str(path)) as again:
            assert select.select([again], [], [], 0) == ([], [], [])
        path.unlink()
        path.write_text("precious")
        with pytest.raises(FileExistsError, match="not a socket; move it away"):
            worker_service.listen(str(path))
        assert path.read_text() == "precious"
        Path(folder).chmod(0o777)
        with pytest.raises(PermissionError, match="writable by no other user"):
            worker_service.listen(str(path))


def test_a_link_to_a_service_needs_a_claim() -> None:
    with pytest.raises(ValueError, match="needs a claim"):
        WorkerLink("nvidia", service="/somewhere")
