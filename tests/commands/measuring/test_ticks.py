"""Units of work: how a program reports them, what is read, and what tenants did side by side."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.commands.measuring import repeat as repeat_script
from fractional_gpu.commands.measuring.study import Tick, TickError, pace, read_ticks
from fractional_gpu_kernel.measure import FILE, tick

S = 1_000_000_000


def evenly(since_s: float, every_s: float, count: int, units: int = 1) -> list[Tick]:
    return [Tick(round((since_s + number * every_s) * S), units) for number in range(count)]


def test_what_a_program_reports_is_read_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ticks"
    file.touch()
    monkeypatch.setenv(FILE, str(file))
    before_ns = time.monotonic_ns()
    tick()
    tick(32)
    one, other = read_ticks(file)
    assert (one.units, other.units) == (1, 32)
    assert before_ns <= one.at_ns <= other.at_ns <= time.monotonic_ns()


@pytest.mark.parametrize("units", [0, -1, True, 1.5, 2_000_000_000])
def test_what_is_no_number_of_units_is_refused(units: int) -> None:
    with pytest.raises(ValueError, match="give a whole number from 1"):
        tick(units)


@pytest.mark.parametrize("line", [b"", b"now 1", b"1", b"1 2 3", b"1 0", b"-1 1", b"1 " + b"9" * 30, b"\xff \xff"])
def test_what_is_no_report_is_refused_with_what_is_allowed(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "ticks"
    file.write_bytes(line + b"\n")
    with pytest.raises(TickError, match="expected NANOSECONDS UNITS"):
        read_ticks(file)


@given(st.integers(2, 50), st.integers(1, 100), st.floats(0.001, 10))
def test_a_steady_program_has_its_own_pace(count: int, units: int, every_s: float) -> None:
    found = pace(evenly(3, every_s, count, units), 0, 10**15)
    assert found is not None
    assert found.units == (count - 1) * units
    assert found.unit_s == pytest.approx(every_s / units, rel=1e-3)
    assert found.latencies_s == pytest.approx([every_s / units] * (count - 1), rel=1e-3)


def test_a_whole_run_is_a_unit_and_the_first_that_fails_ends_the_repetition(tmp_path: Path) -> None:
    file, count = tmp_path / "ticks", tmp_path / "count"
    file.touch()
    program = f"""
from pathlib import Path
count = Path({str(count)!r})
number = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (number + 1))
raise SystemExit(5 if number == 3 else 0)
"""
    repeat = [sys.executable, "-I", "-S", repeat_script.__file__, sys.executable, "-c", program]
    ended = subprocess.run(repeat, env={**os.environ, FILE: str(file)}, check=False)
    assert (ended.returncode, len(read_ticks(file)), count.read_text()) == (5, 4, "xxxx")
