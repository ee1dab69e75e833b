"""Run many seeded simulations of the arbiter: `python -m tests.core.seeds --seeds 10000 [--first 0] [--events 2000] [--jobs N]`.

Exits with 1 and lists the failing seeds if a law or an invariant was broken. To repeat one: `--first SEED --seeds 1`.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from fractional_gpu.core.model import LeaseState
from tests.core.simulation import simulate

__all__ = ["main", "run_seed"]


def run_seed(seed: int, *, events: int) -> tuple[int, str, dict[str, int]]:
    """Return the seed, what broke (empty: nothing), and how often each state was entered and each reason given."""
    try:
        world = simulate(seed, events)
    except Exception as error:  # noqa: BLE001 - whatever the arbiter raises is a fault
        return seed, f"{type(error).__name__}: {error}", {}
    return seed, "", dict(world.observer.counts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description="seeded simulations of the arbiter, every law checked after every event"
    )
    parser.add_argument("--seeds", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--events", type=int, default=2_000, help="events per seed (2000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per processor)")
    options = parser.parse_args(arguments)
    begun, broken, moves = time.monotonic(), 0, Counter[str]()
    with ProcessPoolExecutor(options.jobs) as executor:
        seeds = range(options.first, options.first + options.seeds)
        run = partial(run_seed, events=options.events)
        for done, (seed, what, counts) in enumerate(executor.map(run, seeds, chunksize=4), 1):
            moves.update(counts)
            if done % 500 == 0:
                sys.stderr.write(f"{done} seeds after {time.monotonic() - begun:.0f} s, {broken} broken so far\n")
            if what:
                broken += 1
                sys.stdout.write(f"seed {seed}: {what}\n")
    seconds = time.monotonic() - begun
    entered = ", ".join(f"{state} {moves.pop(state, 0)}" for state in LeaseState)
    said = ", ".join(f"{reason} {number}" for reason, number in sorted(moves.items()))
    sys.stdout.write(
        f"{options.seeds} seeds of {options.events} events in {seconds:.0f} s: {broken} broken\n"
        f"states entered: {entered}\nreasons given: {said}\n"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
