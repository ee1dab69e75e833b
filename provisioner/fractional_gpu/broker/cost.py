"""Limits the load users can put on the broker. Each user has a single budget for all requests, so no user can monopolize the broker.

- An account belongs to a seat if a token or control group identifies one, and otherwise to a user. It is charged for the processor time the
  user's work takes on the event loop (`metered`) and in threads (`lanes.PAYER`), and for each request, message and byte. Elapsed time is
  not charged, so a slow machine does not cause overdrafts.
- An account is credited with `COST_SHARE` of a processor, and can save up to `COST_BURST_S`. While it is overdrawn, it waits: the broker
  reads only its requests' headers, and none of its kernels' messages. Waiting requests are served in order, and all waiting accounts share
  `COST_SHARE_OF_ALL`.
- Requests that others may be waiting for (an extension's answer, the end of a lease) are still served until the account owes
  `COST_RESERVE_S`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

from fractional_gpu.host.accounts import account_uid, user_name
from fractional_gpu.protocol.limits import COST_BURST_S, COST_RESERVE_S, COST_SHARE, COST_SHARE_OF_ALL

T = TypeVar("T")

_MOST_DEBT_S: Final = 5.0
_TURNS: Final = 2  # in one pass of the loop
_PAUSE_S: Final = 0.002  # between two turns of an overdrawn account, so that the first has been charged by then
_KEPT: Final = 1024  # accounts; full balances are forgotten beyond this number, which changes nothing


class Account:
    """One account, for use on the event loop. `name` identifies the payer in messages. If `exempt`, it pays nothing and never waits."""

    def __init__(self, name: str, *, crowd: "set[Account] | None" = None, exempt: bool = False) -> None:
        self.name = name
        self._crowd = set() if crowd is None else crowd  # the accounts that wait
        self._exempt = exempt
        self._left = COST_BURST_S
        self._at_s = time.monotonic()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reserved: deque[asyncio.Future[None]] = deque()
        self._paused: list[Callable[[], None]] = []
        self._turns = 0  # in this pass of the loop
        self._timer: asyncio.Handle | None = None

    @property
    def left_s(self) -> float:
        now_s = time.monotonic()
        self._left = min(COST_BURST_S, max(-_MOST_DEBT_S, self._left) + (now_s - self._at_s) * self.share)
        self._at_s = now_s
        return self._left

    @property
    def share(self) -> float:
        return min(COST_SHARE, COST_SHARE_OF_ALL / max(1, len(self._crowd)))

    @property
    def is_spent(self) -> bool:
        """Whether the account owes so much (`COST_RESERVE_S`) that nothing is read for it. Checked on every read, so it must be cheap."""
        return self._left < 0 and not self._exempt and self.left_s <= -COST_RESERVE_S

    @property
    def is_at_rest(self) -> bool:
        """Whether the account can be dropped without losing anything."""
        return self.left_s == COST_BURST_S and self._timer is None

    def charge(self, seconds: float) -> None:
        if not self._exempt:
            self._left -= seconds  # the next turn adds the credit earned since then

    def take_turn(self, *, reserved: bool = False) -> bool:
        if self._exempt:
            return True
        queue, floor_s = (self._reserved, -COST_RESERVE_S) if reserved else (self._waiting, 0.0)
        if queue or self.left_s <= floor_s:
            return False
        if self._turns == 0:
            asyncio.get_running_loop().call_soon(self._begin_round)
        elif self._turns == _TURNS:
            return False
        self._turns += 1
        return True

    def _begin_round(self) -> None:
        self._turns = 0

    async def turn(self, *, reserved: bool = False) -> None:
        """Wait for the account's turn. If cancelled, the caller loses its place in the queue."""
        if self.take_turn(reserved=reserved):
            return
        turn = asyncio.get_running_loop().create_future()
        (self._reserved if reserved else self._waiting).append(turn)
        self._set_timer()
        await turn

    def when_recovered(self, call: Callable[[], None]) -> None:
        self._paused.append(call)
        self._set_timer()

    def release(self) -> None:
        self._exempt = True
        for turn in (*self._reserved, *self._waiting):
            if not turn.done():
                turn.set_result(None)
        self._wake()

    def _set_timer(self) -> None:
        if self._timer is None:
            floor_s = -COST_RESERVE_S if self._reserved or self._paused else 0.0
            loop, debt_s = asyncio.get_running_loop(), floor_s - self.left_s
            if debt_s < 0:
                self._timer = loop.call_soon(self._wake)
                return
            self._crowd.add(self)
            self._timer = loop.call_later(max(_PAUSE_S, debt_s / self.share), self._wake)

    def _wake(self) -> None:
        """Wake one waiter if the balance allows it, and schedule the next check."""
        self._timer = None
        self._crowd.discard(self)
        if not self.is_spent:
            paused, self._paused = self._paused, []
            for call in paused:
                call()
        for queue, reserved in ((self._reserved, True), (self._waiting, False)):
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if queue and self.left_s > (-COST_RESERVE_S if reserved else 0.0):
                queue.popleft().set_result(None)
                break
        if self._reserved or self._waiting or self._paused:
            self._set_timer()


EXEMPT: Final = Account("an administrator", exempt=True)


class Costs:
    def __init__(self) -> None:
        self._accounts: dict[int | str, Account] = {}
        self._crowd: set[Account] = set()

    def of_user(self, uid: int) -> Account:
        uid = account_uid(uid)
        return self._accounts.get(uid) or self._new(uid, f"user {user_name(uid)}")

    def of_seat(self, seat_id: str, owner: str) -> Account:
        return self._accounts.get(seat_id) or self._new(seat_id, f"the seat of {owner}")

    def _new(self, key: int | str, name: str) -> Account:
        if len(self._accounts) >= _KEPT:
            self._accounts = {key: one for key, one in self._accounts.items() if not one.is_at_rest}
        account = self._accounts[key] = Account(name, crowd=self._crowd)
        return account

    def release(self) -> None:
        for account in self._accounts.values():
            account.release()


class _Metered:
    """An awaitable that runs a coroutine and calls `charge` with the processor time of each step."""

    def __init__(self, work: Coroutine[Any, Any, T], charge: Callable[[float], None]) -> None:
        self._work = work
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        while True:
            begun_s = time.thread_time()
            try:
                waits_for = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration as end:
                return end.value
            finally:
                self._charge(time.thread_time() - begun_s)
            thrown = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - the work handles the failure or cancellation
                thrown = error


async def metered(work: Coroutine[Any, Any, T], charge: Callable[[float], None]) -> T:
    """Run `work` and return its result, calling `charge` with the processor time of each step. Cancellation cancels the work."""
    result: T = await _Metered(work, charge)
    return result
