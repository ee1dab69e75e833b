"""A user's requests are charged to that user, who must wait after too many; no other user waits."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.broker import cost
from fractional_gpu.broker.cost import EXEMPT, Account, Costs, metered
from fractional_gpu.broker.lanes import PAYER, Lane
from fractional_gpu.protocol.limits import COST_BURST_S, COST_RESERVE_S, COST_SHARE, COST_SHARE_OF_ALL

pytestmark = pytest.mark.promise("hostile")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def spin(seconds: float) -> None:
    """Compute for this long, by the thread's own clock."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


@given(charges=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 20)), max_size=60))
async def test_an_account_gets_its_share_and_one_burst_and_no_more(charges: list[tuple[float, float]]) -> None:
    clock = Clock()
    with patch.object(cost, "time", SimpleNamespace(monotonic=clock)):
        account = Account("user x")
        spent_s = 0.0
        for cost_s, pause_s in charges:
            clock.now_s += pause_s
            await asyncio.sleep(0)  # another iteration of the loop
            if account.take_turn():
                account.charge(cost_s)
                spent_s += cost_s
            last_s = max((cost_s for cost_s, _ in charges), default=0.0)
            assert spent_s <= COST_BURST_S + clock.now_s * COST_SHARE + last_s + 1e-6


async def test_many_who_are_overdrawn_share_what_one_or_two_could_have() -> None:
    costs = Costs()
    accounts = [costs.of_user(uid) for uid in range(70_000, 70_010)]
    for account in accounts:
        account.charge(COST_BURST_S + 0.1)
    assert accounts[0].share == COST_SHARE
    waiting = [asyncio.create_task(account.turn()) for account in accounts]
    await asyncio.sleep(0)
    assert sum(account.share for account in accounts) == pytest.approx(COST_SHARE_OF_ALL)
    costs.release()
    await asyncio.gather(*waiting)
    assert accounts[0].share == COST_SHARE


async def test_those_that_wait_get_their_turns_in_order_and_one_at_a_time() -> None:
    account = Account("user x")
    account.charge(COST_BURST_S + 0.01)
    order: list[int] = []

    async def ask(number: int) -> None:
        await account.turn()
        assert account.left_s > 0, "the one before was not charged yet"
        order.append(number)
        account.charge(0.02)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(ask(number))
    assert order == [0, 1, 2, 3, 4]
    assert account.left_s < 0


async def test_one_who_asks_for_much_at_once_waits_behind_one_who_asks_for_little() -> None:
    costs, order = Costs(), list[str]()

    async def ask(account: Account) -> None:
        await account.turn()
        order.append(account.name)

    much, little = costs.of_user(70_000), costs.of_user(70_001)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for account in (*[much] * 100, little):
            group.create_task(ask(account))
    assert order.index(little.name) < 10
    assert order.count(much.name) == 100
    assert not much._crowd, "it was not overdrawn"


async def test_what_others_may_wait_for_has_a_reserve_of_its_own() -> None:
    account = Account("user x")
    account.charge(COST_BURST_S + COST_RESERVE_S / 2)
    assert not account.take_turn()
    assert account.take_turn(reserved=True)
    assert not account.is_spent
    account.charge(COST_RESERVE_S)
    assert not account.take_turn(reserved=True)
    waits, urgent = asyncio.create_task(account.turn()), asyncio.create_task(account.turn(reserved=True))
    recovered = asyncio.Event()
    account.when_recovered(recovered.set)
    async with asyncio.timeout(30):
        await urgent
        await recovered.wait()
        assert not waits.done()
        account.release()
        await waits


def test_administrators_never_wait() -> None:
    EXEMPT.charge(1e9)
    assert EXEMPT.take_turn()
    assert not EXEMPT.is_spent


def test_each_user_and_each_seat_has_an_account_that_stays_while_it_is_in_debt() -> None:
    costs = Costs()
    mine = costs.of_user(1000)
    assert costs.of_user(1000) is mine
    assert costs.of_user(1001) is not mine
    assert costs.of_seat("1000", "ada") is not mine
    mine.charge(3.0)
    for uid in range(2000, 5000):
        costs.of_user(uid)
    assert costs.of_user(1000) is mine
    assert len(costs._accounts) < 2000


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
async def test_the_steps_of_work_are_charged_and_not_its_waits(how: str) -> None:
    charges: list[float] = []

    async def inner(waiting: asyncio.Event) -> str:
        spin(0.01)
        try:
            await waiting.wait()
        finally:
            spin(0.01)
        if how == "raises":
            raise ValueError(how)
        return how

    waiting = asyncio.Event()
    task = asyncio.create_task(metered(inner(waiting), charges.append))
    begun_s = time.thread_time()
    await asyncio.sleep(0)
    assert 0.01 <= sum(charges) <= time.thread_time() - begun_s
    if how == "is cancelled":
        task.cancel()
    waiting.set()
    await asyncio.wait([task])
    assert 0.02 <= sum(charges) <= time.thread_time() - begun_s
    if how == "is cancelled":
        assert task.cancelled()
    elif how == "raises":
        assert isinstance(task.exception(), ValueError)
    else:
        assert task.result() == how


async def test_blocking_work_is_charged_to_the_task_that_asks_for_it() -> None:
    lane, charges = Lane(1, "test"), list[float]()

    async def asks(charge: Callable[[float], None]) -> None:
        PAYER.set(charge)
        await lane.run(spin, 0.01)

    await asyncio.create_task(asks(charges.append))
    await lane.run(spin, 0.01)  # outside any task
    await asyncio.sleep(0)
    assert len(charges) == 1
    assert charges[0] >= 0.01
    assert lane._threads is not None
    lane._threads.shutdown()
