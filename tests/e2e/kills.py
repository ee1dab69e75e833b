"""Kills at random moments: three kernels take turns on one simulated device while the broker, its worker, a kernel or the server dies.

    python tests/e2e/kills.py 30 [--seed 7] [--worlds 3] [--minutes 60]

Each world has a separate device, broker, server and kernels, and does its share of the kills. Worlds mostly wait, so several can
share a core. With --minutes no kill begins after that time, and the figures say how many there were.

After each kill every surviving kernel must answer with its bytes intact, the books and the driver must agree, and the dead may
hold no reservation. Prints what was killed, when, and how long it took until all kernels had answered. The seed decides victims
and delays; what a delay hits depends on the machine. Exits with 1 at the first broken promise.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.protocol.errors import BrokerUnavailableError
from tests.support.faults import configure
from tests.support.stories import CHECK, fill
from tests.support.victims import brokers, kill_all, released, settled, wait_for_end, workers
from tests.support.world import Notebook, Server, World, new_world, until

KERNELS = 3
MIB = 64  # data of each kernel: with its context it fills its fraction, so that two do not fit at once
SPEED_MIB_S = 200  # a move takes a third of a second, so that many kills hit one
LONGEST_DELAY_S = 2.5
VICTIMS = ("broker", "broker", "broker", "worker", "worker", "broker and worker", "kernel", "kernel", "server")
CONFIG = 'c.GPUBroker.pools = {"default": {"retry_refused": "300ms", "unattached_ttl": "20s"}}\n'


@dataclass
class Figures:
    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    intact: int = 0  # cells of survivors that found all their bytes
    seconds: dict[str, list[float]] = field(default_factory=dict)  # from the kill until every survivor had answered

    def add(self, other: "Figures") -> None:
        self.kills += other.kills
        self.moments += other.moments
        self.intact += other.intact
        for victim, times in other.seconds.items():
            self.seconds.setdefault(victim, []).extend(times)

    def table(self) -> str:
        lines = [f"{'victim':20}{'kills':>6}{'median':>9}{'longest':>9}   until every survivor had answered"]
        for victim in sorted(self.kills):
            times = self.seconds[victim]
            lines.append(f"{victim:20}{self.kills[victim]:6}{statistics.median(times):8.1f}s{max(times):8.1f}s")
        moments = ", ".join(f"{count} {moment}" for moment, count in self.moments.most_common())
        lines.append(f"{self.kills.total()} kills struck: {moments}")
        lines.append(f"{self.intact} looks at {MIB} MiB each by survivors: every byte was there")
        return "\n".join(lines)


class Turns:
    def __init__(self, world: World, seed: str) -> None:
        self.world = world
        self.name = seed
        self.random = random.Random(seed)
        self.figures = Figures()
        (self.spec,) = world.install(750)
        world.start_broker()
        store = Store(world.simulated_folder)
        configure(store, checkpoint_mib_s=SPEED_MIB_S, restore_mib_s=SPEED_MIB_S)
        store.close()
        self.server = Server(world)
        self.notebooks: list[Notebook] = []
        self._start_all()

    def _start_all(self) -> None:
        self.notebooks = [self.server.start(self.spec) for _ in range(KERNELS)]
        for notebook in self.notebooks:
            notebook.must(fill(self.random.randrange(1 << 30), MIB))

    def strike(self) -> None:
        """Let every kernel ask for the device, kill a process after a while, and check everything."""
        victim = self.random.choice(VICTIMS)
        chosen = self.random.choice(self.notebooks)
        delay_s = self.random.uniform(0, LONGEST_DELAY_S)
        cells = [(notebook, notebook.send(CHECK)) for notebook in self.notebooks]
        time.sleep(delay_s)  # the moment is the experiment, not a synchronisation
        moment = self._moment()
        begun_s = time.monotonic()
        kill: dict[str, Callable[[], list[int]]] = {
            "broker": lambda: brokers(self.world),
            "worker": lambda: workers(self.world),
            "broker and worker": lambda: brokers(self.world) + workers(self.world),
        }
        if victim == "server":
            self._kill_server()
        elif victim == "kernel":
            self._kill_kernel(chosen, cells)
        else:
            kill_all(kill[victim]())
            self._answers(cells)
        took_s = time.monotonic() - begun_s
        self.world.start_broker()  # it may have died when no longer needed
        settled(self.world)
        self.figures.kills[victim] += 1
        self.figures.moments[moment] += 1
        self.figures.seconds.setdefault(victim, []).append(took_s)
        words = f"{victim:20}{delay_s:5.2f} s after the cells were sent, {moment}: {took_s:.1f} s"
        print(f"{self.name:>8} {self.figures.kills.total():5} {words}", file=sys.stderr, flush=True)

    def _moment(self) -> str:
        with suppress(BrokerUnavailableError):
            states = {lease.state for lease in self.world.status().leases}
            for state, words in (("suspending", "in a suspend"), ("resuming", "in a resume")):
                if state in states:
                    return words
        return "between swaps"

    def _answers(self, cells: list[tuple[Notebook, str]]) -> None:
        for notebook, cell in cells:
            reply = notebook.wait(cell)
            if (reply.status, reply.text) != ("ok", "intact\n"):
                raise AssertionError(f"a survivor answered {reply.status} {reply.error}\n{reply.text}")
            self.figures.intact += 1

    def _kill_kernel(self, chosen: Notebook, cells: list[tuple[Notebook, str]]) -> None:
        old = self.world.lease(chosen.kernel_id).pid
        if old is None:
            raise AssertionError("a living kernel has no process")
        kill_all([old])
        self._answers([pair for pair in cells if pair[0] is not chosen])
        until(lambda: self.world.lease(chosen.kernel_id).pid not in (None, old) or None, "Jupyter starts it again")
        chosen.close()
        fresh = self.server.connect(chosen.kernel_id)
        fresh.must(fill(self.random.randrange(1 << 30), MIB))
        self.notebooks[self.notebooks.index(chosen)] = fresh

    def _kill_server(self) -> None:
        descriptors = [os.pidfd_open(lease.pid) for lease in self.world.status().leases if lease.pid is not None]
        self.server.stop(signal.SIGKILL)
        for descriptor in descriptors:
            wait_for_end(descriptor)
        until(
            lambda: all(device.reserved_mib == 0 for device in self.world.status().devices) or None,
            "the reservations of the dead are free",
        )
        for notebook in self.notebooks:
            notebook.close()
        self.server = Server(self.world)
        self._start_all()

    def finish(self) -> None:
        """Check all bytes once more, shut down, and check that nothing is left."""
        self._answers([(notebook, notebook.send(CHECK)) for notebook in self.notebooks])
        settled(self.world)
        for notebook in self.notebooks:
            notebook.shut_down()
        until(lambda: released(self.world) or None, "every lease and every reservation is gone")
        if len(brokers(self.world)) != 1 or len(workers(self.world)) != 1:
            raise AssertionError(
                f"brokers {brokers(self.world)}, workers {workers(self.world)}: there must be one of each"
            )


class Worlds:
    """Several worlds at once; the first broken promise stops them all."""

    def __init__(self, seed: int, end_s: float) -> None:
        self._seed = seed
        self._end_s = end_s  # monotonic
        self._broken = threading.Event()

    def run(self, kills: int, worlds: int) -> Figures:
        figures = Figures()
        with ThreadPoolExecutor(worlds) as threads:
            parts = [kills // worlds + (number < kills % worlds) for number in range(worlds)]
            for part in [threads.submit(self._one, number, part) for number, part in enumerate(parts)]:
                figures.add(part.result())
        return figures

    def _one(self, number: int, kills: int) -> Figures:
        with new_world("1x128MiB") as world:
            try:
                world.configure(CONFIG)
                turns = Turns(world, f"{self._seed}.{number}")
                try:
                    while turns.figures.kills.total() < kills and self._goes_on():
                        turns.strike()
                    turns.finish()
                finally:
                    turns.server.stop()
            except BaseException:
                self._broken.set()
                for name, text in world.logs().items():
                    print(f"--- world {number}: {name} ---\n{text}", file=sys.stderr)
                raise
        return turns.figures

    def _goes_on(self) -> bool:
        return not self._broken.is_set() and time.monotonic() < self._end_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, help="how many kills")
    parser.add_argument("--seed", type=int, default=1, help="decides victims and delays (default 1)")
    parser.add_argument("--worlds", type=int, default=1, help="how many at once (default 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no kill after so long")
    options = parser.parse_args()
    if options.kills < 1 or options.worlds < 1:
        parser.error("there is at least one kill, in at least one world")
    figures = Worlds(options.seed, time.monotonic() + 60 * options.minutes).run(options.kills, options.worlds)
    print(figures.table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
