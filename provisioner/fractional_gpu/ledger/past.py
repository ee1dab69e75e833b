"""Reads leases and their turns on the GPU from a ledger, over a read-only connection. This works whether or not a broker is running."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fractional_gpu.core.metering.turns import Turn
from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.ledger.opening import ledger_error
from fractional_gpu.ledger.records import LeaseRecord
from fractional_gpu.ledger.schema import APPLICATION_ID


@dataclass(slots=True)
class PastLease:
    """A lease with its turns on the GPU, oldest first. Times are in milliseconds since 1970. `ended_ms` is None for a live lease."""

    spec: LeaseSpec
    created_ms: int
    ended_ms: int | None
    turns: list[Turn] = field(default_factory=list)


def read_past(path: Path) -> list[PastLease]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as reader:
            (application,) = reader.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION_ID:
                remedy = "name the file ledger.sqlite in a broker's folder"
                raise ledger_error(path, "is a database that belongs to another program", remedy)
            leases = {
                str(lease_id): PastLease(msgspec.json.decode(document, type=LeaseRecord).spec, created_ms, ended_ms)
                for lease_id, document, created_ms, ended_ms in reader.execute(
                    "SELECT lease_id, document, created_ms, ended_ms FROM leases ORDER BY created_ms, lease_id"
                )
            }
            for row in reader.execute(
                "SELECT lease_id, asked_ms, begun_ms, ended_ms, used_mib, use_milli, continues FROM turns ORDER BY asked_ms"
            ):
                if row[0] in leases:
                    leases[row[0]].turns.append(Turn(*row))
    except sqlite3.Error as error:
        raise ledger_error(path, f"cannot be read: {error}", "check the path and its permissions") from error
    except msgspec.DecodeError as error:
        raise ledger_error(path, f"has an unreadable lease: {error}") from error
    return list(leases.values())
