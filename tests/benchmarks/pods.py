"""Notebook sessions made of a cluster's pods: a load that no rule of this project was tuned on.

    python -m tests.benchmarks.pods openb_pod_list_default.csv --day 20 --sessions sessions.csv --cells cells.csv

The file is a list of pods of the public GPU-sharing trace (Alibaba's cluster-trace-gpu-v2023, `openb_pod_list_*.csv`); its columns are
`COLUMNS` and others that are not read. It writes the two files of `jupyter gpu simulate --trace`. Pods are
training and inference jobs, and no cells of notebooks. What is assumed to make sessions of them:

- The run time of a pod, from `scheduled_time` to `deletion_time`, is the duration of a cell. Pods without a GPU, pods that were never
  scheduled, and those that ran for more than 12 h (services) are left out.
- Pods of the same request (CPU, memory, GPUs, share of a GPU, quality of service) that follow one another are the runs of one person: a
  pod continues the session of its request that ended last before it, if that was at most 4 h before, on the same day. Otherwise it is
  the first of a new session, of another person. So overlapping pods of one request belong to several people.
- The pause to the next pod is the gap. A session opens with its first pod and closes an hour after the end of its last one.
- A pod uses the share of a GPU that it asks for: so much of its time (`gpu_util`), and nine tenths of so much of its memory.
  The trace does not say how much memory its GPUs have; 24 GiB are assumed (`--gpu-memory`).

A day goes from midnight to midnight of the trace's time. The days that are used are those on which at least `LEAST_RUNS` pods begin; they
are counted from 1. Nothing is drawn: one file gives one list of sessions.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fractional_gpu.core.units import parse_memory_mib
from fractional_gpu.simulator import TraceError
from fractional_gpu.simulator.traces import Cell, Session, read_table, whole, write_sessions

COLUMNS = (
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "qos",
    "scheduled_time",
    "deletion_time",
)
GPU_MIB = 24_576
LEAST_RUNS = 100
_DAY_S, _LONGEST_RUN_S, _LONGEST_PAUSE_S, _STAYS_OPEN_S = 86_400, 12 * 3600, 4 * 3600, 3600
_MEMORY_PERCENT = 90  # of its share's memory that a pod holds
_LAST_S = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One pod that ran: times in s, and what it asked for."""

    start_s: int
    end_s: int
    request: tuple[str, ...]
    gpus: int
    milli: int  # of each GPU


def read_days(pods: Path) -> list[list[Run]]:
    """Return the runs of each day that is used, in the order of their starts. Raises TraceError."""
    days: dict[int, list[Run]] = {}
    for run in read_table(pods, COLUMNS, _run):
        if run is not None:
            days.setdefault(run.start_s // _DAY_S, []).append(run)
    found = [sorted(days[day]) for day in sorted(days) if len(days[day]) >= LEAST_RUNS]
    if not found:
        raise TraceError(f"{pods} has no day on which {LEAST_RUNS} pods with a GPU begin; name a longer list of pods")
    return found


def _run(row: Mapping[str, str]) -> Run | None:
    """Return the pod's run; None if it is left out. Raises TraceError."""
    values = dict(row)
    gpus = whole(values, "num_gpu", most=64)
    if not gpus or not row["scheduled_time"].strip():
        return None
    start_s, end_s = whole(values, "scheduled_time", most=_LAST_S), whole(values, "deletion_time", most=_LAST_S)
    if not 0 < end_s - start_s <= _LONGEST_RUN_S:
        return None
    milli = whole(values, "gpu_milli", most=1000)
    return Run(start_s, end_s, tuple(row[column] for column in COLUMNS[:6]), gpus, milli)


def sessions_of(runs: Sequence[Run], gpu_mib: int = GPU_MIB) -> list[Session]:
    """Return the sessions of one day, whose times count from its midnight, in the order in which they open."""
    people: list[list[Run]] = []
    known: dict[tuple[str, ...], list[list[Run]]] = {}
    for run in sorted(runs):
        alike = known.setdefault(run.request, [])
        free = [one for one in alike if 0 <= run.start_s - one[-1].end_s <= _LONGEST_PAUSE_S]
        if free:
            max(free, key=lambda one: one[-1].end_s).append(run)
        else:
            people.append([run])
            alike.append(people[-1])
    return [_session(number, own, gpu_mib) for number, own in enumerate(people)]


def _session(number: int, runs: Sequence[Run], gpu_mib: int) -> Session:
    first = runs[0]
    midnight_s = first.start_s // _DAY_S * _DAY_S
    mib = max(1, gpu_mib * first.milli * _MEMORY_PERCENT // 100_000)
    util = max(1, first.milli // 10)
    cells = [
        Cell((run.start_s - midnight_s) * 1000, (run.end_s - run.start_s) * 1000, run.gpus, mib, util) for run in runs
    ]
    return Session(
        session_id=f"s{number:05d}",
        user=f"p{number:05d}",
        open_ms=cells[0].start_ms,
        close_ms=(runs[-1].end_s + _STAYS_OPEN_S - midnight_s) * 1000,
        gpus=first.gpus,
        gpu_mib=mib,
        cells=tuple(cells),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the sessions of one day."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("pods", type=Path, metavar="PODS", help="the list of pods, a CSV file")
    made.add_argument("--day", type=int, default=1, metavar="N", help="of the days that are used (default: 1)")
    made.add_argument("--gpu-memory", default="24GiB", metavar="SIZE", help="of each GPU (default: 24GiB)")
    made.add_argument("--sessions", type=Path, required=True, metavar="FILE", help="write the sessions there")
    made.add_argument("--cells", type=Path, required=True, metavar="FILE", help="write their cells there")
    options = made.parse_args(arguments)
    try:
        days, gpu_mib = read_days(options.pods), parse_memory_mib(options.gpu_memory)
    except (TraceError, ValueError) as error:
        made.error(str(error))
    if not 1 <= options.day <= len(days):
        made.error(f"--day {options.day} is not allowed; {options.pods} has the days 1 to {len(days)}")
    sessions = sessions_of(days[options.day - 1], gpu_mib)
    write_sessions(sessions, options.sessions, options.cells)
    print(f"{len(sessions)} sessions with {sum(len(one.cells) for one in sessions)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
