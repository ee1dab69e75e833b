"""Sessions from this machine's own ledger (`jupyter gpu simulate --from-ledger`), and how well a run of them reproduces what was recorded.

Each lease is a session, each of its turns a cell, or the rest of one that was preempted. What a cell waited is taken out again: it comes
as long after the one before as its user let it come. What is known is as exact as the ledger: when a cell asked, ran and ended to the
millisecond; its memory as last sampled; its use of the device as it was learnt of the lease. A cell's run time includes what its neighbours
slowed it down by. Any cell of a kernel that was on a device then counts, whether it used the device or not.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.state_folder import LEDGER_NAMES, state_folder
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.ledger.past import PastLease, read_past
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.simulator.felt import Spread
from fractional_gpu.simulator.traces import Cell, Session

_WHOLE = 1000


def read_history(given: str) -> list[PastLease]:
    """Return the leases of a ledger that ran a cell; "": that of one's own broker. Raises CommandError."""
    path = Path(given) if given else _own_ledger()
    try:
        found = [one for one in read_past(path) if one.turns]
    except LedgerError as error:
        raise CommandError(str(error)) from None
    if not found:
        raise CommandError(
            f"{path} has recorded no cell on a GPU yet; run some notebooks with a broker of this version first"
        )
    return found


def _own_ledger() -> Path:
    folder = state_folder(socket_path())
    for name in LEDGER_NAMES:
        if (folder / name).exists():
            return folder / name
    raise CommandError(f"{folder} has no ledger; name one: --from-ledger FILE")


def sessions_of(history: Sequence[PastLease], *, pools: bool) -> list[Session]:
    """Return the sessions, in the order in which they open. `pools`: each in its own pool, else all in the default one."""
    base_ms = min(one.created_ms for one in history)
    found = [_session(one, base_ms, pools=pools) for one in history]
    return sorted(found, key=lambda one: (one.open_ms, one.session_id))


def _session(lease: PastLease, base_ms: int, *, pools: bool) -> Session:
    spec, waited_ms, held_mib = lease.spec, 0, 0
    cells: list[Cell] = []
    for turn in lease.turns:
        held_mib = min(spec.reserve_mib, max(held_mib, turn.used_mib, 1))
        use_milli = turn.use_milli or spec.fraction_milli
        start_ms = max(turn.asked_ms - base_ms - waited_ms, lease.created_ms - base_ms)
        ran_ms = turn.ended_ms - turn.begun_ms
        if turn.continues and cells:
            cells[-1] = replace(cells[-1], duration_ms=cells[-1].duration_ms + ran_ms, gpu_mib=held_mib)
        else:
            cells.append(Cell(start_ms, ran_ms, spec.devices, held_mib, max(1, min(_WHOLE, use_milli) // 10)))
        waited_ms += turn.begun_ms - turn.asked_ms
    last_ms = cells[-1].start_ms + cells[-1].duration_ms
    close_ms = (lease.ended_ms if lease.ended_ms is not None else lease.turns[-1].ended_ms) - base_ms - waited_ms
    return Session(
        session_id=spec.lease_id,
        user=spec.owner,
        open_ms=lease.created_ms - base_ms,
        close_ms=max(close_ms, last_ms),
        gpus=spec.devices,
        gpu_mib=spec.reserve_mib,
        cells=tuple(cells),
        priority=spec.priority,
        asked_mib=spec.reserve_mib,
        group=spec.group,
        pool=spec.pool if pools else "",
    )


def recorded_waits(history: Sequence[PastLease]) -> Spread:
    """Return how long cells waited, as recorded, resumes included."""
    return Spread.of(turn.begun_ms - turn.asked_ms for one in history for turn in one.turns if not turn.continues)


def compared(recorded: Spread, simulated: Spread) -> dict[str, object]:
    """Return the recorded waits beside those of the run, s, and the percent of cells that waited in each.

    `mean_error_s`: the mean distance of the two distributions, quantile by quantile (the Wasserstein distance).
    """
    steps = range(1, 100)
    apart = [abs(recorded.percentile_ms(one) - simulated.percentile_ms(one)) for one in steps]
    return {
        "wait_s": recorded.summary(),
        "waited_percent": recorded.nonzero_percent(),
        "mean_error_s": round(sum(apart) / len(apart) / 1000, 3),
    }


def compared_text(recorded: Spread, simulated: Spread) -> list[str]:
    """Return the same as lines."""
    rows = [("recorded", recorded), ("simulated", simulated)]
    lines = [
        f"waits {name}: median {one.percentile_ms(50) / 1000:g} s, p95 {one.percentile_ms(95) / 1000:g} s, "
        f"p99 {one.percentile_ms(99) / 1000:g} s; {one.nonzero_percent():g} % of the cells waited"
        for name, one in rows
    ]
    off = compared(recorded, simulated)["mean_error_s"]
    return [*lines, f"apart by {off:g} s in the mean over the percentiles"]
