"""Simulated signs: given before cells, some of them false, and what foresight makes of them in a run that the auditor agrees with."""

from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.core.model import Foresight
from fractional_gpu.simulator.load import Load, Memory, Pace, Signs, synthetic_sessions
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import machine, with_pool

LOAD = Load(pace=Pace.SHORT, memory=Memory.CELL, several_percent=0)
TRACE = synthetic_sessions(8, 1, 1, LOAD)


def run(foresight: Foresight, signs: Signs) -> Result:
    (host,) = machine(1)
    return simulate([replace(with_pool(host, replace(host.pools[0], foresight=foresight)), signs=signs)], TRACE)


def test_a_sign_comes_so_long_before_each_gpu_cell_or_at_once() -> None:
    signs = Signs(foresight_ms=20_000)
    assert signs.before(1, "s", 0, 60_000, uses_gpu=True) == [40_000]
    assert signs.before(1, "s", 0, 5_000, uses_gpu=True) == [0]
    assert not signs.before(1, "s", 0, 60_000, uses_gpu=False)
    assert not Signs().before(1, "s", 0, 60_000, uses_gpu=True)


@pytest.mark.parametrize("percent", [0, 30, 70])
def test_so_many_percent_of_all_signs_are_false(percent: int) -> None:
    signs, gaps = Signs(foresight_ms=20_000, false_percent=percent), 4_000
    given = sum(len(signs.before(1, "s", cell, 60_000, uses_gpu=True)) for cell in range(gaps))
    assert abs(100 * (given - gaps) / given - percent) < 2


def test_what_is_drawn_in_one_gap_leaves_the_others_as_they_are() -> None:
    signs = Signs(foresight_ms=20_000, false_percent=70)
    drawn = [signs.before(1, "s", cell, 60_000, uses_gpu=True) for cell in range(5)]
    assert drawn == [signs.before(1, "s", cell, 60_000, uses_gpu=True) for cell in range(5)]
    assert drawn != [signs.before(2, "s", cell, 60_000, uses_gpu=True) for cell in range(5)]


def test_signs_save_waits_and_wasted_bytes_are_counted() -> None:
    without = run(Foresight.OFF, Signs())
    assert (without.early_resumes, without.vain_mib) == (0, 0)
    seeing = run(Foresight.DISPLACE, Signs(foresight_ms=20_000))
    assert seeing.early_resumes > 0
    assert seeing.waits.nonzero_percent() < without.waits.nonzero_percent()
    deceived = run(Foresight.DISPLACE, Signs(foresight_ms=20_000, false_percent=70))
    assert deceived.vain_mib > seeing.vain_mib
    ignoring = run(Foresight.OFF, Signs(foresight_ms=20_000, false_percent=70))
    assert ignoring.waits == without.waits
    assert ignoring.early_resumes == 0


def test_wrong_options_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, says in (
        (("--set", "false_signs=30"), "false_signs=30 requires foresight"),
        (
            ("--set", "foresight=20s", "--set", "false_signs=95"),
            "Expected `int` <= 90 - at `$.false_signs`",
        ),
        (("--set", "foresight=0s"), "foresight=0s is not valid; use a duration greater than 0, such as 20s"),
        (("--set", "foresight=soon"), "invalid duration 'soon'"),
    ):
        assert main(["simulate", "--users", "1", *arguments]) != 0
        assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
