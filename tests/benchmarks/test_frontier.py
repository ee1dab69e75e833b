"""Where `auto` stands against fixed idle times: the figures come from the runs, and luck is no verdict."""

import json
import xml.etree.ElementTree as ET
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from fractional_gpu.simulator import TraceError
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks import frontier
from tests.benchmarks.frontier import AUTO, FIXED, HELD, LATE, RULES, SITUATIONS, WAIT, Figures, verdict
from tests.benchmarks.simulated import GOAL, machine

BUILDERS = frontier.Task("builders", 1, 2)


def figures(**points: tuple[float, float]) -> Figures:
    """One seed: held hours and waits of some rules (`_1h` stands for `1h`); all others hold and wait most."""
    named = {name.lstrip("_").replace("_", "-"): point for name, point in points.items()}
    found = {}
    for name in RULES:
        held, wait = named.get(name, (100.0, 100.0))
        found[name] = {"devices": 1.0, HELD: held, WAIT: wait, "mean wait, s": wait, LATE: wait, "waited, %": 0.0}
    return found


@dataclass(frozen=True)
class Measured:
    """What the command said and wrote of the users of `BUILDERS`."""

    shown: str
    found: Path
    svg: Path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("frontier")
    svg, found, shown = folder / "curves.svg", folder / "found.json", StringIO()
    arguments = ["--seeds", "1", "--users", "2", "--jobs", "1", "--load", "builders", "--svg", str(svg)]
    with redirect_stdout(shown):
        assert frontier.main([*arguments, "--json", str(found)]) == 0
    return Measured(shown.getvalue(), found, svg)


def test_figures_are_those_of_the_runs(measured: Measured) -> None:
    (found,) = json.loads(measured.found.read_text())["runs"]["builders"]
    trace, memory_mib = frontier.trace_of(BUILDERS)
    assert list(found) == list(SITUATIONS)
    for situation, rules in found.items():
        assert list(rules) == list(RULES)
        devices = int(rules[AUTO]["devices"])
        for name in ("0s", "on-demand", AUTO):
            run = simulate(machine(devices, RULES[name], memory_mib=memory_mib), trace)
            assert rules[name][HELD] == run.held / 3.6e9, (situation, name)
            assert rules[name][WAIT] == run.waits.percentile_ms(95) / 1000
    assert found["enough"]["0s"][HELD] < found["enough"]["on-demand"][HELD]
    assert found["enough"]["0s"][WAIT] > found["enough"]["on-demand"][WAIT]


def test_there_are_enough_devices_just_enough_or_too_few() -> None:
    task = frontier.Task("published", 1, 3)
    trace, memory_mib = frontier.trace_of(task)
    enough, just, tight = frontier.devices_for(trace, memory_mib).values()
    assert enough > just > tight
    assert not run_baseline("static-fraction", machine(enough), trace).missed(GOAL)
    assert not simulate(machine(just, FIXED["on-demand"]), trace).missed(GOAL)
    assert simulate(machine(just - 1, FIXED["on-demand"]), trace).missed(GOAL)


def test_a_rule_that_a_fixed_time_beats_in_both_is_below_the_frontier() -> None:
    done = [figures(auto=(50 + seed, 5), _1h=(40, 4 - seed / 100)) for seed in range(20)]
    found = verdict(done, AUTO)
    assert (found.place, found.beaten_by) == ("below", ("1h",))
    assert "1h" not in found.beats
    assert "auto is below the frontier of p95 wait; BEATEN in both by 1h" in found.sentence()


def test_a_rule_that_is_better_in_one_is_on_the_frontier() -> None:
    ends = {"_30m": (10.0, 20.0), "_1h": (30.0, 10.0)}
    done = [figures(auto=(20, 15 + (-1) ** seed), **ends) for seed in range(20)]
    found = verdict(done, AUTO)
    assert (found.place, found.beaten_by, found.between) == ("on", (), ("30m", "1h"))
    assert found.above_curve == 0


@pytest.mark.parametrize(("wait", "place"), [(12.0, "above"), (17.0, "below")])
def test_a_rule_is_compared_with_the_curve_between_two_fixed_times(wait: float, place: str) -> None:
    ends = {"_30m": (10.0, 20.0), "_1h": (30.0, 10.0)}
    done = [figures(auto=(20, wait + seed / 1000), **ends) for seed in range(20)]
    found = verdict(done, AUTO)
    assert (found.place, found.beaten_by) == (place, ())
    assert found.above_curve == pytest.approx(wait - 15, abs=0.02)


def test_what_may_be_luck_is_said_and_no_verdict() -> None:
    done = [figures(auto=(50, 5), _1h=(40, 4 if seed % 3 else 6), _3h=(60, 5)) for seed in range(9)]
    found = verdict(done, AUTO)
    assert (found.beaten_by, found.perhaps_by) == ((), ("1h",))
    assert found.place == "on"
    assert "medians of 1h are better in both, which may be luck" in found.sentence()


def test_equals_are_no_verdict() -> None:
    found = verdict([figures(auto=(100, 100))] * 20, AUTO)
    assert (found.place, found.beaten_by, found.beats) == ("on", (), ())


def test_a_rule_that_holds_least_of_all_and_waits_least_is_not_compared_with_a_curve() -> None:
    found = verdict([figures(auto=(50, 5))] * 20, AUTO)
    assert found.between is None
    assert found.beats == tuple(FIXED)
    assert found.place == "on"


def test_lateness_is_compared_by_itself() -> None:
    done = [figures(auto=(50, 5), _1h=(40, 4)) for _ in range(20)]
    late = [{name: {**row, LATE: 1.0 if name == AUTO else 2.0} for name, row in one.items()} for one in done]
    assert verdict(late, AUTO, WAIT).beaten_by == ("1h",)
    assert verdict(late, AUTO, LATE).beaten_by == ()


def test_tables_verdicts_and_curves_come_out(
    measured: Measured, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = measured.shown
    for situation in SITUATIONS:
        assert f"builders, {situation}, 1 seeds:" in shown
        assert f"| builders, {situation} |" in shown
    assert shown.count("- auto is on the frontier of p95 wait") == 3
    picture = measured.svg.read_text()
    titles = [text.text for text in ET.fromstring(picture).iter() if text.get("class") == "title"]  # noqa: S314 - our own
    assert len([title for title in titles if title and title.startswith("builders, ")]) == 3
    again = tmp_path / "again.svg"
    assert frontier.main(["--read", str(measured.found), "--svg", str(again)]) == 0
    assert again.read_text() == picture
    assert capsys.readouterr().out == shown


def test_pods_need_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["--load", "pods"], "--load pods needs a list of pods; name it with --pods FILE"),
        (["--load", "pods", "--pods", str(tmp_path / "absent.csv")], "absent.csv cannot be read"),
        (["--seeds", "0"], "--seeds 0 is not allowed; a number from 1 on is"),
    ):
        with pytest.raises(SystemExit) as stopped:
            frontier.main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(TraceError, match="name it with --pods FILE"):
        frontier.trace_of(frontier.Task("pods", 1, 1))
