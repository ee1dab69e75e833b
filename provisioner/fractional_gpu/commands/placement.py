"""The placement benchmark of `jupyter gpu simulate --placement`."""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fractional_gpu.commands.terminal.errors import UsageError
from fractional_gpu.simulator.placement import (
    NodeShape,
    Outcome,
    PodKind,
    place,
    read_nodes,
    read_pods,
)
from fractional_gpu.simulator.policies import POLICIES
from fractional_gpu.simulator.tuning import Step, tune

__all__ = ["configure_placement", "run_placement"]

_QUIET_S = 2.0
_MOST_SEEDS = 1000
_SEEDS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def configure_placement(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    group = parser.add_argument_group("the placement benchmark, instead of sessions")
    group.add_argument("--placement", action="store_true", help="how much of a cluster a policy can give away")
    group.add_argument("--nodes", type=Path, metavar="FILE", help="CSV of nodes: sn,cpu_milli,memory_mib,gpu,model")
    group.add_argument(
        "--pods", type=Path, metavar="FILE", help="CSV of pods: name,cpu_milli,...,num_gpu,gpu_milli,gpu_spec"
    )
    group.add_argument("--seeds", metavar="A-B", help="orders of arrival (default: 42-51; with --tune 1-3)")
    group.add_argument(
        "--tune", action="store_true", help="choose the default policy's weights, on seeds other than 42-51 (minutes)"
    )


def run_placement(options: argparse.Namespace) -> int:
    """Run the benchmark and print it."""
    if options.nodes is None or options.pods is None:
        raise UsageError("--placement needs --nodes FILE and --pods FILE")
    name = options.policy if options.policy is not None else "default"
    if name not in POLICIES:
        raise UsageError(f"--policy {name!r} is not a placement policy; allowed: {', '.join(POLICIES)}")
    nodes, pods = read_nodes(options.nodes), read_pods(options.pods)
    if not any(node.gpus for node in nodes):
        raise UsageError(f"no node of {options.nodes} has a GPU")
    if not any(pod.gpus for pod in pods):
        raise UsageError(f"no pod of {options.pods} asks for a GPU")
    if options.tune:
        return _tune(nodes, pods, _seeds(options.seeds or "1-3"), as_json=options.json)
    outcomes: list[Outcome] = []
    spoke = time.perf_counter()
    seeds = _seeds(options.seeds or "42-51")
    for seed in seeds:
        outcomes.append(place(nodes, pods, POLICIES[name](pods), seed))
        if time.perf_counter() - spoke >= _QUIET_S:
            spoke = time.perf_counter()
            print(f"{name}: {len(outcomes)} of {len(seeds)} seeds", file=sys.stderr)
    mean_100 = round(sum(outcome.alloc_at_100 for outcome in outcomes) / len(outcomes), 3)
    mean_130 = round(sum(outcome.alloc_at_130 for outcome in outcomes) / len(outcomes), 3)
    if options.json:
        listed = [
            {
                "seed": outcome.seed,
                "alloc_at_100": round(outcome.alloc_at_100, 3),
                "alloc_at_130": round(outcome.alloc_at_130, 3),
            }
            for outcome in outcomes
        ]
        mean = {"alloc_at_100": mean_100, "alloc_at_130": mean_130}
        print(json.dumps({"policy": name, "seeds": listed, "mean": mean}))
        return 0
    print(f"{name}: GPUs allocated, percent, when 100 % and 130 % of them were asked for")
    for outcome in outcomes:
        print(f"  seed {outcome.seed:<9} {outcome.alloc_at_100:6.2f} {outcome.alloc_at_130:6.2f}")
    print(f"  mean           {mean_100:6.2f} {mean_130:6.2f}")
    return 0


def _tune(nodes: Sequence[NodeShape], pods: Sequence[PodKind], seeds: Sequence[int], *, as_json: bool) -> int:
    """Choose weights; a line for each set that is tried, on standard error with `--json`."""
    tried: list[Step] = []

    def report(step: Step) -> None:
        tried.append(step)
        print(f"{step.alloc_at_130:7.3f} {_shown(step)}", file=sys.stderr if as_json else sys.stdout, flush=True)

    best = tune(nodes, pods, seeds, report)
    if as_json:
        print(json.dumps({"seeds": list(seeds), "tried": [_plain(step) for step in tried], "best": _plain(best)}))
    else:
        print(f"best of {len(tried)}, on the seeds {seeds[0]} to {seeds[-1]}: {best.alloc_at_130:.3f} {_shown(best)}")
    return 0


def _plain(step: Step) -> dict[str, object]:
    return {"weights": asdict(step.weights), "alloc_at_130": round(step.alloc_at_130, 3)}


def _shown(step: Step) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(step.weights).items())


def _seeds(text: str) -> list[int]:
    match = _SEEDS.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last < first + _MOST_SEEDS:
        raise UsageError(
            f"--seeds {text[:40]!r} is not allowed; a number or a range of at most {_MOST_SEEDS} such as 42-51 is"
        )
    return list(range(first, last + 1))
