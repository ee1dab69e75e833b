"""The recorder notes which neighbours each cell had and how long it took, so that slowdowns are learnt from real overlaps."""

import pytest

from fractional_gpu.core.events import LeaseReleased
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.forecasts.outcomes import ForecastError
from fractional_gpu.core.model import Span
from tests.core.driving import Hand
from tests.core.test_compute import SMALL, hand, seen

pytestmark = pytest.mark.promise("forecasts")


def slowdowns(world: Hand) -> ForecastError:
    world.arbiter.run_deferred_work()
    return next(one for one in world.arbiter.forecasts.errors() if one.what == "slowdown")


def forecast(world: Hand, model_milli: int = 1_500) -> Span:
    world.arbiter.run_deferred_work()
    return world.arbiter.forecasts.slowdown_span("H", 1, model_milli)


def cell(world: Hand, lasts_ms: int, *, beside: bool) -> None:
    """Run a cell of "a", alone or during a longer cell of "b"."""
    if beside:
        world.run("b", SMALL)
    world.run("a", SMALL)
    world.wait(lasts_ms)
    world.rest("a")
    if beside:
        world.rest("b")


def two_kernels(alone: int) -> Hand:
    """Return two kernels on one device; the first has already run this many cells alone."""
    world = hand("d0")
    for name in ("b", "a"):
        world.idle(name, SMALL)
    for number in range(alone):
        cell(world, 10_000 + 100 * (number % 3), beside=False)
    return world


def test_cells_beside_others_are_compared_with_those_alone() -> None:
    world = two_kernels(8)
    for _ in range(12):
        cell(world, 30_000, beside=True)
    assert slowdowns(world).count == 12
    assert forecast(world).expected_ms > 2_000, "they took three times as long, whatever the model says"
    assert forecast(world).high_ms >= 2_900


def test_cells_that_never_ran_alone_teach_nothing() -> None:
    world = two_kernels(3)
    for _ in range(5):
        cell(world, 30_000, beside=True)
    assert slowdowns(world).count == 0
    assert forecast(world) == Forecasts().slowdown_span("H", 1, 1_500)


def test_a_cell_that_began_alone_and_met_another_for_most_of_its_time_is_not_taken_as_alone() -> None:
    world = two_kernels(0)
    for _ in range(6):
        world.run("a", SMALL)
        world.wait(1_000)
        world.run("b", SMALL)
        world.wait(40_000)
        world.rest("a")
        world.rest("b")
    cell(world, 30_000, beside=True)
    assert slowdowns(world).count == 0


def test_a_slowdown_is_said_with_what_was_learnt_and_its_bounds() -> None:
    world = two_kernels(8)
    for _ in range(12):
        cell(world, 30_000, beside=True)
    world.run("b", SMALL)
    world.run("a", SMALL)
    for name in ("a", "b"):
        seen(world, name, 400)
    told = world.arbiter.slowdown("a")
    assert told.milli > 1_400, "together they need less than the device, and yet took longer"
    assert told.low_milli <= told.milli <= told.high_milli
    assert f"({told.low_milli / 1000:.1f} to {told.high_milli / 1000:.1f})" in told.sentence


@pytest.mark.parametrize("busy", [True, False])
def test_nothing_of_a_lease_is_kept_after_its_end(*, busy: bool) -> None:
    world = two_kernels(6)
    if busy:
        world.run("a", SMALL)
    world.send(LeaseReleased(at_ms=world.now, lease_id="a"))
    world.arbiter.run_deferred_work()
    assert "a" not in world.arbiter.forecasts.alone
