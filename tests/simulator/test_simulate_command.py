"""`jupyter gpu simulate` from the outside."""

import json
from pathlib import Path

import pytest

from fractional_gpu.commands.main import main

KEYS = [
    "sessions",
    "cells",
    "gpu_cells",
    "hosts",
    "devices",
    "reserved_gpu_hours",
    "busy_gpu_hours",
    "held_gpu_hours",
    "owned_gpu_hours",
    "saved_gpu_hours",
    "peak_devices_held",
    "wait_s",
    "waited_percent",
    "nonzero_wait_s",
    "host_p95_wait_s",
    "door_wait_s",
    "door_waited_percent",
    "late_s",
    "user_p95_late_s",
    "user_p95_stretch",
    "jain_late",
    "suspends",
    "resumes",
    "failed_swaps",
    "early_resumes",
    "vain_gib",
    "preemptions",
    "moved_gib",
    "host_peak_mib",
    "out_of_memory",
    "lost",
    "wall_s",
    "forecast_error",
]


ONE_GPU = ("--several-gpus", "0")
MANY_SWAPS = ("--pace", "short", "--memory-of", "cell", *ONE_GPU)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["simulate", "--json", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    figures: dict[str, object] = json.loads(shown)
    return figures


def test_json_has_the_promised_keys_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    figures = simulated(capsys, "--users", "3", "--devices", "2x80GiB", *MANY_SWAPS)
    assert list(figures) == KEYS
    waits = figures["wait_s"]
    assert isinstance(waits, dict)
    assert list(waits) == ["p50", "p90", "p95", "p99", "max"]
    assert (figures["sessions"], figures["devices"], figures["lost"], figures["out_of_memory"]) == (12, 2, 0, 0)


def test_baselines_stand_beside_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "run.html"
    baselines = ("--baseline", "reservation", "--baseline", "time-slice")
    arguments = ("--users", "3", *MANY_SWAPS, *baselines, "--picture", str(picture))
    figures = simulated(capsys, *arguments)
    assert list(figures) == [*KEYS, "baselines"]
    shown = figures["baselines"]
    assert isinstance(shown, dict)
    assert [list(one) for one in shown.values()] == [KEYS, KEYS]
    assert "time-slice" in picture.read_text()
    assert main(["simulate", *arguments]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["fractional", "reservation", "time-slice"]
    assert table[1].split() == ["sessions", "12", "12", "12"]
    cells = next(line.split() for line in table if line.startswith("cell forecast off by"))
    assert cells[4].isdecimal()
    assert cells[5:] == ["%", "-", "-"]
    counted = [line.split() for line in table if line.startswith("cell forecasts  ")]
    assert [(line[2].replace(",", "").isdecimal(), line[3:]) for line in counted] == [(True, ["-", "-"])]
    assert not any(line.startswith("seat") for line in table), "the simulator has no seats"


def test_a_written_trace_gives_the_same_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [str(tmp_path / "sessions.csv"), str(tmp_path / "cells.csv")]
    made_up = simulated(capsys, "--users", "8", "--ask-error", "50", "--urgent-users", "20", "--write-trace", *files)
    assert "priority,asked_mib" in Path(files[0]).read_text()
    read = simulated(capsys, "--sessions", files[0], "--cells", files[1])
    assert {**made_up, "wall_s": 0} == {**read, "wall_s": 0}


def test_a_policy_file_is_the_brokers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "jupyter_gpu_config.py"
    policy.write_text('c.GPUBroker.pools = {"default": {"fractions": ["1"], "idle_after": "on-demand"}}\n')
    figures = simulated(capsys, "--users", "3", "--devices", "4x80GiB", "--policy", str(policy), *MANY_SWAPS)
    assert figures["peak_devices_held"] == 4
    policy.write_text('c.GPUBroker.pools = {"default": {"fractoins": ["1"]}}\n')
    assert main(["simulate", "--users", "3", "--policy", str(policy)]) == 1
    assert "unknown key; did you mean 'fractions'?" in capsys.readouterr().err


def test_a_policy_that_is_no_file_is_refused_with_what_the_option_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--users", "2", "--policy", "/nowhere/config.py"]) == 1
    said = capsys.readouterr().err
    assert "--policy: the configuration file /nowhere/config.py cannot be read: No such file" in said
    assert "--config" not in said


@pytest.mark.parametrize(
    ("preempt", "arguments", "some"),
    [
        ("never", (), False),
        ("priorities", (), False),
        ("priorities", ("--urgent-users", "30"), True),
        ("fair", (), True),
    ],
)
def test_a_policy_file_says_who_is_preempted(
    preempt: str, arguments: tuple[str, ...], some: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = tmp_path / "jupyter_gpu_config.py"
    pool = {"idle_after": "on-demand", "may_move": True, "preempt": preempt, "min_residency_swaps": 3}
    policy.write_text(f"c.GPUBroker.pools = {{'default': {pool!r}}}\n")
    figures = simulated(
        capsys, "--users", "12", "--devices", "1x80GiB", "--policy", str(policy), *MANY_SWAPS, *arguments
    )
    assert (figures["lost"], figures["out_of_memory"]) == (0, 0)
    assert bool(figures["preemptions"]) is some


def test_the_fewest_devices_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    figures = simulated(capsys, "--users", "4", "--find-devices", "--p95-wait", "60s", *ONE_GPU)
    devices, waits = figures["devices"], figures["wait_s"]
    assert isinstance(devices, int)
    assert isinstance(waits, dict)
    assert waits["p95"] <= 60
    if devices > 1:
        fewer = simulated(capsys, "--users", "4", "--devices", f"{devices - 1}x80GiB", *ONE_GPU)["wait_s"]
        assert isinstance(fewer, dict)
        assert fewer["p95"] > 60


def test_the_fewest_hosts_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--users", "12", "--find-devices", "--p95-wait", "1s")
    figures = simulated(capsys, *arguments, "--hosts", "?x(8x80GiB)", "--baseline", "static-fraction")
    hosts, baselines = figures["hosts"], figures["baselines"]
    assert isinstance(hosts, int)
    assert isinstance(baselines, dict)
    assert figures["devices"] == 8 * hosts > 8
    assert baselines["static-fraction"]["door_wait_s"]["p95"] <= 1
    waits = figures["wait_s"]
    assert isinstance(waits, dict)
    assert waits["p95"] <= 1
    fewer = simulated(capsys, "--users", "12", "--hosts", f"{hosts - 1}x(8x80GiB)")["wait_s"]
    assert isinstance(fewer, dict)
    assert fewer["p95"] > 1


def test_hosts_may_have_different_devices_and_more_than_usual_if_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mixed = simulated(capsys, "--users", "4", *ONE_GPU, "--hosts", "2x(1x80GiB,1x40GiB), 1x(3x80GiB)")
    assert (mixed["hosts"], mixed["devices"]) == (3, 7)
    large = simulated(capsys, "--users", "4", "--hosts", "1x(20x80GiB)", "--gpus-per-host", "20")
    one = simulated(capsys, "--users", "4", "--devices", "20x80GiB")
    assert {**large, "wall_s": 0} == {**one, "wall_s": 0}


def test_more_devices_than_a_host_has_are_allowed_in_one_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--users", "4", "--devices", "17x80GiB", "--json"]) == 0
    assert (
        "all 17 devices are in one host, and no host has so many; --hosts simulates several" in capsys.readouterr().err
    )
    assert main(["simulate", "--users", "4", "--devices", "16x80GiB", "--json"]) == 0
    assert "in one host" not in capsys.readouterr().err


def test_the_goal_of_the_search_is_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    late = simulated(capsys, "--users", "12", *MANY_SWAPS, "--find-devices", "--p95-late", "3m")
    users = late["user_p95_late_s"]
    assert isinstance(users, dict)
    assert users["p95"] <= 180
    waits = simulated(capsys, "--users", "12", *MANY_SWAPS, "--find-devices", "--p99-wait", "1s", "--p95-wait", "1m")[
        "wait_s"
    ]
    assert isinstance(waits, dict)
    assert waits["p99"] <= 1
    assert main(["simulate", "--users", "2", "--find-devices", "--p95-late", "soon"]) == 2
    assert "--p95-late: " in capsys.readouterr().err


def test_a_baseline_is_given_its_own_fewest_devices(capsys: pytest.CaptureFixture[str]) -> None:
    figures = simulated(capsys, "--users", "4", "--find-devices", "--baseline", "reservation")
    baselines = figures["baselines"]
    assert isinstance(baselines, dict)
    assert baselines["reservation"]["door_wait_s"]["p95"] <= 3
    assert baselines["reservation"]["devices"] >= 4  # everybody works at the same time of the day


def test_a_recorded_run_can_be_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    simulated(capsys, "--users", "2", "--record", str(log))
    assert main(["simulate", "--replay", str(log)]) == 0
    events = log.read_text().count('\n{"event":')
    assert capsys.readouterr().out.startswith(f"{events} events gave the same ")
    lines = log.read_text().splitlines(keepends=True)
    attached = next(number for number, line in enumerate(lines) if '"Attached"' in line)
    log.write_text("".join(lines[:attached] + lines[attached + 1 :]))
    assert main(["simulate", "--replay", str(log)]) == 1
    assert "with other effects than recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "say whose sessions to simulate: either --users N, or --sessions FILE --cells FILE"),
        (["--sessions", "a.csv"], 2, "--sessions and --cells belong together"),
        (["--users", "2", "--devices", "many"], 2, "--devices 'many' is not allowed; COUNTxMEMORY such as 8x80GiB"),
        (["--users", "2", "--devices", "9999x80GiB"], 2, "at most 8192 in all"),
        (["--users", "2", "--devices", "2x80kB"], 2, "--devices: memory '80kB' is not a size"),
        (["--users", "2", "--hosts", "8x80GiB"], 2, "--hosts '8x80GiB' is not allowed; COUNTx(COUNTxMEMORY) such as"),
        (["--users", "2", "--hosts", "2x(8x80GiB),"], 2, "--hosts '2x(8x80GiB),' is not allowed"),
        (["--users", "2", "--hosts", "0x(8x80GiB)"], 2, "--hosts '0x(8x80GiB)' is not allowed"),
        (["--users", "2", "--hosts", "999x(16x80GiB)"], 2, "at most 8192 GPUs in all"),
        (["--users", "2", "--hosts", "2x(2x80kB)"], 2, "--hosts: memory '80kB' is not a size"),
        (
            ["--users", "2", "--hosts", "2x(20x80GiB)"],
            2,
            "at most 16 are allowed: say more hosts with fewer GPUs, or allow so many with --gpus-per-host 20",
        ),
        (["--users", "2", "--hosts", "?x(8x80GiB)"], 2, "without --find-devices is not allowed; say a number of hosts"),
        (["--users", "2", "--hosts", "2x(8x80GiB)", "--find-devices"], 2, "is not allowed; say '?x(8x80GiB)'"),
        (
            ["--users", "2", "--hosts", "2x(8x80GiB)", "--devices", "8x80GiB"],
            2,
            "--devices is one host and --hosts are several",
        ),
        (["--users", "2", "--save-speed", "0"], 2, "--save-speed: memory '0' is less than 1 MiB"),
        (["--users", "2", "--find-devices", "--record", "x"], 2, "find first, then record"),
        (["--sessions", "absent.csv", "--cells", "absent.csv"], 1, "absent.csv cannot be read: No such file"),
        (["--users", "2", "--several-gpus", "0", "--devices", "2x1GiB"], 1, "simulate larger devices with --devices"),
        (["--users", "1", "--picture", "/nonexistent/run.html"], 1, "/nonexistent/run.html cannot be written"),
        (["--users", "1", "--record", "/nonexistent/run.log"], 1, "/nonexistent/run.log cannot be written"),
        (["--users", "2", "--lunch", "noon"], 2, "--lunch: "),
        (["--users", "2", "--lunch", "5h"], 2, "--lunch 5h is not allowed; a time of at most 4h is"),
        (["--users", "2", "--time-zones", "25"], 2, "--time-zones 25 is not allowed; a whole number from 1 to 24 is"),
        (
            ["--users", "2", "--habit", "builders", "--pace", "long"],
            2,
            "--pace long is not allowed with --habit builders, because it describes users of the published habit only",
        ),
        (
            ["--users", "2", "--habit", "trainers", "--several-gpus", "0"],
            2,
            "--several-gpus 0 is not allowed with --habit trainers",
        ),
        (
            ["--users", "2", "--habit", "mixed", "--memory-of", "cell"],
            2,
            "--memory-of cell is not allowed with --habit mixed",
        ),
        (
            ["--users", "2", "--habit", "teaching-lab", "--joint-starts", "40"],
            2,
            "--joint-starts 40 is not allowed with --habit teaching-lab",
        ),
        (
            ["--users", "2", "--habit", "teaching-lab", "--lunch", "1h"],
            2,
            "--lunch 1h is not allowed with --habit teaching-lab, whose classes have no lunch; leave one of the two out",
        ),
        (
            ["--sessions", "a.csv", "--cells", "b.csv", "--habit", "builders"],
            2,
            "--habit builders is not allowed with sessions of files or of a ledger, which are as recorded; leave it out",
        ),
        (
            ["--sessions", "a.csv", "--cells", "b.csv", "--several-gpus", "0"],
            2,
            "--several-gpus 0 is not allowed with sessions of files",
        ),
        (["--from-ledger", "--weekends"], 2, "--weekends is not allowed with sessions of files or of a ledger"),
        (["--users", "2", "--p95-wait", "5s"], 2, "--p95-wait needs --find-devices"),
        (["--replay", "run.log", "--picture", "run.html"], 2, "--replay runs no sessions and has no --picture"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == code
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


def test_a_machine_too_small_for_sessions_of_several_gpus_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--users", "20", "--devices", "2x80GiB"]) == 1
    assert "of synthetic users, with --several-gpus 0" in capsys.readouterr().err
    assert simulated(capsys, "--users", "20", "--devices", "2x80GiB", *ONE_GPU)["sessions"] == 40
    assert main(["simulate", "--users", "20", "--devices", "2x80GiB", "--one-gpu-only", "--json"]) == 0
    shown = capsys.readouterr()
    assert "with several GPUs at once" in shown.err
    assert json.loads(shown.out)["sessions"] < 40


@pytest.mark.parametrize("habit", ["teaching-lab", "builders", "trainers", "night-jobs", "mixed"])
def test_a_habit_changes_what_users_do_and_its_sessions_run_to_their_ends(
    habit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = simulated(capsys, "--users", "5", "--devices", "8x80GiB", "--habit", "published")
    assert {**usual, "wall_s": 0} == {**simulated(capsys, "--users", "5", "--devices", "8x80GiB"), "wall_s": 0}
    figures = simulated(capsys, "--users", "5", "--devices", "8x80GiB", "--habit", habit)
    assert (figures["lost"], figures["out_of_memory"]) == (0, 0)
    assert figures["busy_gpu_hours"] != usual["busy_gpu_hours"]


@pytest.mark.parametrize(
    "option", ["--request", "--urgent-users", "--several-gpus", "--joint-starts", "--failed-swaps"]
)
def test_shares_are_percentages(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for share in ("101", "-1", "half"):
        with pytest.raises(SystemExit) as stopped:
            main(["simulate", "--users", "2", f"{option}={share}"])
        assert stopped.value.code == 2
        assert f"{option}: '{share}' is not allowed; a whole number from 0 to 100 is" in capsys.readouterr().err


def test_sessions_with_several_gpus_have_whole_ones_or_are_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sessions, cells = tmp_path / "sessions.csv", tmp_path / "cells.csv"
    sessions.write_text("session,user,open_s,close_s,gpus,gpu_mib\na,u,0,9,1,10\nb,u,0,9,2,10\n")
    cells.write_text("session,user,start_s,duration_s,gpus,gpu_mib,gpu_util\na,u,1,1,1,10,5\nb,u,2,3,2,10,5\n")
    files = ["--sessions", str(sessions), "--cells", str(cells), "--json"]
    both = simulated(capsys, *files, "--devices", "3x8GiB")
    assert (both["sessions"], both["peak_devices_held"], both["lost"]) == (2, 3, 0)
    assert both["busy_gpu_hours"] == pytest.approx(7 / 3600, abs=0.001)
    assert main(["simulate", *files, "--devices", "1x8GiB"]) == 1
    complaint = capsys.readouterr().err
    assert "session 'b' uses 2 GPUs at once, but a lease of pool 'default' may have 1" in complaint
    assert "--one-gpu-only" in complaint
    assert main(["simulate", "--one-gpu-only", *files, "--devices", "1x8GiB"]) == 0
    shown = capsys.readouterr()
    assert "left out: 1 session with several GPUs at once" in shown.err
    assert json.loads(shown.out)["sessions"] == 1
