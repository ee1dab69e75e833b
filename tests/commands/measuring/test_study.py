"""What a study measures, when it stops, and that its intervals contain the truth as often as claimed, with noise and with neighbours."""

import math
import random

import pytest

from fractional_gpu.commands.measuring.study import (
    LEAST_ROUNDS,
    Finding,
    Sample,
    Setting,
    Study,
    right_share,
    settings_of_fractions,
)
from fractional_gpu.core.time_slicing import slowed_milli, stretch_milli
from fractional_gpu.stats import Estimate

pytestmark = pytest.mark.promise("measure")

OFFERED = [125, 250, 500, 1000]
__all__ = ["holding"]

MOST_SLOWER = 1.1
MOST_ROUNDS = 40  # a time limit


def truth(setting: Setting, use_milli: int) -> float:
    """How much longer a unit takes next to equal neighbours than alone, by the model of the simulated device."""
    return slowed_milli(use_milli, stretch_milli([use_milli] * setting.tenants)) / 1000


class Machine:
    """A simulated device with noise: of each step, of each unit, with a drift, and with other tenants that come and go."""

    def __init__(
        self, seed: int, use_milli: int, *, others: bool = False, noise: float = 0.03, skewed: str = ""
    ) -> None:
        self.draw = random.Random(seed)
        self.use_milli, self.others, self.noise, self.skewed = use_milli, others, noise, skewed
        self.drift = 1.0
        self.slow_steps = 0  # left of the time in which another tenant works here

    def step(self, setting: Setting) -> Sample:
        self.drift *= 1 + self.draw.gauss(0, 0.01)
        if self.others and not self.slow_steps and self.draw.random() < 0.06:
            self.slow_steps = self.draw.randint(1, 4)
        self.slow_steps = max(0, self.slow_steps - 1)
        slow = 1.3 if self.slow_steps else 1.0
        noise = self.draw.expovariate(1) - math.log(2) if self.skewed else self.draw.gauss(0, 1)
        if self.skewed == "beside others only" and setting.tenants == 1:
            noise = 0.0
        middle_s = 0.05 * truth(setting, self.use_milli) * self.drift * slow * math.exp(self.noise * noise)
        times_s = [middle_s * math.exp(self.draw.gauss(0, 0.1)) for _ in range(12)]
        return Sample(unit_s=sum(times_s) / len(times_s), latencies_s=times_s, measured=setting.tenants)


def studied(machine: Machine, *, interval: float = 0.05, rounds: int = MOST_ROUNDS) -> Study:
    baseline, *others = settings_of_fractions(OFFERED)
    study = Study(baseline, [baseline, *others], interval)
    while (steps := study.next_round()) and study.rounds < rounds:
        study.add({setting: machine.step(setting) for setting in steps})
    return study


def holding(*, noise: float, others: bool = False, skewed: str = "", seeds: int = 100) -> tuple[int, int]:
    """How many intervals hold the truth, and how many there are, over loads from none to all of the device."""
    inside = total = 0
    for seed in range(seeds):
        use_milli = 1 + seed * 1000 // seeds
        for found in answers(studied(Machine(seed, use_milli, others=others, noise=noise, skewed=skewed))):
            assert found.slower is not None
            total += 1
            inside += found.slower.low <= truth(found.setting, use_milli) <= found.slower.high
    return inside, total


def answers(study: Study) -> list[Finding]:
    return [one for one in study.findings()[1:] if one.slower is not None]


@pytest.mark.parametrize(
    ("noise", "others", "skewed"),
    [(0.003, False, ""), (0.03, False, ""), (0.003, True, ""), (0.03, True, ""), (0.03, False, "skewed")],
    ids=["little noise", "noise", "others come and go", "noise, and others come and go", "skewed noise"],
)
def test_the_interval_contains_the_truth_in_95_of_100_cases_although_it_stops_when_narrow(
    noise: float, others: bool, skewed: str
) -> None:
    inside, total = holding(noise=noise, others=others, skewed=skewed, seeds=60)
    assert total == 180
    assert inside >= 0.95 * total, f"{inside} of {total}"


@pytest.mark.parametrize("others", [False, True], ids=["noise", "others come and go"])
@pytest.mark.parametrize(("use_milli", "right_milli"), [(100, 125), (200, 250), (400, 500), (800, None)])
def test_the_right_share_is_found_in_19_of_20_seeds(use_milli: int, right_milli: int | None, others: bool) -> None:
    right = 0
    for seed in range(20):
        best = right_share(studied(Machine(seed, use_milli, others=others)).findings()[1:], MOST_SLOWER)
        right += (best.setting.fraction_milli if best is not None else None) == right_milli
    assert right >= 19


def test_what_is_too_noisy_is_not_known_and_no_wrong_share_is_named() -> None:
    for seed in range(15):
        study = studied(Machine(seed, 450, noise=0.6), rounds=8)
        assert right_share(study.findings()[1:], MOST_SLOWER) is None


def test_it_stops_when_all_is_narrow_enough_and_measures_no_longer_what_is() -> None:
    study = studied(Machine(3, 100, noise=0.001))
    assert study.rounds < MOST_ROUNDS
    assert study.next_round() == []
    baseline, *others = study.settings
    study = Study(baseline, [baseline, *others], 0.05)
    steady = Sample(unit_s=0.05, latencies_s=[0.05])
    for _ in range(LEAST_ROUNDS):
        study.add({**dict.fromkeys([baseline, others[0]], steady)})
    assert set(study.next_round()) == {baseline, *others[1:]}


def test_a_share_that_fails_is_measured_no_more_and_says_why() -> None:
    study = Study(Setting(1000, 1), [Setting(1000, 1), Setting(500, 2), Setting(250, 4)], 0.05)
    study.failed[Setting(250, 4)] = "out of memory"
    assert Setting(250, 4) not in study.next_round()
    assert study.findings()[2].why_not == "out of memory"
    assert study.findings()[2].suffices(MOST_SLOWER) is None


@pytest.mark.parametrize(
    ("low", "high", "said"), [(1.0, 1.09, True), (1.05, 1.2, None), (1.11, 1.3, False), (0.9, 1.1, True)]
)
def test_a_share_suffices_if_all_of_its_interval_does(low: float, high: float, said: bool | None) -> None:
    found = Finding(setting=Setting(250, 4), rounds=9, slower=Estimate((low + high) / 2, low, high))
    assert found.suffices(MOST_SLOWER) is said
