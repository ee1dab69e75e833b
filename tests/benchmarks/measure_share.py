"""Whether `jupyter gpu measure` names the right share while others come and go: real processes on the simulated device.

    python -m tests.benchmarks.measure_share [--seeds 20] [--jobs 3] [--within 115s] [--json]

Each seed has a load whose units of work take 150 ms alone, with 5 % noise, and use a known part of the device. So the model of the device
says how much slower it is on each share. Visitors come and go by the seed: leases of the same user, leases that the measuring user cannot
see (it has a seat of a hub, and they have none), and processes without a lease. Most of them work on the device; some only hold memory.

An answer is right if it names the smallest share that suffices and rules out the smaller ones. It is unknown if it leaves a share open, and
wrong otherwise. Exits with 1 if fewer than 19 of 20 answers are right, or if fewer than 90 % of the intervals contain the truth.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from fractional_gpu.client.seat import SEAT_FILE_VARIABLE, Seat, SeatClient, write_seat
from fractional_gpu.core.time_slicing import slowed_milli, stretch_milli
from fractional_gpu.protocol.seats import SeatRequest
from tests.support.world import World, new_world

__all__ = ["Outcome", "Visit", "judged", "load_of", "measured", "seated_world", "visitor", "visits_of"]

UNIT_S: Final = 0.15
MOST_SLOWER: Final = 1.1
_SHARES: Final = "1/3,1/2,1"
_DEVICES: Final = "1x2GiB"
MEMORY: Final = "128MiB"  # of each lease: small, so that visitors find room next to a full set of tenants
_POOL: Final = "{'idle_after': 'on-demand', 'oversubscription': 4, 'fractions': ['1/8', '1/3', '1/2', '1']}"
_CONFIG: Final = f"c.GPUBroker.pools = {{'default': {_POOL}}}"
_LOAD: Final = """
import random, sys
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu_kernel.measure import tick
draw = random.Random()
buffer = cuda.allocate(16 << 20)
while True:
    cuda.launch(float(sys.argv[2]) * draw.lognormvariate(0, 0.05), float(sys.argv[1]))
    tick()
"""
_VISITOR: Final = """
import sys
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(16 << 20)
while float(sys.argv[1]):
    cuda.launch(0.1, float(sys.argv[1]))
sys.stdin.read()
"""
_RIGHT_MILLI: Final = {250: 333, 420: 500, 750: 1000}
"""By what a load uses of the device alone, thousandths: the smallest of 1/3, 1/2 and 1 that suffices for it."""
_JITTER_MILLI: Final = 20  # of that use, by the seed: it changes no right share
_SPAN_S: Final = 600.0  # of a schedule: longer than any measurement


@dataclass(frozen=True, slots=True)
class Visit:
    """Another tenant: `kind` is mine, hidden or stranger; `use` what it uses of the device (0: it holds memory only)."""

    kind: str
    after_s: float  # since the end of the visit before
    stays_s: float
    use: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed's measurement said. Shares in milli-GPU."""

    seed: int
    use_milli: int
    right_milli: int
    answer_milli: int | None  # None: it leaves open what a share does
    intervals: int
    holding: int
    unknown: int
    visits: int
    left_out: int
    rounds: int
    seconds: float

    @property
    def verdict(self) -> str:
        """right, unknown or wrong."""
        if self.answer_milli is None:
            return "unknown"
        return "right" if self.answer_milli == self.right_milli else "wrong"


def load_of(seed: int) -> tuple[int, int]:
    """Return what the seed's load uses of the device alone, and the share that is right for it, thousandths."""
    kinds = list(_RIGHT_MILLI.items())
    use_milli, right_milli = kinds[seed % len(kinds)]
    return use_milli + random.Random(seed).randint(-_JITTER_MILLI, _JITTER_MILLI), right_milli


def visits_of(seed: int) -> Iterator[Visit]:
    """Yield the seed's visitors, one after the other: present for about a quarter of the time."""
    draw = random.Random(f"visits {seed}")
    total_s = 0.0
    while total_s < _SPAN_S:
        one = Visit(
            kind=draw.choice(("mine", "hidden", "stranger")),
            after_s=draw.uniform(6, 22),
            stays_s=draw.uniform(1, 8),
            use=draw.choice((0.0, 0.3, 0.5, 0.8)),
        )
        total_s += one.after_s + one.stays_s
        yield one


def truth(tenants: int, use_milli: int, alone_s: float) -> float:
    """How many times longer a unit takes among equals than alone. A load leaves the device idle for a moment between its launches."""
    use_milli = min(1000, round(use_milli * UNIT_S / alone_s))
    return slowed_milli(use_milli, stretch_milli([use_milli] * tenants)) / 1000


def judged(seed: int, found: dict[str, Any], visits: int) -> Outcome:
    """Compare what a measurement said with the truth."""
    use_milli, right_milli = load_of(seed)
    alone, *others = found["settings"]
    intervals = holding = 0
    answer_milli: int | None = alone["setting"]["fraction_milli"] if alone["unit_s"] is not None else None
    for one in sorted(others, key=lambda one: -one["setting"]["fraction_milli"]):
        slower = one["slower"]
        if slower is None or slower["low"] <= MOST_SLOWER < slower["high"]:
            answer_milli = None  # whether this one suffices is open, so whether the answer is the smallest is, too
            break
        if slower["high"] <= MOST_SLOWER:
            answer_milli = one["setting"]["fraction_milli"]
    for one in others:
        if one["slower"] is not None:
            true = truth(one["setting"]["tenants"], use_milli, alone["median_s"])
            intervals += 1
            holding += one["slower"]["low"] <= true <= one["slower"]["high"]
    return Outcome(
        seed=seed,
        use_milli=use_milli,
        right_milli=right_milli,
        answer_milli=answer_milli,
        intervals=intervals,
        holding=holding,
        unknown=len(others) - intervals,
        visits=visits,
        left_out=sum(found["disturbed"].values()),
        rounds=found["rounds"],
        seconds=found["seconds"],
    )


@contextmanager
def seated_world() -> Iterator[tuple[World, dict[str, str]]]:
    """A world with a broker, and the environment of a user who has a seat of a hub there."""
    with new_world(_DEVICES) as world:
        world.configure(_CONFIG)
        world.start_broker()
        request = SeatRequest(owner="ada", pool="default", fraction_milli=1000, ttl_ms=3_600_000)
        with SeatClient(world.socket) as hub:
            *_, last = hub.take_seat(request)
        assert last.seat_id, last.sentence
        file = world.folder / "seat.json"
        seat = Seat(
            seat_id=last.seat_id, token=last.token, pool="default", fraction_milli=1000, memory_mib=last.memory_mib
        )
        write_seat(seat, file)
        yield world, {**world.environment, SEAT_FILE_VARIABLE: str(file)}


def visitor(world: World, seated: Mapping[str, str], visit: Visit) -> "subprocess.Popen[bytes]":
    """Start a visitor; SIGTERM ends it. `seated`: the environment of the user who measures."""
    program = [sys.executable, "-P", "-c", _VISITOR, str(visit.use)]
    environment: Mapping[str, str] = seated if visit.kind == "mine" else world.environment
    if visit.kind == "stranger":
        device_id = world.status().devices[0].device_id
        places = {
            "JUPYTER_GPU_SIMULATED_DIR": str(world.simulated_folder),
            "JUPYTER_GPU_SIMULATED_DEVICE": device_id,
        }
        environment = {**environment, **places}
    else:
        command = [sys.executable, "-m", "fractional_gpu.commands.main", "run", "--fraction", "1/8"]
        program = [*command, "--memory", MEMORY, "--name", "visitor", "--", *program]
    return subprocess.Popen(
        program,
        env=environment,
        cwd=world.notebooks,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


class Visitors:
    """Lets a schedule's visitors come and go in a thread, from `start` to `stop`."""

    def __init__(self, world: World, seated: dict[str, str], visits: Iterator[Visit]) -> None:
        self._world, self._seated, self._visits = world, seated, visits
        self._over = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run, name="visitors")

    def start(self) -> None:
        """Begin the schedule."""
        self._thread.start()

    def stop(self) -> None:
        """End the schedule, and the visitor that is there."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        for visit in self._visits:
            if self._over.wait(visit.after_s):
                return
            with visitor(self._world, self._seated, visit) as process:
                self.count += 1
                self._over.wait(visit.stays_s)
                process.terminate()


def measured(seed: int, within: str, options: Sequence[str] = ("--fractions", _SHARES)) -> Outcome:
    """Measure the seed's load in a separate world, among the seed's visitors. Raises RuntimeError without an answer."""
    use_milli, _ = load_of(seed)
    command = [sys.executable, "-m", "fractional_gpu.commands.main", "measure", "--json", "--within", within]
    load = [sys.executable, "-P", "-c", _LOAD, str(use_milli / 1000), str(UNIT_S)]
    with seated_world() as (world, seated):
        visitors = Visitors(world, seated, visits_of(seed))
        visitors.start()
        try:
            ran = subprocess.run(
                [*command, "--memory", MEMORY, *options, "--", *load],
                env=seated,
                cwd=world.notebooks,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            visitors.stop()
    if not ran.stdout:
        raise RuntimeError(f"seed {seed}: jupyter gpu measure ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return judged(seed, json.loads(ran.stdout), visitors.count)


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "seed  uses  right  answer   verdict  intervals  true  rounds  visits  left out  seconds"
    for one in outcomes:
        answer = "-" if one.answer_milli is None else f"{one.answer_milli}m"
        yield (
            f"{one.seed:>4}  {one.use_milli / 10:>3.0f} %  {one.right_milli:>4}m  {answer:>6}  {one.verdict:>8}  {one.intervals:>9}"
            f"  {one.holding:>4}  {one.rounds:>6}  {one.visits:>6}  {one.left_out:>8}  {one.seconds:>7.0f}"
        )
    yield _totals(outcomes)


def _totals(outcomes: Sequence[Outcome]) -> str:
    verdicts = [one.verdict for one in outcomes]
    intervals, holding = sum(one.intervals for one in outcomes), sum(one.holding for one in outcomes)
    return (
        f"{verdicts.count('right')} of {len(outcomes)} right, {verdicts.count('unknown')} unknown, {verdicts.count('wrong')} wrong; "
        f"{holding} of {intervals} intervals hold the truth, {sum(one.unknown for one in outcomes)} unknown"
    )


def _is_good(outcomes: Sequence[Outcome]) -> bool:
    right = sum(one.verdict == "right" for one in outcomes)
    return right * 20 >= len(outcomes) * 19 and sum(one.holding for one in outcomes) * 10 >= 9 * sum(
        one.intervals for one in outcomes
    )


def main() -> int:
    """Measure all seeds, some at a time; print the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many (20)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first one (0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    parser.add_argument("--within", default="115s", metavar="DURATION", help="of each measurement (115s)")
    parser.add_argument("--json", action="store_true", help="print all outcomes as JSON")
    options = parser.parse_args()
    begun_s = time.monotonic()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for done in as_completed([pool.submit(measured, seed, options.within) for seed in seeds]):
            outcomes.append(one := done.result())
            progress = f"{len(outcomes)} of {options.seeds} done in {time.monotonic() - begun_s:.0f} s"
            print(f"seed {one.seed}: {one.verdict}; {progress}", file=sys.stderr, flush=True)
    outcomes.sort(key=lambda one: one.seed)
    if options.json:
        print(json.dumps([{**asdict(one), "verdict": one.verdict} for one in outcomes], indent=2))
    else:
        print("\n".join(_table(outcomes)))
    return 0 if _is_good(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
