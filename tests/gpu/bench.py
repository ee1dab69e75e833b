"""The benchmark on a real GPU: python tests/gpu/bench.py --json results.json (see docs/gpu-tests.md).

Suspend and resume by size and phase, next to pinned copies. `--simulated` runs the same on a simulated device: it tries the benchmark, and
says nothing about GPUs.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_HERE), *(str(_HERE / folder) for folder in ("provisioner", "kernelext", "hub_spawner"))]

from tests.gpu.bench_phases import PHASES, measure_phases
from tests.gpu.results import machine

SIZES_MIB = (512, 2048, 8192, 32768, 65536)
SIMULATED_SIZES_MIB = (16, 64)
_HEADER = ("held", "moved", "shrinking", "suspend", "resume", *(f"{phase}" for phase in ("shrink", *PHASES)), "left")


def say(line: str) -> None:
    """Report the progress."""
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


def main() -> int:
    """Measure, print the table to stdout and write the JSON. 1 if there is nothing to measure on."""
    parser = argparse.ArgumentParser(description="Suspend and resume on a real GPU, by size and phase.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--times", type=int, default=3, help="samples of each size (default: 3)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MIB", help="held sizes (default: 0.5 to 64 GiB)")
    parser.add_argument("--holder", choices=("torch", "driver"), default="torch", help="what holds memory")
    parser.add_argument("--small-pages", action="store_true", help="give the process no huge pages")
    parser.add_argument("--simulated", action="store_true", help="try the benchmark itself on a simulated device")
    options = parser.parse_args()
    simulated: bool = options.simulated
    try:
        found = machine(simulated=simulated, torch=options.holder == "torch")
    except RuntimeError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1

    def keep(measured: dict[str, Any]) -> None:
        """Write the sizes measured so far, in case the run ends early."""
        found["phases"] = measured
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    phases = measure_phases(
        options.sizes or (SIMULATED_SIZES_MIB if simulated else SIZES_MIB),
        times=options.times,
        holder="simulated" if simulated else options.holder,
        small_pages=options.small_pages,
        say=say,
        keep=keep,
    )
    keep(phases)
    if simulated:
        sys.stdout.write("On a simulated device: these numbers say nothing about GPUs.\n\n")
    sys.stdout.write(as_table(phases) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
