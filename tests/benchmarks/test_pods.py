"""Sessions made of pods: the assumptions that `pods` states hold of what it makes."""

from pathlib import Path

import pytest

from fractional_gpu.simulator import TraceError
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import read_sessions
from tests.benchmarks import pods
from tests.benchmarks.simulated import machine

HOUR, DAY = 3600, 86_400
HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)


def row(start: object, end: object, *, cpu: int = 1000, gpus: int = 1, milli: int = 500) -> str:
    return f"p,{cpu},1024,{gpus},{milli},,LS,Succeeded,0,{end},{start}\n"


def listed(tmp_path: Path, *rows: str) -> Path:
    """A list with these pods and, a day later, as many short ones as make a day count."""
    path = tmp_path / "pods.csv"
    filling = [row(5 * DAY + 60 * number, 5 * DAY + 60 * number + 30, cpu=77) for number in range(pods.LEAST_RUNS)]
    path.write_text(HEADER + "".join([*rows, *filling]))
    return path


def runs(*spans: tuple[int, int], cpu: int = 1000, milli: int = 500) -> list[pods.Run]:
    return [pods.Run(start, end, (str(cpu),), 1, milli) for start, end in spans]


def spans(path: Path) -> list[tuple[int, int]]:
    return [(run.start_s, run.end_s) for day in pods.read_days(path) for run in day]


def test_pods_of_a_request_that_follow_one_another_are_the_runs_of_one_person() -> None:
    (one,) = pods.sessions_of(runs((100, 400), (1000, 1600), (1600, 1700)))
    assert [(cell.start_ms, cell.duration_ms) for cell in one.cells] == [
        (100_000, 300_000),
        (1_000_000, 600_000),
        (1_600_000, 100_000),
    ]
    assert (one.open_ms, one.close_ms) == (100_000, (1700 + HOUR) * 1000)


def test_pods_that_overlap_or_ask_for_something_else_are_those_of_others() -> None:
    overlapping = pods.sessions_of(runs((100, 400), (200, 500)))
    assert [len(one.cells) for one in overlapping] == [1, 1]
    assert len({one.user for one in overlapping}) == 2
    assert len(pods.sessions_of(runs((100, 400)) + runs((500, 600), cpu=2000))) == 2


def test_a_pod_continues_the_session_that_ended_last_unless_the_pause_was_too_long() -> None:
    first, second = pods.sessions_of(runs((0, 100), (50, 300), (350, 400)))
    assert [cell.start_ms for cell in first.cells] == [0]
    assert [cell.start_ms for cell in second.cells] == [50_000, 350_000]
    assert len(pods.sessions_of(runs((0, 100), (100 + 4 * HOUR, 15_000)))) == 1
    assert len(pods.sessions_of(runs((0, 100), (101 + 4 * HOUR, 15_000)))) == 2


def test_a_pod_uses_the_share_that_it_asked_for() -> None:
    (half,) = pods.sessions_of(runs((0, 100), milli=500), 10_000)
    assert (half.gpu_mib, half.cells[0].gpu_mib, half.cells[0].util_percent) == (4500, 4500, 50)
    (whole,) = pods.sessions_of(runs((0, 100), milli=1000), 10_000)
    assert (whole.gpu_mib, whole.cells[0].util_percent) == (9000, 100)


def test_services_pods_without_a_gpu_and_those_never_scheduled_are_left_out(tmp_path: Path) -> None:
    long = 12 * HOUR
    path = listed(
        tmp_path,
        row(5 * DAY + 7, 5 * DAY + 7 + long),
        row(5 * DAY + 8, 5 * DAY + 9 + long),
        row(5 * DAY + 9, 5 * DAY + 99, gpus=0),
        row("", 5 * DAY + 99),
        row(5 * DAY + 10, 5 * DAY + 10),
    )
    kept = [span for span in spans(path) if span[0] % 60]
    assert kept == [(5 * DAY + 7, 5 * DAY + 7 + long)]


def test_days_with_few_pods_are_not_used_and_times_count_from_midnight(tmp_path: Path) -> None:
    (day,) = pods.read_days(listed(tmp_path, row(4 * DAY, 4 * DAY + 100)))
    assert len(day) == pods.LEAST_RUNS
    sessions = pods.sessions_of(day)
    assert min(one.open_ms for one in sessions) == 0
    assert sum(len(one.cells) for one in sessions) == pods.LEAST_RUNS


def test_what_is_written_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, sessions, cells = listed(tmp_path), tmp_path / "sessions.csv", tmp_path / "cells.csv"
    files = ["--sessions", str(sessions), "--cells", str(cells)]
    assert pods.main([str(path), *files, "--gpu-memory", "16GiB"]) == 0
    assert capsys.readouterr().out == "1 sessions with 100 cells\n"
    trace = read_sessions(sessions, cells)
    assert trace == pods.sessions_of(pods.read_days(path)[0], 16_384)
    result = simulate(machine(1, memory_mib=16_384), trace)
    assert (result.gpu_cells, result.lost, result.out_of_memory) == (pods.LEAST_RUNS, 0, 0)


def test_a_list_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, wrong = tmp_path / "few.csv", tmp_path / "wrong.csv"
    few.write_text(HEADER + row(0, 100))
    wrong.write_text(HEADER + row("soon", 100))
    with pytest.raises(TraceError, match="has no day on which 100 pods with a GPU begin; name a longer list"):
        pods.read_days(few)
    with pytest.raises(TraceError, match="line 2: scheduled_time is 'soon'; allowed: a whole number"):
        pods.read_days(wrong)
    files = ["--sessions", str(tmp_path / "s.csv"), "--cells", str(tmp_path / "c.csv")]
    for arguments, message in (
        ([str(tmp_path / "absent.csv")], "absent.csv cannot be read: No such file"),
        ([str(listed(tmp_path)), "--day", "2"], "--day 2 is not allowed; "),
        ([str(listed(tmp_path)), "--gpu-memory", "much"], "memory 'much' is not a size"),
    ):
        with pytest.raises(SystemExit) as stopped:
            pods.main([*arguments, *files])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
