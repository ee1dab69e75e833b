"""The auditor agrees with right figures, and finds wrong ones and records that cannot be."""

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.core.model import DeviceSpec, PoolSpec, ReserveBy
from fractional_gpu.simulator import machine
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.hosts import Machine
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import Host, SwapSpeed
from fractional_gpu.simulator.record import recording
from fractional_gpu.simulator.result import Accounts
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session
from tests.simulator.audit.__main__ import main as audit
from tests.simulator.audit.figures import NOT_AUDITED
from tests.simulator.loads import BUSY

Entries = list[dict[str, Any]]
AUDITOR = Path(__file__).with_name("audit")
MIB = 8000


def host(count: int = 1, mib: int = MIB, **policy: object) -> Host:
    devices = tuple(DeviceSpec(device_id=f"d{number}", name="d", memory_mib=mib) for number in range(count))
    pool = PoolSpec(name="default", devices=tuple(one.device_id for one in devices), idle_after_ms=None, may_move=True)
    swap = SwapSpeed(fixed_ms=100, save_mib_per_s=1000, restore_mib_per_s=2000)
    return Host(devices=devices, pools=(replace(pool, **policy),), swap=swap)  # type: ignore[arg-type]


def session(name: str, *cells: Cell, close_ms: int = 1_000_000, gpus: int = 1, priority: int = 0) -> Session:
    return Session(name, name, 0, close_ms, gpus, 0, cells, priority)


def gpu_cell(start_ms: int, duration_ms: int, mib: int = 6000, util: int = 10, gpus: int = 1) -> Cell:
    return Cell(start_ms, duration_ms, gpus, mib, util)


TURNS = [
    session("a", gpu_cell(0, 10_000), gpu_cell(200_000, 1_000)),
    session("b", gpu_cell(100_000, 10_000)),
    session("c", gpu_cell(500_000, 10_000)),
]
"""Each needs most of the device: `a` leaves for `b`, comes back, and leaves for `c`."""


def run(folder: Path, machine: Machine, trace: Sequence[Session]) -> tuple[Path, Path]:
    """Simulate with a record. Returns the record and the figures."""
    record, figures = folder / "run.log", folder / "run.json"
    with recording(record, machine, trace) as log:
        result = simulate(machine, trace, record=log)
    figures.write_text(json.dumps(result.as_json()))
    return record, figures


def complaints(capsys: pytest.CaptureFixture[str], record: Path, figures: Path) -> str:
    """What the auditor says; it must find something."""
    assert audit([str(record), "--json", str(figures)]) == 1
    return capsys.readouterr().out


def agrees(capsys: pytest.CaptureFixture[str], record: Path, figures: Path) -> dict[str, Any]:
    """The figures, in all of which the auditor agrees."""
    code = audit([str(record), "--json", str(figures)])
    said = capsys.readouterr().out
    assert code == 0, said
    shown: dict[str, Any] = json.loads(figures.read_text())
    compared = len(shown) - len(set(shown) & set(NOT_AUDITED))
    assert said.endswith(f" {compared} figures compared: 0 wrong\n")
    return shown


# -- right figures -----------------------------------------------------------------------------------------------------

ON_DEMAND = {"idle_after": "on-demand", "may_move": True}
BRISK = "--set pace=short --set memory_of=cell --set several_gpus=0"
USE = {**ON_DEMAND, "reserve": "use", "headroom": "1GiB"}


@pytest.mark.parametrize(
    ("pool", "arguments", "counts"),
    [
        pytest.param(
            ON_DEMAND, f"--users 9 --devices 1x80GiB --seed 1 {BRISK}", ("preemptions", "waited_percent"), id="fair"
        ),
        pytest.param(
            {**ON_DEMAND, "fractions": "any"},
            f"--users 12 --devices 1x40GiB,1x80GiB --seed 2 {BRISK}",
            ("late_s",),
            id="any",
        ),
        pytest.param(
            {"idle_after": "0s", "preempt": "priorities"},
            f"--users 8 --devices 2x80GiB --seed 3 --set urgent_users=30 --set slowdown=false {BRISK}",
            ("suspends", "moved_gib"),
            id="at-once",
        ),
        pytest.param(
            USE,
            f"--users 12 --devices 1x80GiB --seed 1 --set request=25 --set every_cell_asks=true {BRISK}",
            ("resumes",),
            id="use",
        ),
        pytest.param(
            USE,
            f"--users 10 --devices 1x56GiB --seed 1 --set request=50 --set host_memory=20GiB {BRISK}",
            ("out_of_memory",),
            id="host",
        ),
        pytest.param(ON_DEMAND, "--users 12 --devices 8x80GiB --seed 1", ("late_s", "suspends"), id="as-in-the-trace"),
        pytest.param(
            ON_DEMAND,
            "--users 24 --hosts 2x(8x80GiB) --set joint_starts=50 --set lunch=45m --set time_zones=2 --set urgent_users=10",
            ("suspends",),
            id="together",
        ),
        pytest.param(
            {**ON_DEMAND, "foresight": "displace"},
            f"--users 8 --devices 1x80GiB --set foresight=20s --set false_signs=50 --set failed_swaps=10 {BRISK}",
            ("early_resumes", "vain_gib", "failed_swaps"),
            id="foresight",
        ),
        pytest.param(
            ON_DEMAND,
            f"--users 8 --devices 1x80GiB --set ask_error=50 --set failed_swaps=20 {BRISK}",
            ("failed_swaps", "out_of_memory", "preemptions"),
            id="errors",
        ),
        pytest.param(
            {**ON_DEMAND, "min_residency_swaps": 3},
            f"--users 16 --devices 2x80GiB --seed 2 --set parallel_swaps=2 {BRISK}",
            ("preemptions", "host_peak_mib"),
            id="medium",
        ),
        pytest.param(
            ON_DEMAND,
            "--users 30 --hosts 4x(8x80GiB) --seed 2 --set failed_swaps=10",
            ("suspends", "late_s"),
            id="hosts",
        ),
        pytest.param(
            USE,
            f"--users 20 --hosts 2x(1x80GiB),1x(2x40GiB) --set request=50 --set door=most-free --set ask_error=30 {BRISK}",
            ("suspends", "resumes", "out_of_memory"),
            id="hosts-by-use",
        ),
    ],
)
def test_the_auditor_agrees_with_every_figure_of_a_run(
    pool: dict[str, object],
    arguments: str,
    counts: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    record, figures, policy = tmp_path / "run.log.gz", tmp_path / "run.json", tmp_path / "jupyter_gpu_config.py"
    policy.write_text(f"c.GPUBroker.pools = {{'default': {pool!r}}}\n")
    command = ["simulate", *arguments.split(), "--policy", str(policy), "--json", "--set", f"record={record}"]
    assert main(command) == 0
    figures.write_text(capsys.readouterr().out)
    shown = agrees(capsys, record, figures)
    for name in counts:
        assert shown[name] != 0, f"the run has no {name}: it shows nothing"


@pytest.mark.parametrize(
    ("name", "arguments", "counts"),
    [
        pytest.param("reservation", "--users 10 --devices 8x80GiB", ("door_wait_s",), id="reservation"),
        pytest.param("cull", "--users 20 --hosts 2x(8x80GiB) --days 2", ("lost", "wait_s", "door_wait_s"), id="cull"),
        pytest.param("static-fraction", "--users 30 --hosts 4x(8x80GiB),2x(4x40GiB)", ("door_wait_s",), id="fractions"),
        pytest.param(
            "static-fraction",
            f"--users 12 --devices 2x80GiB --set ask_error=50 {BRISK}",
            ("out_of_memory", "late_s"),
            id="asked-wrong",
        ),
        pytest.param("mps-pack", f"--users 10 --hosts 2x(1x80GiB) --set mps_fill=70 {BRISK}", ("late_s",), id="mps"),
        pytest.param("whole-gpu-suspend", "--users 20 --hosts 3x(8x80GiB)", ("suspends", "wait_s"), id="whole"),
        pytest.param("time-slice", f"--users 16 --hosts 2x(1x56GiB) {BRISK}", ("out_of_memory", "late_s"), id="slices"),
    ],
)
def test_the_auditor_agrees_with_every_figure_of_a_baseline(
    name: str, arguments: str, counts: Sequence[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record, figures = tmp_path / "run.log.gz", tmp_path / "run.json"
    command = ["simulate", *arguments.split(), "--baseline", name, "--json", "--set", f"record={record}"]
    assert main(command) == 0
    figures.write_text(capsys.readouterr().out)
    agrees(capsys, record, figures)
    assert audit([str(tmp_path / f"{name}.run.log.gz"), "--json", str(figures)]) == 0, capsys.readouterr().out
    shown = json.loads(figures.read_text())["baselines"][name]
    assert capsys.readouterr().out.endswith(f" {len(shown) - 2} figures compared: 0 wrong\n")
    for figure in counts:
        value = shown[figure]
        assert (max(value.values()) if isinstance(value, dict) else value) > 0, (
            f"the run has no {figure}: it shows nothing"
        )


@pytest.mark.parametrize("reserve_by", ReserveBy)
def test_the_auditor_agrees_where_leases_have_several_devices(
    reserve_by: ReserveBy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pairs = [
        session(f"pair{number}", *(gpu_cell(at * 90_000 + number, 40_000, 5000, 60, 2) for at in range(8)), gpus=2)
        for number in range(2)
    ]
    singles = [
        session(f"s{number}", *(gpu_cell(at * 50_000 + number, 20_000, 1500 * number, 40) for at in range(1, 15)))
        for number in range(1, 5)
    ]
    machine = replace(host(3, reserve_by=reserve_by, min_residency_ms=1000), request_percent=50, parallel_swaps=2)
    shown = agrees(capsys, *run(tmp_path, machine, [*pairs, *singles]))
    assert shown["suspends"] > 10
    assert shown["peak_devices_held"] == 3


def test_the_auditor_agrees_where_neighbours_slow_each_other_down(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = [
        replace(one, cells=tuple(replace(cell, util_percent=min(97, 5 * cell.util_percent)) for cell in one.cells))
        for one in synthetic_sessions(12, 1, 4, BUSY)
    ]
    shown = agrees(capsys, *run(tmp_path, host(1, 245_760, fractions_milli=()), trace))
    alone = sum(cell.duration_ms for one in trace for cell in one.cells if cell.gpus) / 3_600_000
    assert shown["busy_gpu_hours"] > 1.2 * alone


def test_the_auditor_needs_the_standard_library_only(tmp_path: Path) -> None:
    """It imports nothing but its own modules, and runs where nothing is installed."""
    for file in AUDITOR.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "." for node in imports if isinstance(node, ast.ImportFrom)}
        others = {name for name in names if not name.startswith("tests.simulator.audit.")}
        assert {name.partition(".")[0] for name in others} <= sys.stdlib_module_names
    record, figures = run(tmp_path, host(), TURNS)
    command = [sys.executable, "-E", "-s", "-S", "-m", "tests.simulator.audit", str(record), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=AUDITOR.parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(": 0 wrong\n")


# -- records that were tampered with -------------------------------------------------------------------------------------


def sign(entry: dict[str, Any]) -> None:
    """Give changed effects their digest."""
    text = json.dumps(entry["effects"], sort_keys=True, separators=(",", ":"))
    entry["digest"] = hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def find(entries: Entries, name: str, kind: str) -> int:
    """Where that first happens to the session: an event, an effect or a moment of the world."""
    for at, entry in enumerate(entries):
        effects = [effect for effect, fields in entry.get("effects", ()) if fields.get("lease_id") == name]
        if kind in effects or (entry.get("world"), entry.get("session")) == (kind, name):
            return at
        if entry.get("event") == kind and entry["fields"].get("lease_id") == name:
            return at
    raise AssertionError(f"{name} has no {kind}")


def grant_one_too_many(entries: Entries) -> None:
    entry = entries[find(entries, "b", "Granted")]
    mine = [[kind, dict(fields, lease_id="c")] for kind, fields in entry["effects"] if fields.get("lease_id") == "b"]
    entry["effects"] += [one for one in mine if one[0] in ("StateChanged", "Granted")]
    sign(entry)


def shorten_a_wait(entries: Entries) -> None:
    for entry in entries:
        if entry.get("at_ms", entry.get("fields", {}).get("at_ms")) == 100_000:
            entry.get("fields", entry)["at_ms"] += 50


def begin_before_the_grant(entries: Entries) -> None:
    begins = entries.pop(find(entries, "b", "begins"))
    at = find(entries, "b", "asked")
    entries.insert(at + 1, {**begins, "at_ms": entries[at]["at_ms"]})


def begin_late(entries: Entries) -> None:
    entries[find(entries, "b", "begins")]["at_ms"] += 10


def lose_a_suspend(entries: Entries) -> None:
    entry = entries[find(entries, "a", "Suspend")]
    entry["effects"] = [effect for effect in entry["effects"] if effect[0] != "Suspend"]
    sign(entry)


def lose_a_state(entries: Entries) -> None:
    entry = entries[find(entries, "a", "SuspendFinished")]
    entry["effects"] = [one for one in entry["effects"] if (one[0], one[1].get("lease_id")) != ("StateChanged", "a")]
    sign(entry)


def change_effects(entries: Entries) -> None:
    entries[find(entries, "a", "Suspend")]["effects"].pop()


def use_more(entries: Entries) -> None:
    entries[find(entries, "a", "memory")]["mib"] = 8192


def keep_memory(entries: Entries) -> None:
    del entries[find(entries, "a", "saved") - 1]


def swap_faster(entries: Entries) -> None:
    entries[0]["hosts"][0]["swap"]["save_mib_per_s"] = 2000


def shrink_the_host(entries: Entries) -> None:
    entries[0]["hosts"][0]["host_memory_mib"] = 7000


def forbid_swaps(entries: Entries) -> None:
    entries[0]["hosts"][0]["parallel_swaps"] = 0


def run_longer(entries: Entries) -> None:
    entries[1]["cells"][0][1] += 3


def lose_the_end(entries: Entries) -> None:
    del entries[find(entries, "c", "ends") :]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (grant_one_too_many, "leases have 12000 MiB reserved on d0, which gives them 8000 MiB: b, c\n"),
        (shorten_a_wait, "cell 0 of b is asked for; by its trace that is at 100000 ms\n"),
        (begin_before_the_grant, "cell 0 of b begins on d0, and its lease is unarmed\n"),
        (begin_late, "cell 0 of b begins, and its lease was let in at 106100 ms\n"),
        (lose_a_suspend, "SuspendFinished of a: operation 1 was never begun\n"),
        (lose_a_suspend, "suspends: the run says 3, the record 2\n"),
        (lose_a_state, "leases have 12000 MiB reserved on d0, which gives them 8000 MiB: a, b\n"),
        (change_effects, "the effects of Wanted are not those of the digest\n"),
        (use_more, "8192 MiB are in use on d0, which has 8000 MiB\n"),
        (
            keep_memory,
            "SuspendFinished of a, which has 6000 MiB on devices and 6000 MiB on the host; expected 0 and 6000",
        ),
        (swap_faster, "SuspendFinished of a after 6100 ms; 6000 MiB take 3100 ms\n"),
        (shrink_the_host, "12000 MiB are saved on the host, and its budget is 7000 MiB\n"),
        (forbid_swaps, "1 swaps run at a time, and 0 may\n"),
        (run_longer, "cell 0 of a ends after 10000.000 ms of its 10003 ms, by the model of contention\n"),
        (lose_the_end, "cell 0 of c never ends\n"),
        (lose_the_end, "lost: the run says 0, the record 3\n"),
    ],
)
def test_a_record_that_was_tampered_with_is_found(
    tamper: Callable[[Entries], None], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record, figures = run(tmp_path, host(), TURNS)
    agrees(capsys, record, figures)
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    tamper(entries)
    record.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert message in complaints(capsys, record, figures)


PREEMPTED = [
    session("low", gpu_cell(0, 100_000), close_ms=100_000),
    session("high", gpu_cell(50_000, 10_000), close_ms=60_000, priority=1),
]


def test_a_preemption_that_stops_no_cell_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, figures = run(tmp_path, host(min_residency_swaps_milli=9_000), PREEMPTED)
    shown = agrees(capsys, record, figures)
    assert shown["preemptions"] == 1
    assert shown["late_s"]["max"] > 16  # the urgent cell, both swaps
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if '"preempted"' not in line))
    assert "low is suspended in the middle of cell 0, which is not stopped\n" in complaints(capsys, record, figures)


def test_a_neighbour_of_a_lease_of_several_devices_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pair = session("pair", gpu_cell(0, 100_000, 1, 50, 2), gpus=2)
    small = session("small", gpu_cell(50_000, 1_000, 1))
    record, figures = run(tmp_path, host(3), [pair, small])
    agrees(capsys, record, figures)
    text = record.read_text()
    assert text.count('"device_id":"d2"') > 1
    text = text.replace('"device_id":"d2"', '"device_id":"d1"').replace('"device_ids":["d2"]', '"device_ids":["d1"]')
    head, _, rest = text.partition("\n")
    record.write_text(head.replace('"device_id":"d1"', '"device_id":"d2"', 2).replace('"d2"', '"d1"', 1) + "\n" + rest)
    assert "a lease of several devices does not have d1 alone: pair, small\n" in complaints(capsys, record, figures)


CROWD = [
    session("a", gpu_cell(0, 10_000), close_ms=100_000),
    session("b", gpu_cell(100, 10_000), close_ms=200_000),
    session("c", gpu_cell(200, 10_000, mib=900), close_ms=50_000),
    session("d", gpu_cell(300, 10_000), close_ms=400_000),
]
"""Three large ones for two devices: `d` waits at the door until `a` closes. `c` is small."""


def send_elsewhere(entries: Entries) -> None:
    for entry in entries:
        if entry.get("host") == 0:
            entry["host"] = 1


def change_the_host(entries: Entries) -> None:
    entries[find(entries, "b", "ends")]["host"] = 0


def take_another(entries: Entries) -> None:
    for entry in entries:
        if entry.get("session") == "c" and "device_ids" in entry:
            entry["device_ids"] = ["d1"]


def take_what_is_taken(entries: Entries) -> None:
    for entry in entries:
        if entry.get("session") == "b" and "device_ids" in entry:
            entry["device_ids"] = ["d0"]


def wait_longer(entries: Entries) -> None:
    for entry in entries[find(entries, "d", "takes") :]:
        if entry["session"] == "d":
            entry["at_ms"] += 5


def give_early(entries: Entries) -> None:
    gives = entries.pop(find(entries, "b", "gives"))
    at = find(entries, "b", "ends") + 1
    entries.insert(at, {**gives, "at_ms": entries[at - 1]["at_ms"]})


def fail_without_reason(entries: Entries) -> None:
    begins = find(entries, "c", "begins")
    entries[begins]["world"] = "failed"
    del entries[find(entries, "c", "ends")]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (take_another, "c takes 1000 MiB of d1 on host 0; the rule says 1000 MiB of d0 on host 0\n"),
        (take_what_is_taken, "b takes 6000 MiB of d0 on host 0; the rule says 6000 MiB of d1 on host 0\n"),
        (take_what_is_taken, "more than 8000 MiB of d0 are taken: a, b\n"),
        (wait_longer, "d waits, and could have 6000 MiB of d0 on host 0\n"),
        (give_early, "b gives d1 back, and is neither closed nor culled\n"),
        (give_early, "b gives d1 back and still uses 6000 MiB\n"),
        (fail_without_reason, "cell 0 of c fails, needs 900 MiB and may have 1000 MiB\n"),
        (fail_without_reason, "out_of_memory: the run says 0, the record 1\n"),
    ],
)
def test_a_record_of_a_baseline_that_was_tampered_with_is_found(
    tamper: Callable[[Entries], None], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record, figures = tmp_path / "run.log", tmp_path / "run.json"
    result = run_baseline("static-fraction", host(2), CROWD, record=record)
    assert max(result.doors.ordered) == 100_000
    figures.write_text(json.dumps(result.as_json()))
    agrees(capsys, record, figures)
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    tamper(entries)
    record.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert message in complaints(capsys, record, figures)


def cull_late(entries: Entries) -> None:
    for entry in entries[find(entries, "a", "culled") :]:
        if entry["session"] == "a" and entry["at_ms"] == 3_610_000:
            entry["at_ms"] += 7


def cull_never(entries: Entries) -> None:
    at = find(entries, "a", "culled")
    del entries[at : at + 3]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (cull_late, "a is culled, and is idle for 3600007 ms with d0\n"),
        (cull_never, "a was idle for 7190000 ms, and was not culled\n"),
        (cull_never, "lost: the run says 1, the record 0\n"),
    ],
)
def test_a_kernel_that_is_culled_at_another_time_is_found(
    tamper: Callable[[Entries], None], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record, figures = tmp_path / "run.log", tmp_path / "run.json"
    alone = [session("a", gpu_cell(0, 10_000), gpu_cell(7_200_000, 10_000), close_ms=7_300_000)]
    result = run_baseline("cull", host(), alone, record=record)
    figures.write_text(json.dumps(result.as_json()))
    agrees(capsys, record, figures)
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    tamper(entries)
    record.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert message in complaints(capsys, record, figures)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (send_elsewhere, "a is placed on host 1, and belongs on host 0: 8000 MiB on host 0, 8000 MiB on host 1\n"),
        (change_the_host, "b is on host 1, and the line is of host 0\n"),
    ],
)
def test_a_session_on_another_host_is_found(
    tamper: Callable[[Entries], None], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record, figures = run(tmp_path, [host(), host()], CROWD)
    agrees(capsys, record, figures)
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    tamper(entries)
    record.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert message in complaints(capsys, record, figures)


def test_a_figure_that_is_wrong_or_unknown_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, figures = run(tmp_path, host(), TURNS)
    shown = json.loads(figures.read_text())
    shown["wait_s"]["p95"] -= 0.001
    shown["luck"] = 7
    del shown["resumes"]
    figures.write_text(json.dumps(shown))
    said = complaints(capsys, record, figures).splitlines()
    longest = shown["wait_s"]["max"]
    assert said[:-1] == [
        f"wait_s p95: the run says {shown['wait_s']['p95']}, the record {longest}",
        "resumes: the run has no such figure",
        "luck: the audit has no such figure",
    ]
    assert said[-1].endswith(": 3 wrong")


def test_what_cannot_be_audited_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, figures = run(tmp_path, host(), TURNS)
    (tmp_path / "old.log").write_text('{"format":"jupyter-gpu-events","version":2,"parallel_swaps":1}\n')
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "odd.log").write_text(record.read_text() + '{"world":"ends"}\n')
    (tmp_path / "half.gz").write_bytes(b"\x1f\x8b")
    for name, sentence in (
        ("old.log", "the record is not of version 1; record the run again with --record"),
        ("empty.log", "is empty"),
        ("odd.log", "cannot be read: KeyError 'at_ms'"),
        ("half.gz", "cannot be read"),
        ("absent.log", "cannot be read"),
    ):
        assert audit([str(tmp_path / name), "--json", str(figures)]) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert said.count("\n") == 1


# -- a simulator that is wrong -------------------------------------------------------------------------------------------


def twice(self: Accounts, number: int, device_ids: Sequence[str]) -> None:
    for device_id in device_ids:
        self._devices_held += 2 * (self._holders[number][device_id] == 0)
        self._holders[number][device_id] += 1


def one_way(self: Accounts, number: int, mib: int) -> None:
    self._host_mib[number] += mib
    self.result.host_peak_mib = max(self.result.host_peak_mib, self._host_mib[number])
    self.result.moved_mib += max(0, mib)


def never_freed(self: Accounts, number: int, mib: int) -> None:
    self._host_mib[number] += max(0, -mib)
    self.result.host_peak_mib = max(self.result.host_peak_mib, self._host_mib[number])


def idle(self: Accounts, now_ms: int) -> None:
    self.result.held += self._devices_held * (now_ms - self._accounted_ms) * 1000
    self.result.peak_devices_held = max(self.result.peak_devices_held, self._devices_held)
    self._accounted_ms = now_ms


@pytest.mark.parametrize(
    ("broken", "figure"),
    [
        ({"hold": twice}, "held_gpu_hours: the run says "),
        ({"hold": twice}, "peak_devices_held: the run says "),
        ({"save": one_way}, "moved_gib: the run says 17.578, the record 23.438\n"),
        ({"drop_saved": never_freed}, "host_peak_mib: the run says 18000, the record 12000\n"),
        ({"advance": idle}, "busy_gpu_hours: the run says 0.0, the record "),
    ],
)
def test_wrong_accounts_are_found(
    broken: dict[str, Callable[..., None]],
    figure: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for method, wrong in broken.items():
        monkeypatch.setattr(Accounts, method, wrong)
    assert figure in complaints(capsys, *run(tmp_path, host(), TURNS))


def test_a_wrong_model_of_contention_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = [session(name, gpu_cell(0, 10_000, mib=900, util=80), close_ms=10_000) for name in "ab"]
    assert agrees(capsys, *run(tmp_path, host(), trace))["late_s"]["max"] == 6.0  # 1.6 devices' work, of ten seconds
    monkeypatch.setattr(machine, "stretch_milli", lambda wants, _capacity: max(1000, sum(wants)))
    assert "by the model of contention\n" in complaints(capsys, *run(tmp_path, host(), trace))
