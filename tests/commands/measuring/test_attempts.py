"""When a step is tried again, and when its share is given up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.measuring import measure as measure_module
from fractional_gpu.commands.measuring.measure import Measurement, Plan
from fractional_gpu.commands.measuring.study import LEAST_ROUNDS, Sample, Setting
from fractional_gpu.commands.measuring.tenants import DisturbedError, NoSpareRoomError, TenantError
from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.protocol.errors import NoRoomError
from fractional_gpu.protocol.status import HostStatus
from tests.commands.pictures import a_host

ALONE, HALF, QUARTER = Setting(1000, 1), Setting(500, 2), Setting(250, 4)
PLAN = Plan(
    command=["program"],
    pool="default",
    fractions_milli=None,
    copies=None,
    neighbours=[],
    memory_mib=None,
    within_s=1000.0,
    interval=0.05,
    most_slower=1.1,
    may_wait=False,
)
Outcome = Callable[[Setting, int], Exception | None]


class World:
    """Clock, broker and steps: `outcome` says what the n-th attempt of a setting raises."""

    def __init__(self, outcome: Outcome, offered: Sequence[int] = (1000, 500, 250)) -> None:
        self.outcome = outcome
        self.offered = list(offered)
        self.now_s = 0.0
        self.attempts: list[Setting] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def status(self) -> HostStatus:
        return structs.replace(a_host(), pools={"default": self.offered})

    def step(self, setting: Setting, limit_s: float) -> Sample:
        assert limit_s <= PLAN.within_s
        self.now_s += 2.0
        self.attempts.append(setting)
        if error := self.outcome(setting, self.attempts.count(setting)):
            raise error
        return Sample(unit_s=0.1, latencies_s=[0.1], measured=setting.tenants)


Measure = Callable[[Outcome], tuple[Measurement, World]]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    def run(outcome: Outcome) -> tuple[Measurement, World]:
        world = World(outcome)
        monkeypatch.setattr(measure_module, "time", world)
        monkeypatch.setattr(Measurement, "_step", world.step)
        measurement = Measurement(PLAN, cast("BrokerClient", world), tmp_path, lambda _: None, _began_s=0.0)
        measurement.run()
        return measurement, world

    return run


def known(measurement: Measurement) -> list[Setting]:
    return [one.setting for one in measurement.study.findings() if one.slower is not None]


@pytest.mark.parametrize("error", [NoSpareRoomError("no device has room"), NoRoomError("the seat is full")])
def test_where_there_is_no_room_at_first_that_is_the_answer_at_once(measured: Measure, error: Exception) -> None:
    attempts = []

    def outcome(setting: Setting, _count: int) -> Exception:
        attempts.append(setting)
        return error

    with pytest.raises(CommandError, match=f"could not measure: {error}; try again later"):
        measured(outcome)
    assert attempts == [ALONE]


def test_beside_others_who_work_until_the_end_that_is_the_answer(measured: Measure) -> None:
    with pytest.raises(CommandError, match="could not measure: ada worked"):
        measured(lambda _, __: DisturbedError("ada worked"))


def test_a_trial_that_others_disturb_is_tried_again(measured: Measure) -> None:
    measurement, _ = measured(lambda _, count: DisturbedError("ada worked") if count < 5 else None)
    assert known(measurement) == [ALONE, HALF, QUARTER]


@pytest.mark.parametrize(
    "error", [DisturbedError("ada worked"), NoRoomError("the seat is full"), TenantError("status 1")]
)
def test_what_may_pass_is_tried_again_at_once(measured: Measure, error: Exception) -> None:
    measurement, world = measured(lambda setting, count: error if (setting, count) == (HALF, 3) else None)
    assert known(measurement) == [ALONE, HALF, QUARTER]
    assert world.attempts.count(HALF) == LEAST_ROUNDS + 1
    assert measurement.disturbed == ({} if isinstance(error, TenantError) else {str(error): 1})


def test_without_a_measurement_alone_no_further_step_is_made(measured: Measure) -> None:
    def outcome(setting: Setting, count: int) -> Exception | None:
        return DisturbedError("ada worked") if setting == ALONE and 1 < count < 60 else None

    measurement, world = measured(outcome)
    assert set(world.attempts[:60]) == {ALONE}
    assert known(measurement) == [ALONE, HALF, QUARTER]


@pytest.mark.parametrize(
    ("offered", "plan", "fractions"),
    [
        ([1000, 250], PLAN, {1000, 250}),
        ([1000, 250], replace(PLAN, fractions_milli=[250]), {250}),
        ([], PLAN, {1000, 750, 500, 250, 125}),
        ([], replace(PLAN, fractions_milli=[333]), {333}),
        ([], replace(PLAN, copies=[1]), {1000, 500}),
    ],
)
def test_the_shares_are_those_on_offer_or_asked_for(
    offered: list[int], plan: Plan, fractions: set[int], tmp_path: Path
) -> None:
    world = cast("BrokerClient", World(lambda *_: None, offered))
    study = Measurement(plan, world, tmp_path, lambda _: None).study
    assert {one.fraction_milli for one in study.settings} == fractions


def test_a_share_that_is_not_on_offer_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    world = cast("BrokerClient", World(lambda *_: None))
    with pytest.raises(
        UsageError, match=r"--fractions has 1/5, but pool 'default' offers 1, 1/2, 1/4; choose from these"
    ):
        Measurement(replace(PLAN, fractions_milli=[250, 200]), world, tmp_path, lambda _: None)
