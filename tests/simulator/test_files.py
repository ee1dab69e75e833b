"""Traces and event logs as files."""

import gzip
import json
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import pytest

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator import SimulationError, TraceError
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.record import recording, replay
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session, read_sessions, write_sessions
from tests.simulator.loads import BUSY

CELLS = "session,user,start_s,duration_s,gpus,gpu_mib,gpu_util\n"
SESSIONS = "session,user,open_s,close_s,gpus,gpu_mib\n"


@pytest.fixture(scope="module")
def trace() -> list[Session]:
    return synthetic_sessions(4, 1, 2, BUSY)


def host() -> Host:
    device = DeviceSpec(device_id="d0", name="d", memory_mib=81_920)
    return Host(devices=(device,), pools=(PoolSpec(name="default", devices=("d0",), idle_after_ms=300_000),))


def read(tmp_path: Path, sessions: str, cells: str) -> list[Session]:
    (tmp_path / "sessions.csv").write_text(SESSIONS + sessions)
    (tmp_path / "cells.csv").write_text(CELLS + cells)
    return read_sessions(tmp_path / "sessions.csv", tmp_path / "cells.csv")


def test_a_trace_survives_its_files(tmp_path: Path, trace: list[Session]) -> None:
    write_sessions(trace, tmp_path / "sessions.csv", tmp_path / "cells.csv")
    assert read_sessions(tmp_path / "sessions.csv", tmp_path / "cells.csv") == trace


@pytest.mark.parametrize(
    ("sessions", "cells", "message"),
    [
        ("s,u,0,10,1,100\n", "s,u,1,-2,1,100,5\n", r"cells\.csv, line 2: duration_s is '-2'; expected a number from 0"),
        ("s,u,0,10,1,100\n", "s,u,1,nan,1,100,5\n", r"duration_s is 'nan'"),
        ("s,u,0,10,1,100\n", "s,u,1,2,1,100\n", r"line 2: expected 7 values, as in the header"),
        ("s,u,0,10,1,100\n", "s,u,1,2,1.5,100,5\n", r"gpus is '1.5'; expected a whole number from 0 to 64"),
        ("s,u,0,10,1,100\n", "s,u,1,2,1,100,101\n", r"gpu_util is '101'"),
        ("s,u,0,10,1,100\n", "t,u,1,2,1,100,5\n", r"lists cells of session 't', which is not in .*sessions\.csv"),
        ("s,u,10,5,1,100\n", "", r"sessions\.csv, line 2: session 's' closes before it opens"),
        ("s,u,5,10,1,100\n", "s,u,1,2,1,100,5\n", r"session 's' runs a cell before it opens"),
        ("s,u,0,10,1,100\ns,u,0,10,1,100\n", "", r"line 3: session is 's'; ids must be unique and not empty"),
        ("", "", r"sessions\.csv lists no sessions"),
    ],
)
def test_a_bad_trace_says_where_and_what_is_allowed(tmp_path: Path, sessions: str, cells: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path, sessions, cells)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.csv cannot be read: No such file"):
        read_sessions(tmp_path / "absent.csv", tmp_path / "absent.csv")
    (tmp_path / "cells.csv").write_text("name\nx\n")
    with pytest.raises(TraceError, match=r"the header has no column 'session'; expected session,user,start_s"):
        read_sessions(tmp_path / "cells.csv", tmp_path / "cells.csv")
    (tmp_path / "cells.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="is not UTF-8 text"):
        read_sessions(tmp_path / "cells.csv", tmp_path / "cells.csv")


def record(path: Path, trace: list[Session]) -> None:
    with recording(path, host(), trace) as log:
        simulate(host(), trace, record=log)


def test_a_recorded_run_replays_to_the_same_effects(tmp_path: Path, trace: list[Session]) -> None:
    record(tmp_path / "run.log", trace)
    events, effects = replay(tmp_path / "run.log")
    assert events == (tmp_path / "run.log").read_text().count('\n{"event":')
    assert effects > events
    record(tmp_path / "again.log", trace)
    assert (tmp_path / "again.log").read_bytes() == (tmp_path / "run.log").read_bytes()


def test_a_compressed_record_replays_and_holds_the_same_lines(tmp_path: Path, trace: list[Session]) -> None:
    for name in ("run.log", "run.log.gz", "again.log.gz"):
        record(tmp_path / name, trace)
    assert replay(tmp_path / "run.log.gz") == replay(tmp_path / "run.log")
    packed = (tmp_path / "run.log.gz").read_bytes()
    assert packed == (tmp_path / "again.log.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "run.log").read_bytes()
    (tmp_path / "half.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="is not a complete gzip file"):
        replay(tmp_path / "half.gz")


def test_each_host_is_replayed_by_its_own_arbiter(tmp_path: Path, trace: list[Session]) -> None:
    hosts = (host(), host())
    with recording(tmp_path / "run.log", hosts, trace) as log:
        simulate(hosts, trace, record=log)
    lines = (tmp_path / "run.log").read_text().splitlines()
    seen = Counter(entry["host"] for entry in map(json.loads, lines) if "event" in entry)
    assert set(seen) == {0, 1}
    assert replay(tmp_path / "run.log")[0] == seen.total()
    (tmp_path / "odd.log").write_text("\n".join(lines).replace('"host":1', '"host":7') + "\n")
    with pytest.raises(TraceError, match=r"line \d+: there is no host 7; the log has 2 hosts"):
        replay(tmp_path / "odd.log")


def test_a_record_has_the_machine_the_sessions_and_the_effects(tmp_path: Path, trace: list[Session]) -> None:
    record(tmp_path / "run.log", trace)
    head, *lines = map(json.loads, (tmp_path / "run.log").read_text().splitlines())
    (machine,) = head["hosts"]
    assert (head["version"], machine["devices"][0]["memory_mib"], machine["swap"]["fixed_ms"]) == (1, 81_920, 300)
    assert (head["door"], machine["pools"][0]["name"]) == ("fit", "default")
    assert {line["host"] for line in lines if "cells" not in line} == {0}
    cells = [line["cells"] for line in lines if "cells" in line]
    assert cells == [[[*astuple(cell)] for cell in session.cells] for session in trace]
    events = Counter(line["event"] for line in lines if "event" in line)
    effects = Counter(name for line in lines if "event" in line for name, _fields in line["effects"])
    assert events["SuspendFinished"] == effects["Suspend"] > 0
    assert events["ResumeFinished"] == effects["Resume"] > 0


def test_a_replay_names_the_first_event_that_is_answered_differently(tmp_path: Path, trace: list[Session]) -> None:
    record(tmp_path / "run.log", trace)
    lines = (tmp_path / "run.log").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"Wanted"' in line)
    del lines[at]
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")
    with pytest.raises(
        SimulationError, match=r"line \d+: the arbiter now answers \w+ with different effects than recorded"
    ):
        replay(tmp_path / "run.log")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: this line is damaged, or not from an event log: JSON is malformed"),
        ("[]", "line 2: this line is damaged, or not from an event log: Expected `object`"),
        ('{"event": "Party", "fields": {}, "digest": ""}', "this release has no event 'Party'"),
        (
            '{"event": "Tick", "fields": {"at": 1}, "digest": ""}',
            "line 2, Tick: .*Object missing required field `at_ms`",
        ),
        ('{"event": "Tick", "digest": ""}', "line 2, Tick: this line is damaged, or not from an event log"),
    ],
)
def test_a_damaged_log_says_where(tmp_path: Path, line: str, message: str) -> None:
    with recording(tmp_path / "run.log", host(), []):
        pass
    with (tmp_path / "run.log").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(TraceError, match=message):
        replay(tmp_path / "run.log")
