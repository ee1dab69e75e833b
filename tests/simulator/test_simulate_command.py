"""`jupyter gpu simulate` from the outside."""

import json
from pathlib import Path

import pytest

from fractional_gpu.commands.main import main

KEYS = [  # of each run
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


ONE_GPU = ("--set", "several_gpus=0")
MANY_SWAPS = ("--set", "pace=short", "--set", "memory_of=cell", *ONE_GPU)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["simulate", "--json", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    figures: dict[str, object] = json.loads(shown)
    return figures


def test_json_has_the_promised_keys_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    figures = simulated(capsys, "--users", "3", "--devices", "2x80GiB", *MANY_SWAPS)
    assert list(figures) == ["answer", *KEYS]
    waits = figures["wait_s"]
    assert isinstance(waits, dict)
    assert list(waits) == ["p50", "p90", "p95", "p99", "max"]
    assert (figures["sessions"], figures["devices"], figures["lost"], figures["out_of_memory"]) == (12, 2, 0, 0)


def test_baselines_are_shown_with_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "run.html"
    baselines = ("--baseline", "reservation", "--baseline", "time-slice")
    arguments = ("--users", "3", *MANY_SWAPS, *baselines, "--picture", str(picture))
    figures = simulated(capsys, *arguments)
    assert list(figures) == ["answer", *KEYS, "baselines"]
    shown = figures["baselines"]
    assert isinstance(shown, dict)
    assert [list(one) for one in shown.values()] == [KEYS, KEYS]
    assert "time-slice" in picture.read_text()
    assert main(["simulate", *arguments]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("3 users on 8 devices of 80 GiB: ")
    del table[: table.index("") + 1]
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
    made_up = simulated(
        capsys,
        "--users",
        "8",
        "--set",
        "ask_error=50",
        "--set",
        "urgent_users=20",
        "--set",
        f"write_trace={json.dumps(files)}",
    )
    assert "priority,asked_mib" in Path(files[0]).read_text()
    read = simulated(capsys, "--trace", *files)
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


def test_the_goal_of_the_search_is_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    late = simulated(capsys, "--users", "12", *MANY_SWAPS, "--find-devices", "--set", "p95_late=3m")
    users = late["user_p95_late_s"]
    assert isinstance(users, dict)
    assert users["p95"] <= 180
    waits = simulated(
        capsys, "--users", "12", *MANY_SWAPS, "--find-devices", "--set", "p99_wait=1s", "--p95-wait", "1m"
    )["wait_s"]
    assert isinstance(waits, dict)
    assert waits["p99"] <= 1
    assert main(["simulate", "--users", "2", "--find-devices", "--set", "p95_late=soon"]) == 2
    assert "at `$.p95_late`" in capsys.readouterr().err


def test_a_recorded_run_can_be_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    simulated(capsys, "--users", "2", "--set", f"record={log}")
    assert main(["simulate", "--set", f"replay={log}"]) == 0
    events = log.read_text().count('\n{"event":')
    assert capsys.readouterr().out.startswith(f"{events} events had the same ")
    lines = log.read_text().splitlines(keepends=True)
    attached = next(number for number, line in enumerate(lines) if '"Attached"' in line)
    log.write_text("".join(lines[:attached] + lines[attached + 1 :]))
    assert main(["simulate", "--set", f"replay={log}"]) == 1
    assert "with different effects than recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give the sessions to simulate: either --users N, or --trace SESSIONS CELLS"),
        (["--set", "sessions=a.csv"], 2, "sessions=a.csv requires cells"),
        (["--set", "users"], 2, "--set 'users' is not in the form KEY=VALUE, such as several_gpus=0"),
        (
            ["--set", "colour=3"],
            2,
            "invalid scenario: Object contains unknown field `colour`; `jupyter gpu simulate --help` lists",
        ),
        (["--scenario", "absent.toml"], 1, "absent.toml cannot be read: No such file"),
        (
            ["--users", "2", "--devices", "many"],
            2,
            "--devices 'many' is not valid; use COUNTxMEMORY such as 8x80GiB",
        ),
        (["--users", "2", "--devices", "9999x80GiB"], 2, "at most 8192 GPUs in total"),
        (["--users", "2", "--devices", "2x80kB"], 2, "--devices: memory '80kB' is not a valid size"),
        (
            ["--users", "2", "--hosts", "8x80GiB"],
            2,
            "--hosts '8x80GiB' is not valid; use COUNTx(COUNTxMEMORY) such as",
        ),
        (["--users", "2", "--hosts", "2x(8x80GiB),"], 2, "--hosts '2x(8x80GiB),' is not valid"),
        (["--users", "2", "--hosts", "0x(8x80GiB)"], 2, "--hosts '0x(8x80GiB)' is not valid"),
        (["--users", "2", "--hosts", "999x(16x80GiB)"], 2, "at most 8192 GPUs in total"),
        (["--users", "2", "--hosts", "2x(2x80kB)"], 2, "--hosts: memory '80kB' is not a valid size"),
        (
            ["--users", "2", "--hosts", "?x(8x80GiB)"],
            2,
            "requires --find-devices; add it, or give a number of hosts",
        ),
        (["--users", "2", "--set", "seeds=3"], 2, "seeds=3 requires find_devices"),
        (["--from-ledger", "--find-devices", "--set", "seeds=3"], 2, "seeds=3 only applies to synthetic users"),
        (
            ["--users", "2", "--set", "door=slurm-shards", "--set", "meter=true"],
            2,
            "meter needs a broker, which door=slurm-shards does not have",
        ),
        (
            ["--users", "2", "--hosts", "2x(8x80GiB)", "--devices", "8x80GiB"],
            2,
            "devices and hosts=2x(8x80GiB) cannot be combined",
        ),
        (["--users", "2", "--set", "save_speed=0B"], 2, "memory '0B' is not a valid size"),
        (["--users", "2", "--set", "save_speed=0"], 2, "Expected text such as 20GiB, got 0 - at `$.save_speed`"),
        (["--users", "2", "--find-devices", "--set", "record=x"], 2, "record and find_devices=true cannot be combined"),
        (["--trace", "absent.csv", "absent.csv"], 1, "absent.csv cannot be read: No such file"),
        (["--users", "2", *ONE_GPU, "--devices", "2x1GiB"], 1, "simulate larger devices with --devices"),
        (["--users", "1", "--picture", "/nonexistent/run.html"], 1, "/nonexistent/run.html cannot be written"),
        (["--users", "1", "--set", "record=/nonexistent/run.log"], 1, "/nonexistent/run.log cannot be written"),
        (["--users", "2", "--set", "lunch=noon"], 2, "invalid duration 'noon'"),
        (["--users", "2", "--set", "lunch=5h"], 2, "lunch=5h is too long; use at most 4h"),
        (["--users", "2", "--set", "time_zones=25"], 2, "Expected `int` <= 24 - at `$.time_zones`"),
        (["--users", "2", "--set", "door=back"], 2, "Invalid enum value 'back' - at `$.door`"),
        (["--users", "2", "--set", "baselines=['none']"], 2, "unknown baseline 'none'; choose from: "),
        (
            ["--users", "2", "--set", "habit=trainers", *ONE_GPU],
            2,
            "several_gpus=0 only applies to habit=published, not to habit=trainers",
        ),
        (
            ["--users", "2", "--set", "habit=teaching-lab", "--set", "lunch=1h"],
            2,
            "and the habit teaching-lab cannot be combined, because that habit has no lunch",
        ),
        (["--trace", "a.csv", "b.csv", *ONE_GPU], 2, "several_gpus=0 only applies to synthetic users"),
        (["--from-ledger", "--set", "weekends=true"], 2, "weekends=true only applies to synthetic users"),
        (["--users", "2", "--p95-wait", "5s"], 2, "p95_wait=5s requires find_devices"),
        (
            ["--set", "replay=run.log", "--users", "2"],
            2,
            "replay and users=2 cannot be combined: a replay runs no sessions",
        ),
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
    assert "for synthetic users, with --set several_gpus=0" in capsys.readouterr().err
    assert simulated(capsys, "--users", "20", "--devices", "2x80GiB", *ONE_GPU)["sessions"] == 40
    assert main(["simulate", "--users", "20", "--devices", "2x80GiB", "--set", "one_gpu_only=true", "--json"]) == 0
    shown = capsys.readouterr()
    assert "with several GPUs at once" in shown.err
    assert json.loads(shown.out)["sessions"] < 40


@pytest.mark.parametrize("habit", ["teaching-lab", "builders", "trainers", "night-jobs", "mixed"])
def test_a_habit_changes_what_users_do_and_its_sessions_run_to_their_ends(
    habit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = simulated(capsys, "--users", "5", "--devices", "8x80GiB", "--set", "habit=published")
    assert {**usual, "wall_s": 0} == {**simulated(capsys, "--users", "5", "--devices", "8x80GiB"), "wall_s": 0}
    figures = simulated(capsys, "--users", "5", "--devices", "8x80GiB", "--set", f"habit={habit}")
    assert (figures["lost"], figures["out_of_memory"]) == (0, 0)
    assert figures["busy_gpu_hours"] != usual["busy_gpu_hours"]


def test_a_scenario_file_says_the_same_as_the_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('users = 3\ndevices = "2x80GiB"\nseveral_gpus = 0\npace = "short"\nmemory_of = "cell"\nseed = 7\n')
    figures = simulated(capsys, "--scenario", str(file), "--seed", "1")
    by_keys = simulated(capsys, "--users", "3", "--devices", "2x80GiB", *MANY_SWAPS)
    assert {**figures, "wall_s": 0} == {**by_keys, "wall_s": 0}, "and a flag wins over the file"


def test_sessions_with_several_gpus_have_whole_ones_or_are_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sessions, cells = tmp_path / "sessions.csv", tmp_path / "cells.csv"
    sessions.write_text("session,user,open_s,close_s,gpus,gpu_mib\na,u,0,9,1,10\nb,u,0,9,2,10\n")
    cells.write_text("session,user,start_s,duration_s,gpus,gpu_mib,gpu_util\na,u,1,1,1,10,5\nb,u,2,3,2,10,5\n")
    files = ["--trace", str(sessions), str(cells), "--json"]
    both = simulated(capsys, *files, "--devices", "3x8GiB")
    assert (both["sessions"], both["peak_devices_held"], both["lost"]) == (2, 3, 0)
    assert both["busy_gpu_hours"] == pytest.approx(7 / 3600, abs=0.001)
    assert main(["simulate", *files, "--devices", "1x8GiB"]) == 1
    complaint = capsys.readouterr().err
    assert "session 'b' uses 2 GPUs at once, but a lease of pool 'default' may have 1" in complaint
    assert "--set one_gpu_only=true" in complaint
    assert main(["simulate", "--set", "one_gpu_only=true", *files, "--devices", "1x8GiB"]) == 0
    shown = capsys.readouterr()
    assert "left out: 1 session with several GPUs at once" in shown.err
    assert json.loads(shown.out)["sessions"] == 1
