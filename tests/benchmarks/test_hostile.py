"""Each bound of the benchmark can be broken, and each attack can be made."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.benchmarks.hostile import Result, broken
from tests.support.attacks import ATTACKS
from tests.support.hostile import Figures, Service, attacking, service

IDLE = Figures(ping_s=[0.001, 0.001, 0.5], cell_s=[0.1], failed={}, wrong=0, swaps=2)
FINE = replace(IDLE, ping_s=[0.010], cell_s=[2.3])
RESULT = Result(
    attack="none", idle=IDLE, under=FINE, idle_mib=50, under_mib=100, restarted=False, grown_bytes=0, got=[]
)
SMALL = {"environ": 1, "environ-lease": 1, "iopub": 1000}


@pytest.mark.parametrize(
    ("worse", "bounds"),
    [
        (RESULT, []),
        (replace(RESULT, under=replace(FINE, ping_s=[0.011])), ["ping"]),
        (replace(RESULT, under=replace(FINE, cell_s=[2.4])), ["cell"]),
        (replace(RESULT, under=replace(FINE, wrong=1)), ["bytes"]),
        (replace(RESULT, under_mib=101, restarted=True), ["memory", "restart"]),
    ],
)
def test_each_bound_can_be_broken(worse: Result, bounds: list[str]) -> None:
    assert broken(worse) == bounds


@pytest.fixture(scope="module")
def broker() -> Iterator[Service]:
    with service() as one:
        yield one


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_can_be_made(broker: Service, name: str) -> None:
    small = f"{name}:{SMALL.get(name, 2)}"
    before = broker.identity()
    with attacking(broker.socket, small) as got:
        pass
    assert got[small]["begun"]
    assert broker.identity() == before
