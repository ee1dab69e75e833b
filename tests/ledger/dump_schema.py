"""Write a ledger as the present schema has it, as SQL: `python -m tests.ledger.dump_schema > tests/ledger/schemas/N.sql`.

Once for each schema, when it is new: from then on the file is what later versions must be able to open.
"""

import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.ledger import LeaseRecord, Ledger, OperationRecord, schema


def fill(path: Path) -> None:
    """Leases that live (one suspended) and one that ended, an operation under way, a story."""
    with Ledger.open(path) as ledger:
        for number, state in enumerate((LeaseState.RESIDENT, LeaseState.SUSPENDED, LeaseState.NO_CONTEXT), start=1):
            spec = LeaseSpec(
                lease_id=f"lease-{number}",
                pool="default",
                owner="ada",
                fraction_milli=250 * number,
                reserve_mib=20_480 * number,
                label="Notizbuch é",
            )
            suspended = state is LeaseState.SUSPENDED
            record = LeaseRecord(
                spec=spec,
                state=state,
                generation=6 + number,
                device_id=None if suspended else "GPU-1",
                saved_mib=1234 if suspended else 0,
                uid=1000,
                kernel_id=f"k-{number}",
                token_sha256="ab" * 32,
                boot_id="boot-1",
                pid=None if suspended else 4320 + number,
                start_time=None if suspended else 99_999_999_999,
                connection='{"key": "secret"}',
                language="python",
                ipykernel=True,
                created_ms=1_750_000_000_000 + number,
                suspends=3,
                resumes=2,
                home_device_id="GPU-2",
            )
            ledger.save_lease(record)
        ledger.end_lease("lease-3", 1_750_000_100_000, "released")
        operation = OperationRecord(
            operation_id=1,
            lease_id="lease-1",
            generation=7,
            kind="suspend",
            device_id="GPU-1",
            phase="checkpoint",
            begun_ms=1_750_000_000_500,
            pids="[4321]",
            saved_mib=0,
        )
        ledger.begin(operation)
        ledger.record("lease-1", 1_750_000_000_400, "granted", "the kernel got 1/4 of GPU-1")


def main() -> None:
    """Write the dump to standard output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        fill(path)
        lines = [f"-- A ledger as schema {schema.newest_version()} was written."]
        with closing(sqlite3.connect(path)) as reader:
            lines += (
                f"PRAGMA {name} = {reader.execute(f'PRAGMA {name}').fetchone()[0]};"
                for name in ("application_id", "auto_vacuum", "user_version")
            )
            lines += reader.iterdump()
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
