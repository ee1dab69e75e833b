"""The ledger's tables and their migrations.

`MIGRATIONS[n]` turns schema n-1 into schema n; a new file runs all of them, an old file the ones it lacks. To change
the tables, add a function, never edit one that has been released. Each runs inside the transaction that raises the
version. A column that earlier programs may ignore belongs into `OPTIONAL_COLUMNS` and needs no new version.

SQLite's header fields name the program (`application_id`) and the version of the tables (`user_version`).
"""

import sqlite3
from collections.abc import Callable

from fractional_gpu.core.metering.usage import FIGURES

APPLICATION_ID = 0x6A667067  # "jfpg"

TABLES = frozenset({"leases", "operations", "story", "counters", "seats", "usage", "points", "drained", "kept"})


def _version_1(connection: sqlite3.Connection) -> None:
    """Leases, operations, stories. No STRICT tables: the SQLite of some living distributions is too old for them."""
    for statement in (
        """
        CREATE TABLE leases (
            lease_id     TEXT PRIMARY KEY NOT NULL,
            spec         TEXT NOT NULL,
            state        TEXT NOT NULL,
            generation   INTEGER NOT NULL,
            device_id    TEXT,
            saved_mib    INTEGER NOT NULL,
            uid          INTEGER NOT NULL,
            kernel_id    TEXT NOT NULL,
            token_sha256 TEXT NOT NULL,
            boot_id      TEXT NOT NULL,
            pid          INTEGER,
            start_time   INTEGER,
            connection   TEXT NOT NULL,
            language     TEXT NOT NULL,
            ipykernel    INTEGER NOT NULL,
            created_ms   INTEGER NOT NULL,
            suspends     INTEGER NOT NULL,
            resumes      INTEGER NOT NULL,
            home_device_id TEXT,
            ended_ms     INTEGER,
            end_reason   TEXT
        )
        """,
        "CREATE INDEX leases_by_end ON leases (ended_ms)",
        """
        CREATE TABLE operations (
            operation_id INTEGER PRIMARY KEY NOT NULL,
            lease_id     TEXT NOT NULL REFERENCES leases (lease_id) ON DELETE CASCADE,
            generation   INTEGER NOT NULL,
            kind         TEXT NOT NULL CHECK (kind IN ('suspend', 'resume')),
            device_id    TEXT NOT NULL,
            phase        TEXT NOT NULL,
            begun_ms     INTEGER NOT NULL,
            phase_ms     INTEGER NOT NULL,
            pids         TEXT NOT NULL,
            saved_mib    INTEGER NOT NULL,
            finished_ms  INTEGER,
            outcome      TEXT
        )
        """,
        # One lease, one operation at a time: the file itself refuses a second one.
        "CREATE UNIQUE INDEX operations_open ON operations (lease_id) WHERE finished_ms IS NULL",
        "CREATE INDEX operations_by_lease ON operations (lease_id)",
        # Lines may be about leases that were refused and so never saved: no foreign key.
        """
        CREATE TABLE story (
            line_id  INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
            lease_id TEXT NOT NULL,
            at_ms    INTEGER NOT NULL,
            reason   TEXT NOT NULL,
            sentence TEXT NOT NULL
        )
        """,
        "CREATE INDEX story_by_lease ON story (lease_id, line_id)",
        "CREATE INDEX story_by_time ON story (at_ms)",
        # Operation ids stay used after their rows are pruned.
        "CREATE TABLE counters (name TEXT PRIMARY KEY NOT NULL, value INTEGER NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('operation', 0)",
    ):
        connection.execute(statement)


def _version_2(connection: sqlite3.Connection) -> None:
    """Seats, and how much each user used each pool on each day. (A lease's seat is part of its spec.)"""
    columns = {str(row[1]) for row in connection.execute("PRAGMA table_info(leases)")}
    if "home_device_id" not in columns:  # the first files of schema 1 lack it
        connection.execute("ALTER TABLE leases ADD COLUMN home_device_id TEXT")
    for statement in (
        """
        CREATE TABLE seats (
            seat_id        TEXT PRIMARY KEY NOT NULL,
            owner          TEXT NOT NULL,
            server         TEXT NOT NULL,
            group_name     TEXT NOT NULL,
            pool           TEXT NOT NULL,
            fraction_milli INTEGER NOT NULL,
            memory_mib     INTEGER NOT NULL,
            devices        INTEGER NOT NULL,
            priority       INTEGER NOT NULL,
            weight         INTEGER NOT NULL,
            max_kernels    INTEGER NOT NULL,
            uid            INTEGER,
            device_id      TEXT,
            token_sha256   TEXT NOT NULL,
            created_ms     INTEGER NOT NULL,
            expires_ms     INTEGER,
            ended_ms       INTEGER,
            end_reason     TEXT
        )
        """,
        "CREATE INDEX seats_by_end ON seats (ended_ms)",
        """
        CREATE TABLE usage (
            owner       TEXT NOT NULL,
            pool        TEXT NOT NULL,
            day         INTEGER NOT NULL,
            live_ms     INTEGER NOT NULL,
            busy_ms     INTEGER NOT NULL,
            busy_mib_ms INTEGER NOT NULL,
            peak_mib    INTEGER NOT NULL,
            PRIMARY KEY (owner, pool, day)
        )
        """,
    ):
        connection.execute(statement)


def _version_3(connection: sqlite3.Connection) -> None:
    """Pins, leases of several devices, leases over time, devices that are being emptied, and what was learnt."""
    for statement in (
        "ALTER TABLE leases ADD COLUMN device_ids TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE leases ADD COLUMN home_device_ids TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE leases ADD COLUMN pinned_until_ms INTEGER NOT NULL DEFAULT 0",
        """
        CREATE TABLE points (
            point_id  INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
            lease_id  TEXT NOT NULL,
            at_ms     INTEGER NOT NULL,
            state     TEXT NOT NULL,
            used_mib  INTEGER NOT NULL,
            saved_mib INTEGER NOT NULL
        )
        """,
        "CREATE INDEX points_by_lease ON points (lease_id, point_id)",
        "CREATE INDEX points_by_time ON points (at_ms)",
        "CREATE TABLE drained (device_id TEXT PRIMARY KEY NOT NULL, evict_busy INTEGER NOT NULL)",
        "CREATE TABLE kept (name TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)",
    ):
        connection.execute(statement)


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {
    1: _version_1,
    2: _version_2,
    3: _version_3,
}

OPTIONAL_COLUMNS: dict[str, dict[str, str]] = {
    # leases that outlive their kernels, because processes that those left behind have device memory
    "leases": {
        "members": "TEXT NOT NULL DEFAULT '[]'",
        "released": "INTEGER NOT NULL DEFAULT 0",
        # leases that end with the process that starts their kernels, and the files of their tokens with them
        "server": "TEXT NOT NULL DEFAULT ''",
        "token_file": "TEXT NOT NULL DEFAULT ''",
        # leases that a seat took over from an earlier server
        "taken_over": "INTEGER NOT NULL DEFAULT 0",
        # leases that are larger for one cell
        "own_size": "TEXT NOT NULL DEFAULT '[]'",
        # leases that never had a process leave no history; 1: it had one, or that is not known
        "had_process": "INTEGER NOT NULL DEFAULT 1",
    },
    # several hubs at one broker
    "seats": {
        "hub": "TEXT NOT NULL DEFAULT ''",
        # seats of jobs and pods
        "admitted": "INTEGER NOT NULL DEFAULT 0",
        "allowed_devices": "TEXT NOT NULL DEFAULT '[]'",
        "engine": "TEXT NOT NULL DEFAULT ''",
        "workload_id": "TEXT NOT NULL DEFAULT ''",
        "control_group": "TEXT NOT NULL DEFAULT ''",
        "group_seen": "INTEGER NOT NULL DEFAULT 0",
        "boot_id": "TEXT NOT NULL DEFAULT ''",
    },
    # devices that go away; 0: those that stay
    "drained": {"deadline_ms": "INTEGER NOT NULL DEFAULT 0"},
}
"""Columns by table that were added without a new version. An earlier program of the same version ignores them and can open the file, so
that a downgrade keeps every kernel; rows that it writes have the defaults."""


OPTIONAL_TABLES: tuple[str, ...] = (
    # what leases used, by hour; earlier programs do not meter
    f"""
    CREATE TABLE IF NOT EXISTS metered (
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
    )
    """,
    "CREATE INDEX IF NOT EXISTS metered_by_lease ON metered (lease_id)",
    # what notebooks and seats used of their shares, by day, for advice; `memory`, `use`: milliseconds by bin, JSON
    """
    CREATE TABLE IF NOT EXISTS share_days (
        day       INTEGER NOT NULL,
        pool      TEXT NOT NULL,
        owner     TEXT NOT NULL,
        seated    INTEGER NOT NULL,
        kind      TEXT NOT NULL,
        label     TEXT NOT NULL,
        milli     INTEGER NOT NULL,
        share_mib INTEGER NOT NULL,
        peak_mib  INTEGER NOT NULL,
        held_ms   INTEGER NOT NULL,
        busy_ms   INTEGER NOT NULL,
        gaps      INTEGER NOT NULL,
        memory    TEXT NOT NULL,
        use       TEXT NOT NULL,
        PRIMARY KEY (day, pool, owner, seated, kind, label, milli, share_mib)
    )
    """,
    # when cells asked for their device, ran there, and ended; used again by `jupyter gpu simulate --from-ledger`
    """
    CREATE TABLE IF NOT EXISTS turns (
        lease_id  TEXT NOT NULL,
        asked_ms  INTEGER NOT NULL,
        begun_ms  INTEGER NOT NULL,
        ended_ms  INTEGER NOT NULL,
        used_mib  INTEGER NOT NULL,
        use_milli INTEGER NOT NULL,
        continues INTEGER NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS turns_by_time ON turns (ended_ms)",
    # advice that was given, the last one for each of them
    """
    CREATE TABLE IF NOT EXISTS advised (
        pool         TEXT NOT NULL,
        owner        TEXT NOT NULL,
        seated       INTEGER NOT NULL,
        kind         TEXT NOT NULL,
        label        TEXT NOT NULL,
        day          INTEGER NOT NULL,
        before_milli INTEGER NOT NULL,
        milli        INTEGER NOT NULL,
        PRIMARY KEY (pool, owner, seated, kind, label)
    )
    """,
    # how many leases ended that never had a process, by user and hour since 1970
    """
    CREATE TABLE IF NOT EXISTS unstarted (
        hour   INTEGER NOT NULL,
        uid    INTEGER NOT NULL,
        leases INTEGER NOT NULL,
        PRIMARY KEY (hour, uid)
    )
    """,
)
"""Tables that were added without a new version, for the same reason."""


def newest_version() -> int:
    """Return the schema version that this program writes."""
    return max(MIGRATIONS)


def read_version(connection: sqlite3.Connection) -> int:
    """Return the schema version of an open file. Raises sqlite3.Error."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate the tables to the newest version in one transaction: an error or a crash leaves them unchanged. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for version in range(read_version(connection) + 1, newest_version() + 1):
            MIGRATIONS[version](connection)
            connection.execute(f"PRAGMA user_version = {version}")
        for statement in OPTIONAL_TABLES:
            connection.execute(statement)
        for table, columns in OPTIONAL_COLUMNS.items():
            there = {str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")}
            for name, kind in columns.items():
                if there and name not in there:
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
