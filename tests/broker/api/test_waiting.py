"""What the broker tells a waiting cell: what it waits for, by name if allowed, and again when a forecast has expired."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.services import residency
from fractional_gpu.broker.services.status import lease_status, view_of
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.core import suspend as fairness
from fractional_gpu.core.events import Tick
from fractional_gpu.core.model import TicketView
from fractional_gpu.protocol.messages import AcquireRequest, LeaseReply, Progress, ProgressKind
from tests.broker.api.test_declined import resident
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker, started_for
from tests.support.waiting import until

pytestmark = pytest.mark.promise("overdue")


@contextmanager
def kernel(live: LiveBroker, label: str, milli: int = 1000) -> Iterator[LeaseReply]:
    """A kernel; it gets the whole device by default."""
    lease = live.lease(fraction_milli=milli, label=label)
    with started_for(lease.lease_id) as process:
        answer = live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
        assert answer.status == 200, answer
        yield lease


@contextmanager
def acquiring(live: LiveBroker, lease: LeaseReply) -> Iterator[Iterator[Progress]]:
    with BrokerClient(live.socket, token=lease.token, timeout_s=DEADLINE_S) as client:
        stream = client.acquire(lease.lease_id, AcquireRequest(wait_ms=60_000))
        with closing(stream):
            yield stream


@contextmanager
def running(live: LiveBroker, label: str, milli: int = 1000) -> Iterator[LeaseReply]:
    """A kernel that runs a cell: it has the device, or its fraction of it."""
    with kernel(live, label, milli) as lease, acquiring(live, lease) as lines:
        assert [line.kind for line in lines][-1] == ProgressKind.GRANTED
        yield lease


def why(live: LiveBroker, lease: LeaseReply) -> str:
    """Return the reason in a waiting kernel's status."""
    body: dict[str, Any] = live.call("GET", f"/v1/leases/{lease.lease_id}").body
    assert body["position"] == 1
    sentence: str = body["sentence"]
    return sentence.partition("device; ")[2]


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


def test_a_waiting_cell_is_told_which_notebook_is_pinned_and_for_how_long(live: LiveBroker) -> None:
    with running(live, "tenant-b.ipynb") as first, kernel(live, "mine.ipynb") as second:
        assert live.call("POST", f"/v1/leases/{first.lease_id}/pin", {"duration_ms": 3_600_000}).status == 200
        with acquiring(live, second) as lines:
            told = next(lines)
            assert re.search(
                r"tenant-b\.ipynb is running a cell and is pinned for 1 h more "
                rf"\(`jupyter gpu unpin {first.lease_id[:8]}` ends it\)$",
                told.sentence,
            ), told
            assert why(live, second) == told.sentence.partition("device; ")[2]


def test_use_counts_as_measured_until_a_cell_begins_or_ends(live: LiveBroker) -> None:
    """The last measurement misses the new allocation, so 0 MiB would be wrong."""
    with ExitStack() as stack:
        lease = resident(live, stack)
        mine = live.broker.kernels[lease.lease_id]

        async def become(*, busy: bool) -> None:
            mine.measurement.is_fresh = True  # as the sampler does
            assert lease_status(live.broker, mine, view_of(live.broker, mine)).measured
            mine.requests.waiters = int(busy)
            live.broker.sync_busy_state(mine)

        for busy in (True, False):
            live.on_loop(partial(become, busy=busy))
            body = live.call("GET", f"/v1/leases/{lease.lease_id}").body
            assert (body["busy"], body["measured"]) == (busy, False)


def test_a_cell_at_its_closed_gate_is_told_for_how_long_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel alone cannot make room: the other half of the device stays busy for ever, and nothing else ends the wait."""
    monkeypatch.setattr(fairness, "_MIN_GATE_WAIT_MS", 3_600_000)
    pool = {"devices": "all", "min_residency": 0, "min_residency_swaps": 0, "preempt": "never"}
    with (
        live_broker(pools={"default": pool}) as live,
        running(live, "busy.ipynb", 500),
        running(live, "mine.ipynb", 500) as mine,
        kernel(live, "large.ipynb") as large,
        acquiring(live, large) as waits,
    ):
        assert next(waits).kind == ProgressKind.WAITING
        with acquiring(live, mine) as lines:
            told = next(lines)
            assert (told.kind, told.reason) == (ProgressKind.WAITING, "wait.turn")
            assert told.expected_ms is not None
            assert (told.low_ms, told.high_ms) == (0, told.expected_ms)
            assert 0 < told.expected_ms <= 3_600_000
            status = live.call("GET", f"/v1/leases/{mine.lease_id}").body
            assert status["reason"] == "wait.turn"
            assert status["sentence"] == told.sentence
            assert 0 < status["expected"]["expected_ms"] <= told.expected_ms


@pytest.mark.parametrize("by_time", [True, False], ids=["when time alone changes it", "when another reader sees it"])
def test_when_the_order_changes_every_waiting_cell_is_told_its_new_place(
    monkeypatch: pytest.MonkeyPatch, *, by_time: bool
) -> None:
    monkeypatch.setattr(residency, "_look_again_s", lambda _told: 3_600.0)
    with (
        live_broker(pools={"default": {"devices": "all", "preempt": "never"}}) as live,
        running(live, "busy.ipynb"),
        kernel(live, "first.ipynb") as first,
        kernel(live, "second.ipynb") as second,
        acquiring(live, first) as lines_of_first,
        acquiring(live, second) as lines_of_second,
    ):
        assert next(line.position for line in lines_of_first) == 1
        assert next(line.position for line in lines_of_second) == 2
        tickets = live.broker.arbiter.tickets

        def overtaken(pool: str, at_ms: int | None = None) -> list[TicketView]:
            return [replace(view, position=3 - (view.position or 0)) for view in reversed(tickets(pool, at_ms))]

        async def let_time_pass() -> None:
            live.broker.dispatch(Tick(at_ms=now_ms()))

        monkeypatch.setattr(live.broker.arbiter, "tickets", overtaken)
        if by_time:
            live.on_loop(let_time_pass)
        else:
            until(lambda: live.call("GET", f"/v1/leases/{second.lease_id}").body["position"] == 1, "it has overtaken")
        assert next(line.position for line in lines_of_second if line.position != 2) == 1
        assert next(line.position for line in lines_of_first if line.position != 1) == 2
