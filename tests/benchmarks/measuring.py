"""`jupyter gpu measure` in real processes on the simulated device, whose slowdown is known.

    python -m tests.benchmarks.measuring tenants [--within 3m] --svg FILE    n models on one device against n devices
    python -m tests.benchmarks.measuring intervals [--seeds 400]             how often intervals contain the truth, in pure simulation

A model is a program whose units of work take about 60 ms alone, with noise, and use a part of the device.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fractional_gpu.curves import Panel, Series, curves
from tests.commands.measuring.test_study import holding
from tests.support.world import World, new_world

MODEL = """
import random, sys
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu_kernel.measure import tick
draw = random.Random()
buffer = cuda.allocate(16 << 20)
while True:
    cuda.launch(0.06 * draw.lognormvariate(0, 0.1), float(sys.argv[1]))
    tick()
"""
USES_MILLI = (200, 400, 800)


def measured(world: World, use_milli: int, *options: str) -> dict[str, Any]:
    """Return the output of `jupyter gpu measure --json` for a model."""
    command = [sys.executable, "-m", "fractional_gpu.commands.main", "measure", "--json", *options, "--"]
    model = [sys.executable, "-c", MODEL, str(use_milli / 1000)]
    ran = subprocess.run(
        [*command, *model], env=world.environment, cwd=world.notebooks, stdout=subprocess.PIPE, text=True, check=False
    )
    if not ran.stdout:
        raise SystemExit(f"jupyter gpu measure ended with {ran.returncode} and said nothing")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def intervals(options: argparse.Namespace) -> None:
    """Print how often the stated intervals hold the truth, by kind of noise."""
    print("| noise of a step | alone | others come and go, unnoticed |")
    print("|---|---|---|")
    for skewed in ("", "skewed", "among others only"):
        for noise in (0.003, 0.01, 0.03, 0.06):
            cells = [f"{noise:.1%}{', skewed' if skewed else ''}{' and among others only' if 'only' in skewed else ''}"]
            for others in (False, True):
                inside, total = holding(noise=noise, others=others, skewed=skewed, seeds=options.seeds)
                cells.append(f"{inside / total:.1%} of {total}")
            print(f"| {' | '.join(cells)} |", flush=True)


def tenants(options: argparse.Namespace) -> None:
    """Print the table of n models on one device against n devices, and write the picture."""
    columns: list[list[Panel]] = []
    print(
        "| model uses | models | units/s, one device | n devices | median | p95 | slower than alone | GPU s for a unit |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with new_world() as world:
        world.start_broker()
        for use_milli in USES_MILLI:
            found = measured(world, use_milli, "--within", options.within, "--copies", "1,3")
            alone, *_ = known = [one for one in found["settings"] if one["unit_s"] is not None]
            for one in known:
                print(_row(use_milli, one, alone))
            columns.append(_panels(f"uses {use_milli / 10:g} % alone", known, alone))
    if options.svg is not None:
        middle = columns[len(columns) // 2]  # one column: a phone shows it
        text = curves([[panel] for panel in middle], across="models", up="see each panel", note="")
        options.svg.write_text(text, encoding="utf-8")


def _row(use_milli: int, one: dict[str, Any], alone: dict[str, Any]) -> str:
    models = one["setting"]["tenants"]
    slower = one["slower"]
    how = f"{slower['value']:.2f} ({slower['low']:.2f} to {slower['high']:.2f})" if slower is not None else "unknown"
    cells = [
        f"{use_milli / 10:g} %",
        str(models),
        f"{one['device_units_s']:.1f}",
        f"{models / alone['unit_s']:.1f}",
        f"{one['median_s'] * 1000:.0f} ms",
        f"{one['p95_s'] * 1000:.0f} ms",
        how if models > 1 else "1",
        f"{one['unit_gpu_s']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _panels(title: str, known: Sequence[dict[str, Any]], alone: dict[str, Any]) -> list[Panel]:
    """Throughput, latency and cost of one model over their number."""
    models = [one["setting"]["tenants"] for one in known]

    def panel(what: str, ours: Sequence[float], apart: Sequence[float]) -> Panel:
        def points(values: Sequence[float]) -> list[tuple[str, float, float]]:
            return [("", float(count), value) for count, value in zip(models, values, strict=True)]

        return Panel(
            f"{title}: {what}", [Series("on one device", points(ours)), Series("a device each", points(apart))]
        )

    return [
        panel(
            "units/s of all", [one["device_units_s"] for one in known], [count / alone["unit_s"] for count in models]
        ),
        panel("p95 latency, ms", [one["p95_s"] * 1000 for one in known], [alone["p95_s"] * 1000 for _ in known]),
        panel("GPU s for a unit", [one["unit_gpu_s"] for one in known], [alone["unit_gpu_s"] for _ in known]),
    ]


def main() -> None:
    """Run the command that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    other = commands.add_parser("tenants")
    other.add_argument("--within", default="3m")
    other.add_argument("--svg", type=Path)
    other.set_defaults(run=tenants)
    third = commands.add_parser("intervals")
    third.add_argument("--seeds", type=int, default=400)
    third.set_defaults(run=intervals)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
