"""Kernels that outlive their seat: their leases are suspended, count against their user, pass to the next seat, or end."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from msgspec import to_builtins

from fractional_gpu.broker.api import lease_service
from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.host.process import identify
from fractional_gpu.protocol.messages import AcquireRequest, LeaseReply, LeaseRequest, ProgressKind
from fractional_gpu.protocol.seats import SeatProgress, SeatRequest
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker, started_for
from tests.support.world import until

pytestmark = pytest.mark.promise("live-seat")

POOLS: dict[str, Any] = {"default": {"wait_bound": "100%", "user_limits": {"fraction": "1/2"}}}


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker(seats_required=True, pools=POOLS) as live:
        yield live


def client_of(live: LiveBroker, token: str | None = None) -> SeatClient:
    return SeatClient(live.socket, timeout_s=DEADLINE_S, token=token)


def take(live: LiveBroker, **fields: Any) -> SeatProgress:  # noqa: ANN401 - SeatRequest's
    request = SeatRequest(**{"owner": "ada", "pool": "default", "fraction_milli": 500, **fields})
    with client_of(live) as client:
        return list(client.take_seat(request))[-1]


def draw(live: LiveBroker, seat: SeatProgress, milli: int = 250) -> LeaseReply:
    request = LeaseRequest(fraction_milli=milli, seat=seat.seat_id)
    answer = live.call("POST", "/v1/leases", to_builtins(request), token=seat.token)
    assert answer.status == 200, answer
    return LeaseReply(**answer.body)


def end(live: LiveBroker, seat: SeatProgress) -> None:
    with client_of(live) as client:
        client.release_seat(seat.seat_id)


def leases(live: LiveBroker) -> dict[str, dict[str, Any]]:
    found = live.call("GET", "/v1/status").body["leases"]
    return {one["lease"]["spec"]["lease_id"]: one["lease"] | {"told": one["reason"]} for one in found}


@contextmanager
def kernel_of(live: LiveBroker, lease: LeaseReply) -> Iterator[int]:
    """The process of the lease."""
    with started_for(lease.lease_id) as process:
        answer = live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
        assert answer.status == 200, answer
        yield process["pid"]


def wants(live: LiveBroker, lease: LeaseReply) -> tuple[str, str]:
    """Return the first message that a cell of the kernel gets."""
    body = to_builtins(AcquireRequest())
    answer = live.call("POST", f"/v1/leases/{lease.lease_id}/acquire", body, token=lease.token)
    return answer.body["kind"], answer.body["reason"]


def test_a_lease_whose_seat_ended_gets_nothing_until_the_next_seat_of_its_server_takes_it_over(
    live: LiveBroker,
) -> None:
    seat = take(live, server="big")
    lease = draw(live, seat)
    with kernel_of(live, lease):
        end(live, seat)
        row = leases(live)[lease.lease_id]
        assert (row["revoked"], row["told"]) == (True, "seat-ended")
        assert 0 < row["ends_ms"] - now_ms() <= 86_400_000
        assert wants(live, lease) == (ProgressKind.REFUSED, "seat-ended")

        other = take(live, server="small", fraction_milli=250)
        assert leases(live)[lease.lease_id]["revoked"], "a server of another name has nothing to do with it"
        end(live, other)
        another = take(live, owner="bob", server="big")
        assert leases(live)[lease.lease_id]["revoked"], "nor has another user's"
        end(live, another)

        again = take(live, server="big")
        row = leases(live)[lease.lease_id]
        assert (row["revoked"], row["spec"]["seat"], row["ends_ms"]) == (False, again.seat_id, None)
        assert wants(live, lease)[0] == ProgressKind.GRANTED
        refused = live.call(
            "POST",
            "/v1/leases",
            to_builtins(LeaseRequest(fraction_milli=500, seat=again.seat_id)),
            token=again.token,
        )
        assert refused.error["reason"] == "seat-full", "it draws on the seat that took it over"
        assert f"jupyter gpu end {lease.lease_id[:8]}" in refused.error["message"]


def test_no_kernel_of_the_present_server_is_ended_as_an_earlier_ones_though_the_clock_was_set_back(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = take(live)
    monkeypatch.setattr(lease_service, "wall_ms", lambda: wall_ms() - 3_600_000)
    lease = draw(live, seat)
    with kernel_of(live, lease) as pid:
        refused = live.call("POST", f"/v1/leases/{lease.lease_id}/end", {}, token=seat.token)
        assert refused.error["reason"] == "nothing-left"
        assert identify(pid)
        body = to_builtins(LeaseRequest(fraction_milli=500, seat=seat.seat_id))
        refused = live.call("POST", "/v1/leases", body, token=seat.token)
        assert refused.error["reason"] == "seat-full"
        assert "jupyter gpu end" not in refused.error["message"]


def test_a_seat_takes_over_no_more_than_it_has_room_for(live: LiveBroker) -> None:
    seat = take(live)
    first, second = draw(live, seat), draw(live, seat)
    with kernel_of(live, first), kernel_of(live, second):
        end(live, seat)
        smaller = take(live, fraction_milli=250)
        rows = leases(live)
        assert [rows[one.lease_id]["revoked"] for one in (first, second)] == [False, True], "the oldest first"
        with client_of(live, smaller.token) as client, closing(client):
            seen = {one.lease_id for one in client.status().leases}
            assert seen == {first.lease_id, second.lease_id}, "its user sees what is left, and can end it"
            client.end_left(second.lease_id)
        assert second.lease_id not in leases(live)


def test_a_seats_events_include_its_users_revoked_leases_and_no_other_users(live: LiveBroker) -> None:
    first, foreign = take(live, server="one", fraction_milli=250), take(live, owner="bob", fraction_milli=250)
    revoked, others = draw(live, first), draw(live, foreign)
    with kernel_of(live, revoked), kernel_of(live, others):
        end(live, first)
        end(live, foreign)
        second = take(live, server="two", fraction_milli=250)
        own = draw(live, second)
        told, asked = (live.call("GET", f"/v1/{route}", token=second.token).body for route in ("events", "status"))
        assert [one["lease"]["spec"]["lease_id"] for one in told["leases"]] == [revoked.lease_id, own.lease_id]
        assert [one["lease"]["spec"]["lease_id"] for one in asked["leases"]] == [revoked.lease_id, own.lease_id]
        end(live, second)


def test_a_revoked_lease_counts_for_its_user_when_another_server_asks(live: LiveBroker) -> None:
    seat = take(live, server="big")
    lease = draw(live, seat, 500)
    with kernel_of(live, lease):
        end(live, seat)
        refused = take(live, server="other", fraction_milli=250)
        assert (refused.kind, refused.reason) == (ProgressKind.REFUSED, "user-limit")
        assert take(live, server="big").kind == ProgressKind.GRANTED


def test_a_kernel_that_ends_after_its_seat_leaves_no_lease(live: LiveBroker) -> None:
    seat = take(live)
    lease, never_started = draw(live, seat), draw(live, seat)
    with kernel_of(live, lease):
        end(live, seat)
        assert never_started.lease_id not in leases(live)
    until(lambda: lease.lease_id not in leases(live), "the lease ends with its process")
    again = take(live)
    draw(live, again, 500)


def test_a_kernel_is_ended_when_no_seat_has_taken_it_over_in_time() -> None:
    pools = {"default": {"wait_bound": "100%", "revoked_ttl": "1s"}}
    with live_broker(seats_required=True, pools=pools) as live:
        seat = take(live)
        lease = draw(live, seat)
        with kernel_of(live, lease) as pid:
            end(live, seat)
            until(lambda: lease.lease_id not in leases(live), "its time is over")
            assert _is_over(pid)
        lines = live.broker.writer.ledger.story(lease.lease_id)
        assert {"seat-ended", "seat-ended.over"} <= {line.reason for line in lines}


def _is_over(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - a zombie of ours: it is still to be waited for
        return file.read().rpartition(")")[2].split()[0] == "Z"


def test_the_next_broker_knows_since_when_a_seat_is_over_and_whose_it_was(live: LiveBroker) -> None:
    seat = take(live, server="big")
    lease = draw(live, seat)
    with kernel_of(live, lease):
        end(live, seat)

        async def again() -> dict[str, Any]:
            await live.broker.writer.run(lambda: None)
            fresh = Seats(live.broker, live.service.settings)
            fresh.recover(live.broker.writer.ledger)
            return dict(fresh.revocations._ended)

        ended = live.on_loop(again)
        assert [(one.owner, one.server) for one in ended.values()] == [("ada", "big")]
        assert list(ended) == [seat.seat_id]
