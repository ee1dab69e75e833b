"""The tables of the documents, from results that lie in tests/benchmarks/results.

    python -m tests.benchmarks.tables               writes every table into its page
    python -m tests.benchmarks.tables sharing ...   runs the benchmarks of these tables first, and keeps what they print
    python -m tests.benchmarks.tables --from FILE sharing   the same, with what the benchmark printed before

A page has a table between `<!-- table: NAME -->` and `<!-- end of NAME -->`. A benchmark prints Markdown tables; results/NAME.json has all
cells of one of them, and the page shows two or three columns without the intervals and what may be luck.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.paths import ROOT

RESULTS: Final = Path(__file__).with_name("results")
_INTERVAL: Final = re.compile(r" \((?:n = [\d,]+|-?[\d.,]+ to -?[\d.,]+|perhaps .*)\)")
_SHARING, _POLICIES = "tests.benchmarks.sharing", "tests.benchmarks.policies"
_ONE_GPU: Final = " --several-gpus 0 --gpus-per-host 0"


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a page. `columns` are heads and templates over the heads that the benchmark prints."""

    page: str
    command: str
    columns: dict[str, str]
    at: int = 0  # which of the tables that the benchmark prints
    rows: tuple[str, ...] = field(default=())  # first cells of the rows to show; empty: all


_SHARED: Final = {
    "way of sharing": "{way of sharing}",
    "GPUs needed": "{devices needed}",
    "worst user's p95 stretch on those": "{worst user's p95 stretch on those}",
}
_SETTING: Final = {"setting": "{setting}", "waited, %": "{waited, %}", "mean late, s": "{mean late, s}"}
_SETTINGS: Final = (
    "as shipped",
    "idle_after 0s",
    "idle_after 10m",
    "idle_after 1h",
    "compute pack",
    "preempt never",
    "may_move off",
    "min_residency 5m",
    "foresight off",
)
_IDLE: Final = {
    "`idle_after`": "{idle_after}",
    "held, GPU hours": "{held, GPU hours}",
    "mean wait, s": "{mean wait, s}",
}
_RULES: Final = (
    *("after 60 s", "after 300 s", "after 600 s", "after 3600 s"),
    *("auto, 0.02 an hour", "auto, 0.1 an hour", "auto, 1 an hour", "never"),
)
_LOADS: Final = ("published", "teaching-lab", "builders", "trainers", "night-jobs", "mixed", "pods")
_ATTACKS: Final = (
    *("`spin:1`", "`slow-bodies:200`", "`json:1000`", "`iopub:60000`"),
    *("`capacity:400`", "`ledger:4`", "`connects:100`", "`gates:200`"),
)
_OVERHEADS: Final = (
    "kernel start, to its first answer",
    "ipykernel made ready with the extension loaded, processor time",
    "a trivial cell on a resident kernel, to its idle status",
    *("acquire, with 200 leases, p50", "acquire, with 200 leases, p99"),
    *(f"{way} {size} MiB on the simulated device" for size in (64, 640) for way in ("suspend", "resume")),
    "a killed broker serves again, with 64 kernels",
    "first kernel, until its process runs, no broker before",
    "ten kernels by asyncio.gather, until all answer, no broker before",
)

TABLES: Final = {
    "bench": Table(
        "overhead.md",
        "tests/run bench",
        {"measured": "{measured}", "here": "{here}", "compared": "{compared}"},
        rows=_OVERHEADS,
    ),
    "decisions": Table(
        "overhead.md",
        "python -m tests.benchmarks.decision_time",
        {
            "leases on GPUs": "{leases} on {devices}, by time: {the pool shares by time}",
            "p50, µs": "{p50 µs}",
            "p99, µs": "{p99 µs}",
        },
    ),
    "swap-overhead": Table(
        "overhead.md",
        "python tests/benchmarks/swap_overhead.py",
        {
            "step, time of an NVML call": "{step}, {an NVML call takes}",
            "median": "{median}",
            "p95": "{95th percentile}",
        },
    ),
    "hostile": Table(
        "overhead.md",
        "python tests/benchmarks/hostile.py --seconds 5",
        {"attack": "{attack}", "ping": "{ping}, {ratio}", "cell": "{cell}"},
        rows=_ATTACKS,
    ),
    "sharing": Table("benchmarks.md", f"python -m {_SHARING}", _SHARED),
    "sharing-one-gpu": Table("benchmarks.md", f"python -m {_SHARING}{_ONE_GPU}", _SHARED),
    "sensitivity": Table(
        "benchmarks.md",
        "python -m tests.benchmarks.sensitivity",
        {"load": "{load}", "GPUs needed": "{devices needed}", "waited, %": "{waited, %}"},
        rows=(
            *("usual", "short cells", "memory of cells", "one GPU each", "40 % in classes"),
            *("three time zones", "usual, for a week"),
        ),
    ),
    "policies": Table("benchmarks.md", f"python -m {_POLICIES}{_ONE_GPU}", _SETTING, rows=_SETTINGS),
    "foresight": Table(
        "benchmarks.md",
        "python -m tests.benchmarks.foresight",
        {"`foresight`": "{foresight}", "waited, %": "{waited, %}", "p99 wait, s": "{p99 wait, s}"},
        rows=(
            "without foresight",
            *(f"{kind}, {false} % false" for kind in ("free", "displace") for false in (0, 70)),
        ),
    ),
    "idling-long": Table("benchmarks.md", "python -m tests.benchmarks.idling", _IDLE, rows=_RULES),
    "frontier": Table(
        "benchmarks.md",
        "python -m tests.benchmarks.frontier --seeds 14 --pods openb_pod_list_default.csv",
        {"load, GPUs": "{load}", "p95 wait, s": "{p95 wait, s}", "`auto` is": "{frontier of the waits}"},
        at=-1,
        rows=(*(f"{load}, tight" for load in _LOADS), "pods, enough", "pods, just enough"),
    ),
    "placement": Table(
        "benchmarks.md",
        "python -m tests.benchmarks.placement --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv",
        {"policy": "{policy}", "at 100 %": "{at 100 %}", "at 130 %": "{at 130 %}"},
    ),
    "engines": Table(
        "cluster-simulation.md",
        "python -m tests.benchmarks.cluster_doors --seeds 1,2",
        {
            "door, users and seed": "{way}, {users, seed}",
            "jobs that begin at once": "{at once}",
            "cells wait p50 / p95 / p99, s": "{cells wait p50 / p95 / p99, s}",
        },
        rows=("80 on 4 x 2 GPUs, 1",),
    ),
}


def printed(text: str) -> list[list[dict[str, str]]]:
    """Return the Markdown tables in a text, each as rows of cells by head."""
    tables: list[list[dict[str, str]]] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
            tables.append([])
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            tables[-1].append(dict(zip(head, cells, strict=True)))
    return tables


def markdown(table: Table, rows: Sequence[dict[str, Any]]) -> str:
    """Return the table as the page shows it, and its command."""
    shown = [row for row in rows if not table.rows or next(iter(row.values())) in table.rows]
    lines = [list(table.columns), ["---", *["---:" for _ in list(table.columns)[1:]]]]
    lines += [[_INTERVAL.sub("", one.format_map(row)) for one in table.columns.values()] for row in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nMeasured by `{table.command}`.\n"


def written(page: str) -> str:
    """Return the text of a page of docs/ with its tables from the results."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, table in TABLES.items():
        if table.page == page:
            rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
            before, start, rest = text.partition(f"<!-- table: {name} -->\n")
            _, end, after = rest.partition(f"<!-- end of {name} -->")
            assert end, f"docs/{page} has no place for the table {name}"
            text = f"{before}{start}\n{markdown(table, rows)}\n{end}{after}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, keep their results and write all tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tables", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("tables", nargs="*", metavar="NAME", choices=[*TABLES, []], help=", ".join(TABLES))
    parser.add_argument(
        "--from", dest="output", type=Path, metavar="FILE", help="what the benchmark printed, instead of a run"
    )
    options = parser.parse_args(arguments)
    ran: dict[str, str] = {}
    for name in options.tables:
        table = TABLES[name]
        if table.command not in ran:
            command = [sys.executable if word == "python" else word for word in shlex.split(table.command)]
            ran[table.command] = (
                options.output.read_text(encoding="utf-8")
                if options.output
                else subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
            )
        rows = printed(ran[table.command])[table.at]
        lines = ",\n".join(f" {json.dumps(row, ensure_ascii=False)}" for row in rows)
        (RESULTS / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    for page in {table.page for table in TABLES.values()}:
        (ROOT / "docs" / page).write_text(written(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
