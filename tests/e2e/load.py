"""Many kernels on one simulated host: real kernels on real servers in random use, and their effect on the broker.

    python tests/e2e/load.py [--kernels 200] [--minutes 10] [--rest 60] [--devices 8] [--seed 1]

The kernels are ipykernels with the extension, on four Jupyter servers; a quarter to a third of them fit on the devices at once. At
the end every kernel must have every byte. The broker's descriptors, threads, children and memory, measured after a tenth of the time
and at the end, must not have grown beyond the stated bounds. Afterwards no process, token, temporary file or simulated memory may be
left. Prints a table, with the broker's share of a core when idle, and what it costs to acquire a resident kernel compared with an
empty request. Exits with 1 at the first broken promise.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.messages import AcquireRequest, ProgressKind
from tests.benchmarks.stats import percentile
from tests.support.crowd import DATA_MIB, Crowd, Size
from tests.support.victims import anybody, released, settled
from tests.support.world import World, new_world, until

REST_GOAL = 0.01  # of a core
MAY_GROW_MIB = 16
MAY_GROW = 0.1  # and a tenth
ROUNDS = 500

__all__ = ["Footprint", "Plan", "Result", "run_load"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the broker uses on the machine."""

    descriptors: int
    threads: int
    children: int
    own_kib: int  # anonymous memory, without memory shared with files

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        """Measure a process. Raises OSError if it is gone."""
        folder = Path(f"/proc/{pid}")
        memory = re.search(r"^RssAnon:\s+(\d+) kB", (folder / "status").read_text(), re.MULTILINE)
        tasks = list((folder / "task").iterdir())
        return cls(
            descriptors=len(list((folder / "fd").iterdir())),
            threads=len(tasks),
            children=sum(len((task / "children").read_text().split()) for task in tasks),
            own_kib=int(memory[1]) if memory else 0,
        )

    def grown(self, before: "Footprint") -> list[str]:
        """Name what has grown too much since then."""
        allowed = {
            "descriptors": round(before.descriptors * MAY_GROW) + 8,
            "threads": 4,
            "children": 0,
            "own_kib": round(before.own_kib * MAY_GROW) + MAY_GROW_MIB * 1024,
        }
        return [
            f"{name}: {getattr(before, name)} before, {getattr(self, name)} now, {more} more are allowed"
            for name, more in allowed.items()
            if getattr(self, name) > getattr(before, name) + more
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    use_s: float
    rest_s: float
    rounds: int = ROUNDS
    seed: int = 1


@dataclass
class Result:
    size: Size
    lines: list[tuple[str, str]] = field(default_factory=list)
    rest: float = 0.0  # of a core
    acquire_ms: list[float] = field(default_factory=list)
    ping_ms: list[float] = field(default_factory=list)

    def say(self, what: str, figure: str) -> None:
        self.lines.append((what, figure))
        print(f"{time.strftime('%H:%M:%S')} {what}: {figure}", file=sys.stderr, flush=True)

    def table(self) -> str:
        return "\n".join(
            f"| {what} | {figure} |" for what, figure in (("measured", "figure"), ("---", "---"), *self.lines)
        )


def run_load(size: Size, plan: Plan) -> Result:
    """Run everything and return the figures. Raises AssertionError at the first broken promise."""
    result = Result(size)
    temporary = Path(tempfile.mkdtemp(prefix="jfl-"))
    try:
        with new_world(size.simulate) as world:
            world.environment["TMPDIR"] = str(temporary)
            try:
                crowd = Crowd(world, size, plan.seed)
                try:
                    _go_through(world, crowd, result, plan)
                except BaseException:
                    print(f"the servers' exit codes: {[one.process.poll() for one in crowd.servers]}", file=sys.stderr)
                    raise
                finally:
                    crowd.close()
            except BaseException:
                _show_trouble(world)
                raise
        _check_nothing_left(world, temporary)
    finally:
        shutil.rmtree(temporary)
    return result


def _go_through(world: World, crowd: Crowd, result: Result, plan: Plan) -> None:
    kernels = crowd.size.kernels
    begun_s = time.monotonic()
    crowd.start()
    result.say(f"start of {kernels} kernels, each with {DATA_MIB} MiB", f"{time.monotonic() - begun_s:.0f} s")
    crowd.use(plan.use_s / 10)
    before = _at_rest(world)
    result.say("the broker after a tenth of the time", _words(before))
    crowd.use(plan.use_s * 9 / 10)
    done = ", ".join(f"{count} {name}" for name, count in crowd.tally.done.most_common())
    result.say(f"{plan.use_s / 60:.1f} minutes of use", done)
    if crowd.tally.refused:
        result.say("refused, with a reason", str(dict(crowd.tally.refused)))
    _swaps(world, result)
    seconds = crowd.tally.seconds
    if seconds:
        result.say(
            "a cell, p50 and p99, swaps included", f"{percentile(seconds, 50):.2f} s, {percentile(seconds, 99):.2f} s"
        )
    assert crowd.look_at_all() == kernels
    result.say("looks that found every byte, all kernels at the end included", str(crowd.tally.intact))
    after = _at_rest(world)
    result.say("the broker at the end", _words(after))
    grown = after.grown(before)
    assert not grown, f"the broker keeps what it should not: {'; '.join(grown)}"
    _measure_rest(world, result, plan.rest_s)
    _measure_acquires(world, result, plan.rounds)
    crowd.shut_down()
    until(lambda: released(world) or None, "every lease and every reservation is gone")
    left = [str(path) for path in (world.folder / "run").rglob("*.token")]
    assert not left, f"tokens of kernels that were shut down: {left}"


def _show_trouble(world: World) -> None:
    """Print only unusual lines of the logs, as the logs of a crowd are long."""
    run = world.folder / "run"
    for file in (run / "broker.log", run / "broker.err", world.folder / "server.err"):
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        trouble = [
            line for line in lines if " INFO " not in line and not line.startswith(("[I ", "[IPKernelApp] WARNING"))
        ]
        print(f"--- {file.name}, without what is ordinary ---", *trouble[-200:], sep="\n", file=sys.stderr)


def _at_rest(world: World) -> Footprint:
    settled(world)
    until(lambda: not any(lease.busy for lease in world.status().leases) or None, "every kernel is idle")
    return Footprint.of(_broker(world))


def _broker(world: World) -> int:
    pid = world.broker_pid()
    assert pid is not None, "no broker serves"
    return pid


def _words(found: Footprint) -> str:
    return f"{found.descriptors} descriptors, {found.threads} threads, {found.children} children, {found.own_kib / 1024:.0f} MiB private"


def _swaps(world: World, result: Result) -> None:
    leases = world.status().leases
    suspends, resumes = sum(lease.suspends for lease in leases), sum(lease.resumes for lease in leases)
    away = sum(lease.state == "suspended" for lease in leases)
    result.say(
        "swaps of the kernels that live at the end", f"{suspends} suspends, {resumes} resumes; {away} are suspended"
    )


def _measure_rest(world: World, result: Result, rest_s: float) -> None:
    pid = _broker(world)
    before = _computed_s(pid)
    begun_s = time.monotonic()
    time.sleep(rest_s)  # this time is measured; it does not synchronise
    result.rest = (_computed_s(pid) - before) / (time.monotonic() - begun_s)
    result.say(f"the broker while idle, {rest_s:.0f} s", f"{100 * result.rest:.2f} % of a core")


def _computed_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _measure_acquires(world: World, result: Result, rounds: int) -> None:
    lease_id = next(lease.lease_id for lease in world.status().leases if lease.state == "resident")
    (token_file,) = (world.folder / "run").rglob(f"{lease_id}-*.token")
    token = token_file.read_text(encoding="ascii")
    for number in range(rounds):
        turns = [(result.acquire_ms, _acquire), (result.ping_ms, _ping)]
        for samples, turn in turns if number % 2 else reversed(turns):
            begun_s = time.perf_counter()
            turn(world.socket, lease_id, token)
            samples.append(1000 * (time.perf_counter() - begun_s))
    for percent in (50, 99):
        ours, theirs = (percentile(samples, percent) for samples in (result.acquire_ms, result.ping_ms))
        figure = f"{ours:.2f} ms, compared with {theirs:.2f} ms: {ours / theirs:.2f} x"
        result.say(f"acquire of a resident kernel and an empty request, p{percent}", figure)


def _acquire(socket: str, lease_id: str, token: str) -> None:
    with BrokerClient(socket, token=token) as client:
        last = list(client.acquire(lease_id, AcquireRequest()))[-1]
    assert last.kind == ProgressKind.GRANTED, last.sentence


def _ping(socket: str, _lease_id: str, _token: str) -> None:
    with BrokerClient(socket) as client:
        client.ping()


def _check_nothing_left(world: World, temporary: Path) -> None:
    """After the world's end, check that no process, simulated memory or file outside its folder is left."""
    until(lambda: not anybody(world) or None, "every process has ended")
    assert not world.simulated_folder.exists(), f"simulated memory is left in {world.simulated_folder}"
    left = sorted(temporary.iterdir())
    assert not left, f"left in the temporary folder: {left}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=200, help="how many kernels (default 200)")
    parser.add_argument("--devices", type=int, default=8, help="how many devices, each with room for eight (default 8)")
    parser.add_argument("--minutes", type=float, default=10, help="how long they are in use (default 10)")
    parser.add_argument("--rest", type=float, default=60, help="how long to stay idle, in seconds (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="decides what the users do (default 1)")
    options = parser.parse_args()
    size = Size(kernels=options.kernels, devices=options.devices)
    result = run_load(size, Plan(use_s=60 * options.minutes, rest_s=options.rest, seed=options.seed))
    print(result.table())
    if result.rest > REST_GOAL:
        print(f"the broker at rest takes more than {REST_GOAL:.0%} of a core", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
