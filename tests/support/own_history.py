"""The ledger that a broker would have written of a simulated run, from the run's record (`jupyter gpu simulate --set record=FILE`)."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec

from fractional_gpu.broker.accounting.metering import Turns
from fractional_gpu.broker.clock import Clocks
from fractional_gpu.core import events
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import LeaseRequested
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord
from tests.support.records import a_record

WALL_MS = 1_790_000_000_000


class Writer:
    """Writes at once."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def submit(self, act: Callable[[], None], *, again: bool) -> None:
        assert again
        act()


def lease(spec: LeaseSpec, at_ms: int) -> LeaseRecord:
    return a_record(
        spec=spec, state=LeaseState.UNATTACHED, generation=1, device_id=None, saved_mib=0, uid=1000, kernel_id="",
        token_sha256="", boot_id="", pid=None, start_time=None, connection="", language="python", ipykernel=True,
        created_ms=at_ms, suspends=0, resumes=0, had_process=True,
    )  # fmt: skip


def ledger_of(run: Path, path: Path) -> Path:
    """Write the ledger that a broker would have written of a recorded run."""
    now = [0]
    arbiter = Arbiter()
    with closing(Ledger.open(path)) as ledger:
        turns = Turns(arbiter, cast("Any", Writer(ledger)), Clocks(now=lambda: now[0], wall=lambda: WALL_MS + now[0]))
        known = set()
        for line in run.read_text().splitlines()[1:]:
            entry = json.loads(line)
            if "event" not in entry:
                continue
            event: events.Event = msgspec.convert(entry["fields"], getattr(events, entry["event"]))
            now[0] = event.at_ms
            turns.saw(event, arbiter.handle(event))
            if isinstance(event, LeaseRequested):
                ledger.save_lease(lease(event.spec, WALL_MS + event.at_ms))
                known.add(event.spec.lease_id)
            for lease_id in [one for one in known if arbiter.lease(one) is None]:
                ledger.end_lease(lease_id, WALL_MS + event.at_ms, "ended")
                known.discard(lease_id)
        turns.write()
    return path
