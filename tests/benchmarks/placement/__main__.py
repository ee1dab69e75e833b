"""How much of a published cluster a placement policy can allocate, and how the weights of `default` were chosen.

    python -m tests.benchmarks.placement --nodes FILE --pods FILE [--policy NAME]... [--seeds 42-51]
    python -m tests.benchmarks.placement --nodes FILE --pods FILE --tune [--seeds 1-3]

The files are from the Alibaba trace `cluster-trace-gpu-v2023`: `openb_node_list_gpu_node.csv` and `openb_pod_list_default.csv`.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

from fractional_gpu.simulator import SimulationError
from tests.benchmarks.placement.cluster import place, read_nodes, read_pods
from tests.benchmarks.placement.policies import POLICIES
from tests.benchmarks.placement.tuning import tune


def seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.placement", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nodes", type=Path, required=True, help="CSV of nodes: sn,cpu_milli,gpu,model")
    parser.add_argument(
        "--pods", type=Path, required=True, help="CSV of pods: name,cpu_milli,num_gpu,gpu_milli,gpu_spec"
    )
    parser.add_argument("--policy", choices=POLICIES, action="append", help="repeatable (default: all)")
    parser.add_argument("--seeds", type=seeds, help="orders of arrival (default: 42-51; with --tune 1-3)")
    parser.add_argument(
        "--tune", action="store_true", help="choose the default policy's weights, on seeds other than 42-51"
    )
    options = parser.parse_args()
    nodes, pods = read_nodes(options.nodes), read_pods(options.pods)
    if options.tune:
        best = tune(
            nodes, pods, options.seeds or range(1, 4), lambda step: print(f"{step.alloc_at_130:7.3f} {step.weights}")
        )
        print(f"best: {best.alloc_at_130:.3f} {best.weights}")
        return 0
    print("| policy | at 100 % | at 130 % |\n|---|---:|---:|")
    for name in options.policy or POLICIES:
        outcomes = [place(nodes, pods, POLICIES[name](pods), seed) for seed in options.seeds or range(42, 52)]
        means = (fmean(one.alloc_at_100 for one in outcomes), fmean(one.alloc_at_130 for one in outcomes))
        print(f"| {name} | {means[0]:.1f} | {means[1]:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SimulationError as error:
        sys.exit(str(error))
