"""State saved before a deadline with real kernels on the simulated device: the broker's choice against smallest first and a random order.

    python -m tests.benchmarks.revocation_kernels [--rounds 3] [--learnt 2]

A round has eight kernels that hold 16 to 128 MiB on a device that saves 24 MiB/s, so that deadlines have realistic lengths, in three
priorities, whose cells have run for 0 to 8 s. First all are suspended, one after the other, `--learnt` times (default: 2): the
broker learns from that how long saves take, and the last time tells how long all of them do. Then each order has the same kernels, resident
and idle, and a deadline at 25, 50 and 75 % of that time. Ours is `drain --deadline`; the others suspend one kernel after the other by the
same broker. What is suspended at the deadline counts as saved; after each trial all come back, and each kernel checks its bytes.

The value is the broker's (`core.revoke.value_of`), from the measured times of the cells. The figures are in
docs/revocation.md. Absolute times depend on the machine; the shares hardly do.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.core.revoke import value_of
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.protocol.errors import ConflictError
from fractional_gpu.protocol.messages import DrainRequest
from tests.e2e.test_policies import CHECK, FILL
from tests.support.faults import configure
from tests.support.world import Notebook, Server, World, new_world, until

__all__ = ["SHARES", "Held", "Tally", "main", "orders", "run_round"]

SHARES = (25, 50, 75)  # of the time that all saves take, per cent
_MIB_S = 24
_SIZES_MIB = (16, 16, 24, 32, 48, 64, 96, 128)
_WORK_S = (0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 6.0, 8.0)
_PRIORITIES = (0, 0, 0, 0, 0, 1, 1, 2)


@dataclass(slots=True)
class Held:
    """One kernel with what it holds."""

    notebook: Notebook
    lease_id: str
    mib: int
    priority: int
    work_s: float = 0.0

    @property
    def value(self) -> int:
        """What it is worth, as the broker counts."""
        return value_of(round(self.work_s * 1000), self.priority)

    def run(self, code: str) -> None:
        """Run a cell, and count its time as work."""
        begun = time.monotonic()
        self.notebook.must(code)
        self.work_s += time.monotonic() - begun


@dataclass(slots=True)
class Tally:
    """What the trials of one order at one share have saved."""

    value: int = 0
    whole: int = 0
    kernels: int = 0
    all_kernels: int = 0

    def add(self, there: Sequence[Held], saved: frozenset[str]) -> None:
        """Count a trial."""
        self.value += sum(one.value for one in there if one.lease_id in saved)
        self.whole += sum(one.value for one in there)
        self.kernels += len(saved)
        self.all_kernels += len(there)


def orders(there: Sequence[Held], random: Random) -> dict[str, list[Held]]:
    """Return the other orders."""
    return {
        "smallest first": sorted(there, key=lambda one: (one.mib, one.lease_id)),
        "random": random.sample(list(there), len(there)),
    }


def _respecified(world: World, name: str, priority: int) -> str:
    spec = json.loads((world.kernels_dir / name / "kernel.json").read_text())
    spec["metadata"]["kernel_provisioner"]["config"] |= {"priority": priority}
    changed = f"{name}-{priority}"
    (world.kernels_dir / changed).mkdir()
    (world.kernels_dir / changed / "kernel.json").write_text(json.dumps(spec))
    return changed


@contextmanager
def _kernels(number: int, random: Random) -> Iterator[tuple[World, list[Held]]]:
    """Start a world with kernels that hold something and have worked."""
    with ExitStack() as stack:
        world = stack.enter_context(new_world("1x2GiB"))
        world.complete_without_jedi()
        world.configure(
            "c.GPUBroker.pools = {'default': {'max_priority': 2, 'fractions': 'any', 'idle_after': 'on-demand', 'min_residency': '0s'}}"
        )
        world.start_broker("1x2GiB")
        store = Store(world.simulated_folder)
        configure(store, checkpoint_mib_s=_MIB_S)
        store.close()
        server = stack.enter_context(Server(world))
        (plain,) = world.install(100)
        specs = {priority: _respecified(world, plain, priority) for priority in dict.fromkeys(_PRIORITIES)}
        sizes, priorities = random.sample(_SIZES_MIB, number), random.sample(_PRIORITIES, number)
        work = random.sample(_WORK_S, number)
        there = []
        for seed, (mib, work_s, priority) in enumerate(zip(sizes, work, priorities, strict=True)):
            notebook = server.start(specs[priority])
            notebook.must("pass")
            held = Held(notebook, world.lease(notebook.kernel_id).lease_id, mib, priority)
            held.run(FILL.format(seed=seed, mib=mib))
            held.run(
                f"import time\nend_s = time.monotonic() + {work_s}\nwhile time.monotonic() < end_s:\n    cuda.launch(0.02)"
            )
            there.append(held)
        yield world, there


def _idle(world: World, there: Sequence[Held]) -> None:
    ids = {one.notebook.kernel_id for one in there}
    until(lambda: not any(one.busy for one in world.status().leases if one.kernel_id in ids), "all idle")


def _bring_back(world: World, client: BrokerClient, there: Sequence[Held]) -> None:
    for one in there:
        client.resume(one.lease_id)
        one.run(CHECK)
    _idle(world, there)


def _suspended(world: World) -> frozenset[str]:
    return frozenset(one.lease_id for one in world.status().leases if one.state == "suspended")


def _in_order(client: BrokerClient, order: Sequence[Held], deadline_s: float) -> frozenset[str]:
    """Suspend one after the other; return those that were suspended by then."""
    saved, begun = set[str](), time.monotonic()
    for one in order:
        if time.monotonic() - begun >= deadline_s:
            break
        client.suspend(one.lease_id)
        if time.monotonic() - begun <= deadline_s:
            saved.add(one.lease_id)
    return frozenset(saved)


def _drained(world: World, client: BrokerClient, deadline_s: float) -> frozenset[str]:
    """Drain the device by the deadline; return those that are suspended then."""
    end_s = time.monotonic() + deadline_s
    client.drain("0", DrainRequest(deadline_in_ms=max(1, round(deadline_s * 1000))))
    saved = frozenset[str]()

    def is_over() -> bool:
        nonlocal saved
        found = _suspended(world)
        if time.monotonic() <= end_s:
            saved = found  # as of a look that ended in time
            return False
        return True

    until(is_over, "the deadline")
    client.undrain("0")
    until(lambda: not any(one.state == "suspending" for one in world.status().leases), "no suspend is under way")
    return saved


def run_round(
    number: int, seed: int, learnt: int, tallies: dict[tuple[int, str], Tally], say: Callable[[str], None]
) -> None:
    """Run one round of kernels, each of which was saved `learnt` times before, and count it."""
    random = Random(seed)
    with _kernels(number, random) as (world, there), world.client() as client:
        all_s = 0.0
        for _ in range(learnt):
            _idle(world, there)
            begun = time.monotonic()
            for one in there:
                client.suspend(one.lease_id)
            all_s = time.monotonic() - begun
            _bring_back(world, client, there)
        say(f"round {seed}: all saves take {all_s:.1f} s")
        for share in SHARES:
            deadline_s = all_s * share / 100
            trials: dict[str, Callable[[], frozenset[str]]] = {"ours": lambda: _drained(world, client, deadline_s)}  # noqa: B023
            for name, order in orders(there, random).items():
                trials[name] = lambda order=order: _in_order(client, order, deadline_s)  # type: ignore[misc]  # noqa: B023
            for name, trial in trials.items():
                try:
                    saved = trial()
                except ConflictError as error:
                    raise RuntimeError(f"{name} at {share} %: a suspend was refused: {error}") from error
                tallies.setdefault((share, name), Tally()).add(there, saved)
                say(f"round {seed}, {share} %, {name}: {len(saved)} kernels")
                _bring_back(world, client, there)


def table(tallies: dict[tuple[int, str], Tally]) -> list[str]:
    """Return the table's lines."""
    lines = ["| deadline | order | value saved | kernels saved |", "|---|---|---|---|"]
    for (share, name), tally in tallies.items():
        value, kernels = 100 * tally.value / tally.whole, 100 * tally.kernels / tally.all_kernels
        lines.append(f"| {share} % | {name} | {value:.0f} % | {kernels:.0f} % |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="state of real kernels saved before a deadline, by order")
    parser.add_argument("--rounds", type=int, default=3, help="how many (3)")
    parser.add_argument("--learnt", type=int, default=2, help="how often each kernel was saved before (2)")
    options = parser.parse_args(arguments)
    tallies: dict[tuple[int, str], Tally] = {}
    for seed in range(options.rounds):
        run_round(len(_SIZES_MIB), seed, options.learnt, tallies, lambda text: print(text, file=sys.stderr))
    print("\n".join(table(tallies)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
