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
    with pytest.raises(TraceError, match="line 2: scheduled_time is 'soon'; expected a whole number"):
        pods.read_days(wrong)
    files = ["--sessions", str(tmp_path / "s.csv"), "--cells", str(tmp_path / "c.csv")]
    for arguments, message in (
        ([str(tmp_path / "absent.csv")], "absent.csv cannot be read: No such file"),
        ([str(listed(tmp_path)), "--day", "2"], "--day 2 is not allowed; "),
        ([str(listed(tmp_path)), "--gpu-memory", "much"], "memory 'much' is not a valid size"),
    ):
        with pytest.raises(SystemExit) as stopped:
            pods.main([*arguments, *files])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
