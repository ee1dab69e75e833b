"""Seeded random worlds: every law after every event. More seeds: `python -m tests.core.seeds --seeds 10000`."""

from collections import Counter

import pytest

from fractional_gpu.core.model import LeaseState
from tests.core.seeds import main, run_seed
from tests.core.simulation import simulate

pytestmark = pytest.mark.promise("laws", "workload-seat")


def test_every_law_holds_in_random_worlds() -> None:
    moves = Counter[str]()
    for seed in range(10):
        _, broken, counts = run_seed(seed, events=2_000)
        assert broken == "", f"seed {seed}: {broken}"
        moves.update(counts)
    wild = {*LeaseState, "host-memory.added", "host-memory.not-added", "suspend.aborted"}
    assert wild <= set(moves), "some state was never entered, or no estimate was wrong: these worlds are too tame"


def test_the_same_seed_tells_the_same_story() -> None:
    assert simulate(3, 300).made == simulate(3, 300).made


def test_the_command_reports_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--events", "100", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.startswith("2 seeds of 100 events in ")
