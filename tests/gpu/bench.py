"""The benchmark on a real GPU: python tests/gpu/bench.py --json results.json (see docs/gpu-tests.md).

Three parts: `phases` (suspend and resume by size and phase, beside pinned copies), `cells` (what a fraction adds to a cell) and `sharing`
(two kernels on one device). `--simulated` runs the same on a simulated device: it tries the benchmark, and says nothing about GPUs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_HERE), *(str(_HERE / folder) for folder in ("provisioner", "kernelext", "hub_spawner"))]

from tests.gpu.bench_kernels import measure_cells, measure_sharing
from tests.gpu.bench_phases import PHASES, measure_phases
from tests.gpu.installed import entry_points_installed
from tests.gpu.kernels import close_event_loop
from tests.gpu.lab import Lab, open_lab
from tests.gpu.results import machine

PARTS = ("phases", "cells", "sharing")
SIZES_MIB = (512, 2048, 8192, 32768, 65536)
SIMULATED_SIZES_MIB = (16, 64)
_HEADER = ("held", "moved", "shrinking", "suspend", "resume", *(f"{phase}" for phase in ("shrink", *PHASES)), "left")


def say(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def as_table(phases: Mapping[str, Any]) -> str:
    """Return the sizes as a markdown table."""
    lines = [_HEADER, tuple("---" for _ in _HEADER)]
    for row in phases["sizes"]:
        if "not_measured" in row:
            lines.append((f"{row['held_mib']} MiB", row["not_measured"], *("" for _ in _HEADER[2:])))
            continue
        lines.append(
            (
                f"{row['held_mib']} MiB",
                f"{row['moved_mib']} MiB",
                "on" if row["shrinking"] else "off",
                f"{row['suspend_s']:.3f} s, {row['suspend_gb_per_s']:.1f} GB/s",
                f"{row['resume_s']:.3f} s, {row['resume_gb_per_s']:.1f} GB/s",
                *(f"{row['phases_s'][phase]:.3f} s" for phase in ("shrink", *PHASES)),
                f"{row['left_mib']} MiB",
            )
        )
    copies = phases["pinned_copies_gb_per_s"]
    ends = f"Pinned copies in the same run: {copies['to_device']} GB/s to the device, {copies['to_host']} GB/s to the host."
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", ends])


def _with_lab(measure: Callable[[Lab], dict[str, Any]], *, simulated: bool) -> dict[str, Any]:
    with open_lab(simulated=simulated) as lab:
        try:
            return measure(lab)
        finally:
            close_event_loop()


def main() -> int:
    """Measure, print the table to stdout and write the JSON. 1 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description="The benchmark on a real GPU.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated (default: all)")
    parser.add_argument("--times", type=int, default=3, help="samples of each size and of each sharing (default: 3)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MIB", help="held sizes (default: 0.5 to 64 GiB)")
    parser.add_argument("--holder", choices=("torch", "driver"), default="torch", help="what holds memory in phases")
    parser.add_argument("--small-pages", action="store_true", help="phases: give the process no huge pages")
    parser.add_argument("--simulated", action="store_true", help="try the benchmark itself on a simulated device")
    options = parser.parse_args()
    simulated: bool = options.simulated
    try:
        found = machine(simulated=simulated, torch=options.holder == "torch")
    except RuntimeError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1

    def keep(part: str, measured: dict[str, Any]) -> None:
        """Write what there is: a long run that ends early has not been for nothing."""
        found[part] = measured
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    sizes = options.sizes or (SIMULATED_SIZES_MIB if simulated else SIZES_MIB)
    blocks, cells, work = (4, 10, 100) if simulated else (25, 40, 2000)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "phases": lambda: measure_phases(
            sizes,
            times=options.times,
            holder="simulated" if simulated else options.holder,
            small_pages=options.small_pages,
            say=say,
            keep=partial(keep, "phases"),
        ),
        "cells": lambda: _with_lab(
            lambda lab: measure_cells(lab, blocks=blocks, cells=cells, say=say), simulated=simulated
        ),
        "sharing": lambda: _with_lab(
            lambda lab: measure_sharing(lab, work=work, times=options.times, say=say), simulated=simulated
        ),
    }
    with entry_points_installed():
        for part in options.only or PARTS:
            keep(part, parts[part]())
    if simulated:
        sys.stdout.write("On a simulated device: these numbers say nothing about GPUs.\n\n")
    if "phases" in found:
        sys.stdout.write(as_table(found["phases"]) + "\n")
    rest = {part: found[part] for part in PARTS[1:] if part in found}
    if rest:
        sys.stdout.write(f"\n{json.dumps(rest, indent=2)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
