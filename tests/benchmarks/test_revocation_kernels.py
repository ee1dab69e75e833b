"""The benchmark of deadlines with real kernels: its orders and its sums; the kernels are in tests/e2e/test_revocation.py."""

from random import Random
from typing import cast

from tests.benchmarks.revocation_kernels import Held, Tally, orders, table
from tests.support.world import Notebook

NONE = cast("Notebook", None)  # no kernel is run here
THERE = [Held(NONE, "a", 64, 0), Held(NONE, "b", 16, 2), Held(NONE, "c", 32, 0, work_s=60.0)]


def test_each_order_has_every_kernel_once() -> None:
    found = orders(THERE, Random(1))
    assert [one.lease_id for one in found["smallest first"]] == ["b", "c", "a"]
    assert sorted(one.lease_id for one in found["random"]) == ["a", "b", "c"]


def test_shares_are_of_the_value_of_all_kernels() -> None:
    tally = Tally()
    tally.add(
        THERE, frozenset("b")
    )  # four of seven minutes: priority counts twice twofold, and a minute in addition to the work
    tally.add(THERE, frozenset("abc"))
    *_, line = table({(25, "ours"): tally})
    assert line == "| 25 % | ours | 79 % | 67 % |"
