"""Many real kernels in random use: users who run cells, suspend, interrupt, restart, shut down and start again.

Rules: each user has separate kernels and does one thing after the other, decided only by its seed; after each thing its kernel is
filled with noise, and each look at it must find every byte. The first broken promise stops everybody.
"""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice

from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.protocol.errors import FractionalGPUError
from tests.support.faults import configure
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World

__all__ = ["CONTEXT_MIB", "DATA_MIB", "Crowd", "Size"]

DATA_MIB = 8
CONTEXT_MIB = 8
_FRACTION_MILLI = 125
_MEMORY_MIB = DATA_MIB + 2 * CONTEXT_MIB
# Says when it runs, by the clock that all processes of a machine share.
_ENDLESS = "import time\nwhile True:\n    print('running', time.monotonic(), flush=True)\n    time.sleep(2)"
_RUNNING = re.compile(r"running (\S+)")
# No kernel is suspended only for being idle: it stays at rest, and can be measured.
_CONFIG = """
c.GPUBroker.pools = {
    "default": {"oversubscription": 100, "retry_refused": "300ms", "unattached_ttl": "10s", "idle_after": "on-demand"}
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    kernels: int
    devices: int = 8
    servers: int = 4
    users: int = 16

    @property
    def simulate(self) -> str:
        """The devices; each holds eight kernels."""
        return f"{self.devices}x{8 * _MEMORY_MIB}MiB"


@dataclass
class Tally:
    """What was done, per user; added up at the end."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    intact: int = 0
    seconds: list[float] = field(default_factory=list)  # of single cells, from the request to the reply


class Crowd:
    def __init__(self, world: World, size: Size, seed: int) -> None:
        self.world = world
        self.size = size
        self.tally = Tally()
        self._seed = seed
        self._rounds = 0
        self._over = threading.Event()
        world.configure(_CONFIG)
        (self.spec,) = world.install(_FRACTION_MILLI)
        world.start_broker()
        store = Store(world.simulated_folder)
        configure(store, context_mib=CONTEXT_MIB)
        store.close()
        self.servers = [Server(world) for _ in range(size.servers)]
        self._users: list[_User] = []

    def start(self) -> None:
        share = [len(range(number, self.size.kernels, self.size.users)) for number in range(self.size.users)]
        servers = islice(cycle(self.servers), self.size.users)
        self._users = [
            _User(self, server, f"{self._seed}.{number}") for number, server in enumerate(servers) if share[number]
        ]
        self._all(lambda user: user.grow(share[self._users.index(user)]), at_once=4)

    def use(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._over.set)
        timer.start()
        try:
            self._all(_User.use, at_once=len(self._users))
        finally:
            timer.cancel()
            self._over.clear()
        self._add_up()

    def look_at_all(self) -> int:
        self._all(_User.look_at_all, at_once=len(self._users))
        self._add_up()
        return sum(len(user.notebooks) for user in self._users)

    def shut_down(self) -> None:
        self._all(_User.shut_down, at_once=4)
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.stop()

    def goes_on(self) -> bool:
        return not self._over.is_set()

    def _all(self, act: "Callable[[_User], None]", *, at_once: int) -> None:
        """Let every user do it. Raises the first error; the others finish their current action."""

        def guarded(user: _User) -> None:
            try:
                act(user)
            except BaseException:
                self._over.set()
                raise

        with ThreadPoolExecutor(at_once) as threads:
            for future in [threads.submit(guarded, user) for user in self._users]:
                future.result()

    def _add_up(self) -> None:
        for user in self._users:
            self.tally.done += user.tally.done
            self.tally.refused += user.tally.refused
            self.tally.intact += user.tally.intact
            self.tally.seconds += user.tally.seconds
            user.tally = Tally()


class _User:
    def __init__(self, crowd: Crowd, server: Server, seed: str) -> None:
        self.crowd = crowd
        self.server = server
        self.random = random.Random(seed)
        self.notebooks: list[Notebook] = []
        self.tally = Tally()

    def grow(self, kernels: int) -> None:
        while len(self.notebooks) < kernels and self.crowd.goes_on():
            self.notebooks.append(self._born())

    def use(self) -> None:
        acts: dict[str, tuple[int, Callable[[int], None]]] = {
            "cell": (56, self._cell),
            "cells in several kernels at once": (14, self._burst),
            "suspend": (8, self._suspend),
            "resume": (4, self._resume),
            "interrupt": (6, self._interrupt),
            "restart": (6, self._restart),
            "shutdown and a new kernel": (6, self._replace),
        }
        weights = [weight for weight, _ in acts.values()]
        while self.crowd.goes_on():
            (name,) = self.random.choices(list(acts), weights)
            acts[name][1](self.random.randrange(len(self.notebooks)))
            self.tally.done[name] += 1

    def look_at_all(self) -> None:
        for notebook in self.notebooks:
            self._must_be_intact(notebook, notebook.send(CHECK))

    def shut_down(self) -> None:
        while self.notebooks:
            self.notebooks.pop().shut_down()

    def _born(self) -> Notebook:
        notebook = self.server.start(self.crowd.spec)
        self._fill(notebook)
        return notebook

    def _fill(self, notebook: Notebook) -> None:
        notebook.must(fill(self.random.randrange(1 << 30), DATA_MIB))

    def _must_be_intact(self, notebook: Notebook, cell: str) -> None:
        reply = notebook.wait(cell)
        if (reply.status, reply.text) != ("ok", "intact\n"):
            raise AssertionError(f"kernel {notebook.kernel_id} answered {reply.status} {reply.error}\n{reply.text}")
        self.tally.intact += 1

    def _cell(self, number: int) -> None:
        begun_s = time.perf_counter()
        self._must_be_intact(self.notebooks[number], self.notebooks[number].send(CHECK))
        self.tally.seconds.append(time.perf_counter() - begun_s)

    def _burst(self, number: int) -> None:
        some = [self.notebooks[(number + step) % len(self.notebooks)] for step in range(min(4, len(self.notebooks)))]
        for notebook, cell in [(notebook, notebook.send(CHECK)) for notebook in some]:
            self._must_be_intact(notebook, cell)

    def _suspend(self, number: int) -> None:
        self._steer(number, "suspend")

    def _resume(self, number: int) -> None:
        self._steer(number, "resume")

    def _steer(self, number: int, verb: str) -> None:
        lease_id = self.crowd.world.lease(self.notebooks[number].kernel_id).lease_id
        with self.crowd.world.client() as client:
            try:
                (client.suspend if verb == "suspend" else client.resume)(lease_id)
            except FractionalGPUError as error:
                self.tally.refused[f"{verb}: {error.reason}"] += 1

    def _interrupt(self, number: int) -> None:
        """At the cell's first word, which is its own or that it waits; and again where the cell is seen to run after that.

        Never twice without need: an interrupt that meets ipykernel while it handles another loses the cell's reply, with any kernel.
        """
        notebook = self.notebooks[number]
        interrupted_s: float | None = None
        end = ""
        for message in notebook.messages(notebook.send(_ENDLESS)):
            kind, content = message["header"]["msg_type"], message["content"]
            ran_s = max((float(stamp) for stamp in _RUNNING.findall(content.get("text", ""))), default=0.0)
            if kind in ("stream", "display_data") and (interrupted_s is None or ran_s > interrupted_s):
                notebook.interrupt()
                interrupted_s = time.monotonic()  # the signal was sent before that
            elif kind == "execute_reply":
                end = content.get("ename", content["status"])
        if end != "KeyboardInterrupt":
            raise AssertionError(f"an interrupted cell of kernel {notebook.kernel_id} ended with {end}")

    def _restart(self, number: int) -> None:
        old = self.notebooks[number]
        old.restart()
        old.close()
        self.notebooks[number] = self.server.connect(
            old.kernel_id
        )  # the old line may miss the new process's first words
        self._fill(self.notebooks[number])

    def _replace(self, number: int) -> None:
        self.notebooks[number].shut_down()
        self.notebooks[number] = self._born()
