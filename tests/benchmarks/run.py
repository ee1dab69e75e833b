"""The benchmarks: what a fraction of a GPU costs compared with plain Jupyter in the same run.

Run it with `tests/run bench` (or run this file where the project is installed). It needs no GPU: it starts a private broker with a
simulated device, and leaves nothing behind. The table goes to stdout, progress to stderr. Exits with 1 if a goal is missed, except with
--quick.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import decision_time
from tests.benchmarks.acquiring import measure_acquires
from tests.benchmarks.cells import measure_cells
from tests.benchmarks.crowding import measure_crowds
from tests.benchmarks.loading import measure_loading
from tests.benchmarks.recovering import measure_recovery
from tests.benchmarks.report import Row, as_json, as_table
from tests.benchmarks.serving import measure_serving
from tests.benchmarks.starting import measure_starts
from tests.benchmarks.swapping import measure_swaps
from tests.support.paths import COMPLETE_PYTHONPATH
from tests.support.world import World, new_world

_DEVICE = "1x1GiB"
_TENTH, _QUARTER, _WHOLE = 100, 250, 1000  # milli-GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much is measured."""

    start_pairs: int = 40
    crowds: int = 9
    loading_pairs: int = 40
    cell_pairs: int = 4  # pairs of kernels; with the next two: 1,000 cells on each side
    cell_blocks: int = 25
    cells: int = 10
    leases: int = 200
    acquires: int = 2000
    sizes_mib: tuple[int, ...] = (64, 256, 640)
    swaps: int = 9
    requests: int = 21
    recovered: int = 64
    recoveries: int = 9
    decisions: int = 4_000


QUICK = Amounts(
    start_pairs=2,
    crowds=1,
    loading_pairs=2,
    cell_pairs=1,
    cell_blocks=2,
    cells=10,
    leases=20,
    acquires=50,
    sizes_mib=(64,),
    swaps=2,
    requests=2,
    recovered=4,
    recoveries=2,
    decisions=400,
)


def say(line: str) -> None:
    """Report the progress."""
    print(line, file=sys.stderr, flush=True)


def measure(world: World, amounts: Amounts, parts: Sequence[str]) -> list[Row]:
    """Return the rows of the chosen parts. The environment is the world's already."""
    tenth, quarter, whole = world.install(_TENTH, _QUARTER, _WHOLE)
    # In one part leases stand for kernels.
    world.configure("c.GPUBroker.pools = {'default': {'unattached_leases': 512, 'fractions': 'any'}}")
    world.start_broker()
    work: dict[str, Callable[[], list[Row]]] = {
        "start": lambda: [measure_starts(quarter, amounts.start_pairs, say)],
        "crowds": lambda: measure_crowds(world, tenth, amounts.crowds, say),
        "loading": lambda: [measure_loading(amounts.loading_pairs, say)],
        "cells": lambda: [measure_cells(quarter, amounts.cell_pairs, amounts.cell_blocks, amounts.cells, say)],
        "acquire": lambda: measure_acquires(world.socket, quarter, amounts.leases, amounts.acquires, say),
        "swaps": lambda: measure_swaps(
            world.socket, world.simulated_folder, whole, sizes_mib=amounts.sizes_mib, times=amounts.swaps, say=say
        ),
        "serving": lambda: measure_serving(world, amounts.requests, say),
    }
    return [row for part in parts for row in work[part]()]


def _circumstances(before: tuple[float, float, float]) -> str:
    """Print what a reader must know about the machine: on a loaded one the intervals are wide."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"Python {platform.python_version()}, ipykernel {version('ipykernel')}, jupyter_client {version('jupyter_client')}; "
        f"{os.cpu_count()} CPUs, {memory_gib:.0f} GiB; load average {before[0]:.1f} before, {os.getloadavg()[0]:.1f} after."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit status."""
    parts = ("start", "crowds", "loading", "cells", "acquire", "swaps", "serving", "recovery", "decisions")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run; its numbers mean little")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers here")
    parser.add_argument("--only", metavar="PART", choices=parts, action="append", help=f"one of {', '.join(parts)}")
    options = parser.parse_args(arguments)
    before, amounts, chosen = os.getloadavg(), QUICK if options.quick else Amounts(), options.only or parts
    crowds: list[decision_time.Crowd] = []
    if "decisions" in chosen:
        say("decisions")
        crowds = decision_time.measure(amounts.decisions)
    rows = _measure_kernels(amounts, [part for part in chosen if part not in ("decisions", "recovery")])
    if "recovery" in chosen:
        rows += measure_recovery(amounts.recovered, amounts.recoveries, say)
    print("\n\n".join(filter(None, (as_table(rows) if rows else "", decision_time.as_table(crowds) if crowds else ""))))
    print(f"\n{_circumstances(before)}")
    if options.json is not None:
        found = as_json(rows) + decision_time.as_json(crowds)
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    met = all(row.met is not False for row in rows) and not decision_time.missed(crowds)
    return 0 if options.quick or met else 1


def _measure_kernels(amounts: Amounts, parts: Sequence[str]) -> list[Row]:
    """Measure the parts that need kernels and a broker, in a separate world."""
    if not parts:
        return []
    with new_world(_DEVICE) as world:
        # Bytecode is kept, as in an installation: else each kernel would compile the extension again.
        world.environment["PYTHONPATH"] = COMPLETE_PYTHONPATH
        world.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ.clear()
        os.environ.update(world.environment)
        return measure(world, amounts, parts)


if __name__ == "__main__":
    sys.exit(main())
