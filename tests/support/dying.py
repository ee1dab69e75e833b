"""A broker, worker, server or kernel that dies, or cannot write, at a named point of a story, and what must be true afterwards."""

import http.client
import json
import subprocess
import urllib.error
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import websocket

from tests.support.paths import failing
from tests.support.stories import CHECK, fill
from tests.support.victims import anybody, brokers, released, settled, workers
from tests.support.world import DEADLINE_S, Notebook, Reply, Server, World, until

__all__ = ["Life", "Story", "Strike", "points_of"]

MIB = 16  # two pieces of a copy
_ATTEMPTS = 3


class KernelDiedError(Exception):
    """The server restarts a kernel, or another process than before answered."""


class WithoutGPUError(Exception):
    """The kernel was restarted without a GPU, and its first cell said so."""


@dataclass(frozen=True, slots=True)
class Strike:
    """Which point, which of its occurrences (from 1), and what happens there: `kill`, or `fail` for a write to a full disk."""

    point: str
    time: int = 1
    action: str = "kill"

    @property
    def who(self) -> str:
        return self.point.partition(".")[0]


# What a client sees of the end of a broker, of a kernel and of a server, by the first word of a point.
_EXCUSED: dict[str, tuple[type[Exception], ...]] = {
    "kernel": (KernelDiedError, urllib.error.HTTPError),
    "server": (KernelDiedError, OSError, http.client.HTTPException, websocket.WebSocketException),
}
_EXCUSED_OF_BROKERS: tuple[type[Exception], ...] = (urllib.error.HTTPError,)
_EXCUSED_OF_FULL_DISKS = (*_EXCUSED_OF_BROKERS, WithoutGPUError)
_WITHOUT_GPU = "This kernel was started without a GPU"


class Story:
    """Two kernels from birth to death on one device: leases, turns, a suspend by hand, a restart, the end. Repeatable.

    With `keeps`, on a server whose kernels outlive it.
    """

    simulate = "1x128MiB"  # room for one kernel of 3/4
    config = 'c.GPUBroker.pools = {"default": {"retry_refused": "200ms", "unattached_ttl": "10s"}}\n'

    def __init__(self, world: World, *, keeps: bool = False) -> None:
        self.world = world
        self.keeps = keeps
        self.file = world.folder / "failpoint"
        self.disk_is_full = False  # no process dies: the broker continues after a failed write
        self._excused: tuple[type[Exception], ...] = ()
        self._strikes: deque[Strike] = deque()  # not prepared yet
        self._prepared: Strike | None = None
        self._lives: list[Life] = []
        world.environment |= failing(self.file)
        world.configure(self.config)
        (self.spec,) = world.install(750)
        self.server = self._new_server()

    def _new_server(self) -> Server:
        arguments = (
            "--ServerApp.kernel_manager_class=fractional_gpu.KeepingKernelManager",
            f"--SessionManager.database_filepath={self.world.folder / 'sessions.sqlite'}",
        )
        return Server(self.world, *(arguments if self.keeps else ()))

    def close(self) -> None:
        if self.keeps and self.server.process.poll() is None:
            for kernel in self.server.request("GET", "api/kernels"):
                self.server.request("DELETE", f"api/kernels/{kernel['id']}")
        self.server.stop()

    @property
    def reached(self) -> Path:
        return self.file.with_name(f"{self.file.name}.reached")

    def tell(self, *strikes: Strike) -> list[Strike]:
        """Tell the story, and let each of the strikes happen in it; return those that did. Fails if anything is lost.

        The second is prepared between two acts once the first has happened and all is at rest again, and so on. Its times are counted
        from then.
        """
        self._strikes.extend(strikes)
        self._begin()
        self.plot()
        missed = [*([self._prepared] if self.file.exists() else []), *self._strikes]
        self._strikes.clear()
        self.file.unlink(missing_ok=True)
        self._end()
        return [strike for strike in strikes if strike not in missed]

    def plot(self) -> None:
        first, second = self.cast(2)
        first.live()
        second.live()
        for life in (first, second, first):
            life.live()
        second.suspend()
        second.live()
        first.restart()
        for life in (second, first):
            life.live()
        for life in (first, second):
            life.end()

    def cast(self, lives: int) -> "list[Life]":
        self._lives = [Life(self, seed + 1) for seed in range(lives)]
        return self._lives

    def _begin(self) -> None:
        self.disk_is_full, self._excused, self._prepared = False, (), None
        new_broker = not self._strikes or self._strikes[0].who not in _EXCUSED
        if new_broker and self.world.broker_pid() is not None:
            self.world.kill_broker()  # so that the times are counted from the next one's start
        self.reached.unlink(missing_ok=True)
        if self._strikes:
            self._prepare(self._strikes.popleft())
        if new_broker:
            self.start_broker()

    def _prepare(self, strike: Strike) -> None:
        self._prepared = strike
        self.disk_is_full = strike.action == "fail"
        kinds = _EXCUSED_OF_FULL_DISKS if self.disk_is_full else _EXCUSED.get(strike.who, _EXCUSED_OF_BROKERS)
        self._excused = (*self._excused, *kinds)
        before = self.reached.read_text().split("\n").count(strike.point) if self.reached.exists() else 0
        fresh = self.file.with_suffix(".new")  # what runs reads all of it or nothing
        fresh.write_text(f"{strike.point} {before + strike.time} {strike.action}\n")
        fresh.rename(self.file)

    def go_on(self) -> None:
        """Prepare the next strike if the last one has happened. Called before each act; then waits until all is at rest."""
        if self._strikes and not self.file.exists():
            if self.world.broker_pid() is None:
                self.start_broker()
            settled(self.world)
            self._prepare(self._strikes.popleft())

    def start_broker(self) -> None:
        """Start a broker, which may die at once, then another one."""
        try:
            self.world.start_broker()
        except subprocess.CalledProcessError:  # it died at once
            assert not self.file.exists(), "a broker did not start although nothing was to fail"
            self.world.start_broker()

    def _end(self) -> None:
        """Nothing may be left but one broker, its worker and a server."""
        if self.server.process.poll() is not None:
            self.server = self._new_server()
        self.world.start_broker()  # it may have died when it was no longer needed
        settled(self.world)
        until(lambda: released(self.world) or None, "every lease and every reservation is gone")
        until(
            lambda: len(brokers(self.world)) == 1 and len(workers(self.world)) <= 1,
            "there is one broker, with its worker",
        )
        known = {self.server.process.pid, *brokers(self.world)}
        until(lambda: not (set(anybody(self.world)) - known - set(workers(self.world))), "no process is left over")

    def insist(self, act: Callable[[], object]) -> None:
        """Do it, and repeat it if it failed because of the planned death: without the fault it must succeed."""
        self.go_on()
        for _ in range(_ATTEMPTS):
            try:
                act()
            except self._excused as error:
                if self.file.exists():  # no process has died
                    raise
                self._recover(isinstance(error, KernelDiedError))
            else:
                return
        act()

    def _recover(self, kernel_died: bool) -> None:
        if not kernel_died and self._prepared is not None and self._prepared.who == "server":
            self.server.process.wait(DEADLINE_S)
        if self.server.process.poll() is not None:
            self.server.stop()
            self.server = self._new_server()
        listed = {kernel["id"] for kernel in self.server.request("GET", "api/kernels")}
        for life in self._lives:
            life.reconnect(listed)
        for kernel_id in listed - {
            life.kernel_id for life in self._lives
        }:  # its birth was not answered: a person would see it and end it
            self.server.request("DELETE", f"api/kernels/{kernel_id}")


class Life:
    """One kernel of the story, and its known state."""

    def __init__(self, story: Story, seed: int) -> None:
        self._story = story
        self._seed = seed
        self._notebook: Notebook | None = None
        self._pid = ""  # of the process that has our bytes; empty: none has
        self._changing = True  # between two processes: neither has to be there

    @property
    def kernel_id(self) -> str:
        """The kernel's id, empty while there is none."""
        return "" if self._notebook is None else self._notebook.kernel_id

    def live(self) -> None:
        """Check every byte; start and fill the kernel if there is none yet."""
        self._story.insist(self._live)

    def _live(self) -> None:
        notebook = self.line()
        if not self._pid:
            self._fill(notebook)
            self._pid = self._pid_now(notebook)
            self._changing = False
        reply = _run(notebook, CHECK)
        if reply.status != "ok" and self._pid_now(notebook) != self._pid:
            self._pid = ""
            raise KernelDiedError
        assert reply.text == "intact\n", f"{reply.status} {reply.error}\n{reply.text}"

    def _fill(self, notebook: Notebook) -> None:
        """Put its bytes on the device. A kernel without a device is restarted, as it advises, which the checks allow."""
        reply = _run(notebook, fill(self._seed, MIB))
        if reply.status != "ok" and any(_WITHOUT_GPU in shown.get("text/plain", "") for shown in reply.data):
            self._restart()
            raise WithoutGPUError
        assert reply.status == "ok", f"the kernel got no bytes: {reply.error}\n{reply.text}\n{reply.data}"

    def suspend(self) -> None:
        self._story.insist(lambda: _must(self.line(), "%gpu suspend"))

    def restart(self) -> None:
        self._seed += 10
        self._changing = True
        self._story.insist(self._restart)

    def _restart(self) -> None:
        notebook = self.line()
        self._pid = ""
        notebook.restart()
        self.reconnect({notebook.kernel_id})  # the old line may miss the new process's first words

    def begin_anew(self) -> None:
        """Note that its process was ended on purpose, and that Jupyter has started another one."""
        self._pid = ""
        self.reconnect({self.kernel_id})

    def end(self) -> None:
        self._changing = True
        self._story.insist(lambda: None if self._notebook is None else self._shut_down(self._notebook))

    def _shut_down(self, notebook: Notebook) -> None:
        notebook.shut_down()
        self._notebook = None

    def reconnect(self, listed: set[str]) -> None:
        """Open a new line to the kernel, if the server has it. The old one must have been at rest."""
        if self._notebook is None:
            return
        kernel_id = self._notebook.kernel_id
        self._notebook.close()
        if kernel_id in listed:
            self._notebook = self._story.server.connect(kernel_id)
            return
        assert self._changing, f"kernel {kernel_id} is gone"
        self._notebook, self._pid = None, ""

    def line(self) -> Notebook:
        """The line to the kernel, which is started if there is none."""
        if self._notebook is None:
            self._notebook = self._story.server.start(self._story.spec)
        return self._notebook

    def _pid_now(self, notebook: Notebook) -> str:
        return _must(notebook, "%%cpu\nimport os; print(os.getpid())").text


def _must(notebook: Notebook, code: str) -> Reply:
    reply = _run(notebook, code)
    assert reply.status == "ok", f"{code!r} ended with {reply.status} {reply.error}\n{reply.text}"
    return reply


def _run(notebook: Notebook, code: str) -> Reply:
    """Run a cell to its end. Raises KernelDiedError if the server restarts the kernel."""
    return _Attentive(notebook).wait(notebook.send(code))


class _Attentive(Notebook):
    """The same line, read without waiting for a cell of a dead kernel."""

    def __init__(self, notebook: Notebook) -> None:  # a second look at a line that is open
        self.__dict__.update(notebook.__dict__)

    def messages(self, msg_id: str) -> Iterator[dict[str, Any]]:
        replied = idle = False
        while not (replied and idle):
            message = json.loads(self.socket.recv())
            state = message["content"].get("execution_state")
            if state in ("restarting", "dead"):
                raise KernelDiedError
            if (message.get("parent_header") or {}).get("msg_id") != msg_id:
                continue
            yield message
            replied = replied or message["header"]["msg_type"].endswith("_reply")
            idle = idle or state == "idle"


def points_of(story: Story) -> Counter[str]:
    """Tell the story once undisturbed; return the points it reaches, and how often."""
    story.tell()
    return Counter(story.reached.read_text().split("\n")[:-1])
