"""`%%gpu measure`: which cells are the setup, and how the separate process runs the cell's code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu_kernel.magics import cell_runner
from fractional_gpu_kernel.magics.arguments import ArgumentsError
from fractional_gpu_kernel.magics.measure_cell import setup_numbers
from fractional_gpu_kernel.measure import FILE
from tests.support.world import until

pytestmark = pytest.mark.promise("measure-cell")


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=6))
def test_the_setup_is_what_the_ranges_name_in_their_order(ranges: list[tuple[int, int]]) -> None:
    text = ", ".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    expected = [number for first, more in ranges for number in range(first, first + more + 1)]
    assert setup_numbers(text, last=45) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected cell numbers"),
        ("1-", "expected cell numbers"),
        ("1:3", "expected cell numbers"),
        ("²", "expected cell numbers"),
        ("0", "are numbered 1 to 7"),
        ("3-2", "are numbered 1 to 7"),
        ("6-8", "--setup names 6-8, but the cells of this session are numbered 1 to 7"),
    ],
)
def test_what_names_no_cell_is_refused_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ArgumentsError, match=said):
        setup_numbers(text, last=7)


def test_before_the_first_cell_there_is_no_setup() -> None:
    with pytest.raises(ArgumentsError, match="no cell has run in this session"):
        setup_numbers("1", last=0)


Runs = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    (tmp_path / "ticks").touch()

    def start(cell: str, setup: Sequence[str] = (), *, from_start: bool = False) -> "subprocess.Popen[str]":
        sources = [(f"cell {number}", source) for number, source in enumerate(setup, 1)]
        job = tmp_path / "job.json"
        job.write_text(json.dumps({"setup": sources, "cell": cell, "from_start": from_start}))
        return subprocess.Popen(
            [sys.executable, "-P", cell_runner.__file__, str(job)],
            cwd=tmp_path,
            env={**os.environ, FILE: str(tmp_path / "ticks")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ticks(folder: Path) -> int:
    return len((folder / "ticks").read_text().splitlines())


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    printed, complaint = process.communicate(timeout=60)
    return process.returncode, printed, complaint.strip().rpartition("\n")[2]


def test_the_setup_runs_once_and_each_run_of_the_cell_but_the_first_is_a_unit_of_work(
    runs: Runs, tmp_path: Path
) -> None:
    setup = ["import asyncio\nfrom pathlib import Path\nclass Note: pass\n", "count = 0\nprint('begun')"]
    cell = """
import pickle
await asyncio.sleep(0)
pickle.loads(pickle.dumps(Note()))
display(count)
count += 1
Path("counts").write_text(f"{count}")
if count == 4: raise SystemExit(7)
"""
    assert ended(runs(cell, setup)) == (7, "", "")
    assert ((tmp_path / "counts").read_text(), ticks(tmp_path)) == ("4", 3)


def test_a_cell_that_reports_units_itself_is_left_to_it_and_its_setup_s_reports_do_not_count(
    runs: Runs, tmp_path: Path
) -> None:
    setup = ["from fractional_gpu_kernel.measure import tick\ntick(5)\nruns = 0"]
    cell = "tick(); tick(); runs += 1\nif runs == 3: raise SystemExit(0)"
    assert ended(runs(cell, setup))[0] == 0
    assert ticks(tmp_path) == 6


def test_from_the_start_the_process_is_the_unit_and_reports_none(runs: Runs, tmp_path: Path) -> None:
    cell = "from fractional_gpu_kernel.measure import tick\ntick()\nopen('done', 'a').write('x')"
    assert ended(runs(cell, from_start=True)) == (0, "", "")
    assert (ticks(tmp_path), (tmp_path / "done").read_text()) == (0, "x")


def test_magics_and_shell_commands_work_and_those_of_gpu_do_nothing(runs: Runs, tmp_path: Path) -> None:
    lines = [
        "get_ipython().run_line_magic('gpu', 'resize 1')",
        "get_ipython().run_cell_magic('gpu', '1', 'inner = 1')",
        "get_ipython().system('echo shell > shell')",
        "raise SystemExit(inner)",
    ]
    assert ended(runs("\n".join(lines)))[:2] == (1, "")
    assert (tmp_path / "shell").read_text() == "shell\n"


def test_a_name_that_is_not_found_is_told_with_the_option_that_helps(runs: Runs) -> None:
    status, _, complaint = ended(runs("def f(): return model\nf()"))
    assert status == 1
    assert complaint.startswith("'model' is not defined in the measured process")
    assert "such as --setup 1-3" in complaint
    assert len(complaint) < 200, "the measurement quotes so much of it"


def test_any_other_failure_is_the_last_that_is_printed(runs: Runs) -> None:
    assert ended(runs("1 / 0"))[::2] == (1, "ZeroDivisionError: division by zero")


def test_it_runs_until_it_is_ended(runs: Runs, tmp_path: Path) -> None:
    process = runs("pass")
    until(lambda: ticks(tmp_path) > 2, "it reports")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM
