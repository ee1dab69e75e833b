"""The tables of the ledger.

SQLite's header fields identify the program (`application_id`) and the version of the tables (`user_version`).

Version 0.1.0 writes schema 1 and cannot open any other schema. A later version that changes the tables must increment `SCHEMA` and migrate
older ledgers in `opening.connect`, after the checks, in one transaction that also writes the new `user_version`.
"""

import sqlite3
from typing import Final

from fractional_gpu.core.metering.usage import FIGURES

APPLICATION_ID: Final = 0x6A667067  # "jfpg"
SCHEMA: Final = 1

# The tables are not STRICT, because the SQLite of some supported distributions is too old for that.
TABLES: Final = {
    # `document` is a LeaseRecord in JSON, without its secrets once the lease has ended.
    "leases": """
        lease_id   TEXT PRIMARY KEY NOT NULL,
        uid        INTEGER NOT NULL,
        created_ms INTEGER NOT NULL,
        document   TEXT NOT NULL,
        ended_ms   INTEGER,
        end_reason TEXT
    """,
    # No foreign key, because a line may be about a refused lease, which is never saved.
    "story": """
        line_id  INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
        lease_id TEXT NOT NULL,
        at_ms    INTEGER NOT NULL,
        reason   TEXT NOT NULL,
        sentence TEXT NOT NULL
    """,
    # `document` is a SeatRecord.
    "seats": """
        seat_id    TEXT PRIMARY KEY NOT NULL,
        pool       TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        document   TEXT NOT NULL,
        ended_ms   INTEGER,
        end_reason TEXT
    """,
    # how much each user used each pool on each day
    "usage": """
        owner       TEXT NOT NULL,
        pool        TEXT NOT NULL,
        day         INTEGER NOT NULL,
        live_ms     INTEGER NOT NULL,
        busy_ms     INTEGER NOT NULL,
        busy_mib_ms INTEGER NOT NULL,
        PRIMARY KEY (owner, pool, day)
    """,
    "points": """
        point_id  INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
        lease_id  TEXT NOT NULL,
        at_ms     INTEGER NOT NULL,
        state     TEXT NOT NULL,
        used_mib  INTEGER NOT NULL,
        saved_mib INTEGER NOT NULL
    """,
    # `deadline_ms` is when the device goes away, or 0 if it stays.
    "drained": """
        device_id   TEXT PRIMARY KEY NOT NULL,
        evict_busy  INTEGER NOT NULL,
        deadline_ms INTEGER NOT NULL
    """,
    "kept": """
        name  TEXT PRIMARY KEY NOT NULL,
        value TEXT NOT NULL
    """,
    # what leases used, by hour
    "metered": f"""
        hour_s     INTEGER NOT NULL,
        lease_id   TEXT NOT NULL,
        device_id  TEXT NOT NULL,
        currency   TEXT NOT NULL,
        pool       TEXT NOT NULL,
        owner      TEXT NOT NULL,
        group_name TEXT NOT NULL,
        label      TEXT NOT NULL,
        seated     INTEGER NOT NULL,
        {", ".join(f"{name} INTEGER NOT NULL" for name in FIGURES)},
        PRIMARY KEY (hour_s, lease_id, device_id, currency)
    """,
    # notebooks' and seats' use of their shares, by day, for advice. `key` is a HabitKey and a Share, and `document` a ShareDay
    "share_days": """
        day      INTEGER NOT NULL,
        key      TEXT NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (day, key)
    """,
    # when cells asked for their device, when they ran on it, and when they ended; read by `jupyter gpu simulate --from-ledger`
    "turns": """
        lease_id  TEXT NOT NULL,
        asked_ms  INTEGER NOT NULL,
        begun_ms  INTEGER NOT NULL,
        ended_ms  INTEGER NOT NULL,
        used_mib  INTEGER NOT NULL,
        use_milli INTEGER NOT NULL,
        continues INTEGER NOT NULL
    """,
    # the last advice that each notebook and seat got. `key` is a HabitKey, and `document` the advice
    "advised": """
        key      TEXT PRIMARY KEY NOT NULL,
        day      INTEGER NOT NULL,
        document TEXT NOT NULL
    """,
    # how many leases ended without ever having a process, by user and hour since 1970
    "unstarted": """
        hour   INTEGER NOT NULL,
        uid    INTEGER NOT NULL,
        leases INTEGER NOT NULL,
        PRIMARY KEY (hour, uid)
    """,
}
"""The columns of each table."""

_INDEXES: Final = (
    "CREATE INDEX leases_by_end ON leases (ended_ms)",
    "CREATE INDEX story_by_lease ON story (lease_id, line_id)",
    "CREATE INDEX story_by_time ON story (at_ms)",
    "CREATE INDEX seats_by_end ON seats (ended_ms)",
    "CREATE INDEX points_by_lease ON points (lease_id, point_id)",
    "CREATE INDEX points_by_time ON points (at_ms)",
    "CREATE INDEX metered_by_lease ON metered (lease_id)",
    "CREATE INDEX turns_by_time ON turns (ended_ms)",
)


def create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    for name, columns in TABLES.items():
        connection.execute(f"CREATE TABLE {name} ({columns})")
    for statement in _INDEXES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute("COMMIT")
