"""How long a class takes to start: all ask a real hub for a server at once, start a kernel in it and run a first cell.

    python -m tests.benchmarks.class_start [--students 20] [--rounds 1]

This project's simple spawner and kernels of an eighth of a GPU, compared in turns with JupyterHub's simple local spawner and plain
kernels. There are simulated GPUs for the whole class: it is the start that is measured, not the wait for a GPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from threading import Barrier
from typing import NamedTuple
from unittest.mock import patch

from tests.benchmarks.kernels import PLAIN
from tests.support.hub import HubWorld, new_hub
from tests.support.paths import COMPLETE_PYTHONPATH
from tests.support.world import new_world

_MILLI = 125
_PATIENCE_S = 1_800
_BEFORE = "c.JupyterHub.spawner_class = 'simple'"


class _Times(NamedTuple):
    """Seconds until the last student has a server, has a running kernel, and has seen the first cell's output."""

    server: float
    kernel: float
    cell: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(
        description="The start of a class, with this project's spawner and with a plain one."
    )
    parser.add_argument("--students", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    # A whole class at once, on a few processors, takes longer than tests have patience for.
    for module in ("hub", "world"):
        patch(f"tests.support.{module}.DEADLINE_S", _PATIENCE_S).start()
    load, found = os.getloadavg()[0], {"fractional": list[_Times](), "plain": list[_Times]()}
    for turn in range(options.rounds):
        for kind in sorted(found, reverse=turn % 2 == 1):
            print(f"{options.students} {kind} starts ...", file=sys.stderr, flush=True)
            found[kind].append(_measure(options.students, fractional=kind == "fractional"))
    print(
        f"{options.students} students, {options.rounds} rounds; {os.cpu_count()} CPUs; load average {load:.1f} before\n"
    )
    print("| until all have | fractional | plain | ratio |\n|---|---|---|---|")
    for name, label in (("server", "a server"), ("kernel", "a running kernel"), ("cell", "a first cell's output")):
        ours, plain = (median(getattr(one, name) for one in times) for times in found.values())
        print(f"| {label} | {ours:.1f} s | {plain:.1f} s | {ours / plain:.2f} |")


def _measure(students: int, *, fractional: bool) -> _Times:
    names = [f"student-{number}" for number in range(students)]
    devices = -(-students * _MILLI // 1000)
    pool = {"fractions": ["1/8"], "wait_bound": "100%"}
    with new_world(f"{devices}x2GiB") as world:
        world.environment["PYTHONPATH"] = COMPLETE_PYTHONPATH
        world.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as in run.py
        (kernelspec,) = world.install(_MILLI)
        with (
            new_hub(
                world,
                {"pools": {"default": pool}},
                before="" if fractional else _BEFORE,
                http_timeout=_PATIENCE_S,
            ) as hub,
            ThreadPoolExecutor(students) as threads,
        ):
            for name in names:
                hub.add_user(name)
            together = Barrier(students)
            began = time.perf_counter()
            ends = threads.map(lambda name: _start(hub, name, kernelspec if fractional else PLAIN, together), names)
            return _Times(*(max(times) - began for times in zip(*ends, strict=True)))


def _start(hub: HubWorld, name: str, kernelspec: str, together: Barrier) -> tuple[float, float, float]:
    together.wait()
    server = hub.server(name)
    has_server = time.perf_counter()
    notebook = server.start(kernelspec)
    has_kernel = time.perf_counter()
    assert notebook.must("print(6 * 7)").text == "42\n"
    return has_server, has_kernel, time.perf_counter()


if __name__ == "__main__":
    main()
