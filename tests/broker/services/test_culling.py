"""Which kernels are ended for being idle or for the host memory that they fill."""

import dataclasses
from typing import Any

import pytest

from fractional_gpu.broker.services.culling import CullRule, to_cull
from fractional_gpu.core.model import LeaseState, LeaseView
from tests.core.driving import Hand

pytestmark = pytest.mark.promise("culling")

DAY_MS = 86_400_000
BUDGET_MIB = 1_000
NEVER = CullRule(after_ms=None, above_percent=100, warning_ms=0)
WEEK = dataclasses.replace(NEVER, after_ms=7 * DAY_MS)
SCARCE = dataclasses.replace(NEVER, above_percent=50)


@pytest.fixture(scope="module")
def view() -> LeaseView:
    hand = Hand()
    hand.run("a")
    return dataclasses.replace(hand.view("a"), busy=False, last_active_ms=0)


def kernel(view: LeaseView, name: str, idle_since_ms: int, saved_mib: int = 300, **changes: Any) -> LeaseView:  # noqa: ANN401
    state = LeaseState.SUSPENDED if saved_mib else LeaseState.RESIDENT
    fields: dict[str, Any] = {"state": state, "last_active_ms": idle_since_ms, "saved_mib": saved_mib, **changes}
    return dataclasses.replace(view, spec=dataclasses.replace(view.spec, lease_id=name), **fields)


def culled(views: list[LeaseView], rule: CullRule, at_ms: int = 7 * DAY_MS) -> list[str]:
    return list(to_cull(views, at_ms, BUDGET_MIB, rule))


def test_a_kernel_that_was_idle_for_the_whole_time_is_due_suspended_or_not(view: LeaseView) -> None:
    views = [kernel(view, "later", 1), kernel(view, "saved", 0), kernel(view, "resident", 0, 0)]
    assert culled(views, WEEK) == ["resident", "saved"]
    assert culled(views, NEVER) == []


@pytest.mark.parametrize(
    "changes",
    [{"busy": True}, {"pinned_until_ms": 8 * DAY_MS}, {"state": LeaseState.NO_CONTEXT}, {"state": LeaseState.RESUMING}],
)
def test_a_kernel_that_is_used_or_pinned_or_holds_nothing_is_not_due(view: LeaseView, changes: dict[str, Any]) -> None:
    assert culled([kernel(view, "a", 0, **changes)], WEEK) == []


def test_a_claim_ends_by_itself(view: LeaseView) -> None:
    claim = dataclasses.replace(view, spec=dataclasses.replace(view.spec, claim_ms=1))
    assert culled([kernel(claim, "a", 0, 0)], WEEK) == []


def test_the_longest_idle_end_until_enough_host_memory_is_free(view: LeaseView) -> None:
    views = [kernel(view, "new", 3), kernel(view, "old", 1), kernel(view, "middle", 2), kernel(view, "resident", 0, 0)]
    assert culled(views, SCARCE) == ["old", "middle"], "300 of 1000 MiB remain"
    assert culled(views[:1], SCARCE) == []
    why = to_cull(views, DAY_MS, BUDGET_MIB, SCARCE)["old"]
    assert (
        why
        == "it has been idle for 23 h 59 min, and suspended kernels fill over 50 % of the host memory allowed for them"
    )


def test_what_ends_for_its_age_frees_host_memory_too(view: LeaseView) -> None:
    views = [kernel(view, "old", 0), kernel(view, "new", DAY_MS)]
    assert culled(views, dataclasses.replace(SCARCE, after_ms=7 * DAY_MS)) == ["old"]
