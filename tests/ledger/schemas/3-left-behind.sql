-- A ledger as schema 3 was written once leases could outlive their kernels.
PRAGMA application_id = 1785098343;
PRAGMA auto_vacuum = 2;
PRAGMA user_version = 3;
BEGIN TRANSACTION;
CREATE TABLE counters (name TEXT PRIMARY KEY NOT NULL, value INTEGER NOT NULL);
INSERT INTO "counters" VALUES('operation',1);
CREATE TABLE drained (device_id TEXT PRIMARY KEY NOT NULL, evict_busy INTEGER NOT NULL);
CREATE TABLE kept (name TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL);
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
        , device_ids TEXT NOT NULL DEFAULT '[]', home_device_ids TEXT NOT NULL DEFAULT '[]', pinned_until_ms INTEGER NOT NULL DEFAULT 0, members TEXT NOT NULL DEFAULT '[]', released INTEGER NOT NULL DEFAULT 0);
INSERT INTO "leases" VALUES('lease-1','{"lease_id":"lease-1","pool":"default","owner":"ada","fraction_milli":250,"reserve_mib":20480,"priority":0,"gated":true,"label":"Notizbuch é","request_mib":null,"devices":1,"group":"","owner_weight":100,"weight":100,"seat":""}','resident',7,'GPU-1',0,1000,'k-1','abababababababababababababababababababababababababababababababab','boot-1',4321,99999999999,'{"key": "secret"}','python',1,1750000000001,3,2,'GPU-2',NULL,NULL,'[]','[]',0,'[]',0);
INSERT INTO "leases" VALUES('lease-2','{"lease_id":"lease-2","pool":"default","owner":"ada","fraction_milli":500,"reserve_mib":40960,"priority":0,"gated":true,"label":"Notizbuch é","request_mib":null,"devices":1,"group":"","owner_weight":100,"weight":100,"seat":""}','suspended',8,NULL,1234,1000,'k-2','abababababababababababababababababababababababababababababababab','boot-1',NULL,NULL,'{"key": "secret"}','python',1,1750000000002,3,2,'GPU-2',NULL,NULL,'[]','[]',0,'[]',0);
INSERT INTO "leases" VALUES('lease-3','{"lease_id":"lease-3","pool":"default","owner":"ada","fraction_milli":750,"reserve_mib":61440,"priority":0,"gated":true,"label":"Notizbuch é","request_mib":null,"devices":1,"group":"","owner_weight":100,"weight":100,"seat":""}','ended',9,'GPU-1',0,1000,'k-3','','boot-1',4323,99999999999,'','python',1,1750000000003,3,2,'GPU-2',1750000100000,'released','[]','[]',0,'[]',0);
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
        );
INSERT INTO "operations" VALUES(1,'lease-1',7,'suspend','GPU-1','checkpoint',1750000000500,1750000000500,'[4321]',0,NULL,NULL);
CREATE TABLE points (
            point_id  INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
            lease_id  TEXT NOT NULL,
            at_ms     INTEGER NOT NULL,
            state     TEXT NOT NULL,
            used_mib  INTEGER NOT NULL,
            saved_mib INTEGER NOT NULL
        );
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
        );
CREATE TABLE story (
            line_id  INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
            lease_id TEXT NOT NULL,
            at_ms    INTEGER NOT NULL,
            reason   TEXT NOT NULL,
            sentence TEXT NOT NULL
        );
INSERT INTO "story" VALUES(1,'lease-1',1750000000400,'granted','the kernel got 1/4 of GPU-1');
CREATE TABLE usage (
            owner       TEXT NOT NULL,
            pool        TEXT NOT NULL,
            day         INTEGER NOT NULL,
            live_ms     INTEGER NOT NULL,
            busy_ms     INTEGER NOT NULL,
            busy_mib_ms INTEGER NOT NULL,
            peak_mib    INTEGER NOT NULL,
            PRIMARY KEY (owner, pool, day)
        );
CREATE INDEX leases_by_end ON leases (ended_ms);
CREATE UNIQUE INDEX operations_open ON operations (lease_id) WHERE finished_ms IS NULL;
CREATE INDEX operations_by_lease ON operations (lease_id);
CREATE INDEX story_by_lease ON story (lease_id, line_id);
CREATE INDEX story_by_time ON story (at_ms);
CREATE INDEX seats_by_end ON seats (ended_ms);
CREATE INDEX points_by_lease ON points (lease_id, point_id);
CREATE INDEX points_by_time ON points (at_ms);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('story',1);
COMMIT;
