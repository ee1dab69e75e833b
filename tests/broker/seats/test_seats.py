"""A hub takes seats from a broker, and kernels never get more than the seat they use."""

import asyncio
import json
import logging
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from typing import Any

import pytest
from msgspec import to_builtins

from fractional_gpu.broker.persistence import ledger_writer as writer_module
from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.broker.services.status import StatusStream, Viewer
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.terminal.render import render_status
from fractional_gpu.commands.terminal.text import plain
from fractional_gpu.ledger.records import LedgerError, SeatRecord, UsageRecord
from fractional_gpu.protocol.codec import decode_reply
from fractional_gpu.protocol.errors import BadRequestError, InternalBrokerError, NotFoundError
from fractional_gpu.protocol.messages import LeaseRequest, ProgressKind
from fractional_gpu.protocol.seats import OfferRequest, SeatProgress, SeatRequest
from fractional_gpu.protocol.status import HostChange, HostStatus
from tests.broker.live import BECOME_NOBODY, DEADLINE_S, LiveBroker, live_broker

pytestmark = pytest.mark.promise("full-disk", "seats")

CLOSED = time.strftime("%a", time.localtime(time.time() + 3 * 86_400))  # a date far from today
POOLS: dict[str, Any] = {
    "default": {"wait_bound": "100%", "kernels_per_seat": 2, "price": "0.80 EUR"},
}


@pytest.fixture(scope="module")
def _live() -> Iterator[LiveBroker]:
    with live_broker(seats_required=True, pools=POOLS) as live:
        yield live


@pytest.fixture
def live(_live: LiveBroker) -> Iterator[LiveBroker]:
    yield _live
    with client_of(_live) as client:
        for seat in client.seats().seats:
            client.release_seat(seat.seat_id)
    leases = _live.call("GET", "/v1/status").body["leases"]
    for lease in leases:
        _live.call("DELETE", f"/v1/leases/{lease['lease']['spec']['lease_id']}")


def client_of(live: LiveBroker) -> SeatClient:
    return SeatClient(live.socket, timeout_s=DEADLINE_S)


def take(live: LiveBroker, **fields: Any) -> SeatProgress:  # noqa: ANN401 - SeatRequest's
    """Take a seat and return the last line."""
    request = SeatRequest(**{"owner": "ada", "pool": "default", "fraction_milli": 250, **fields})
    with client_of(live) as client:
        return list(client.take_seat(request))[-1]


def ask(live: LiveBroker, seat: SeatProgress, **fields: Any) -> Any:  # noqa: ANN401
    """Ask for a kernel on the seat."""
    token = fields.pop("token", seat.token)
    request = LeaseRequest(**{"fraction_milli": 250, "seat": seat.seat_id, **fields})
    return live.call("POST", "/v1/leases", to_builtins(request), token=token)


def test_a_kernel_gets_owner_and_priority_from_its_seat(live: LiveBroker) -> None:
    seat = take(live)
    assert seat.kind == ProgressKind.GRANTED
    assert seat.memory_mib == 256
    answer = ask(live, seat, label="notebook")
    assert answer.status == 200, answer
    lease = live.call("GET", f"/v1/leases/{answer.body['lease_id']}").body
    assert (lease["lease"]["spec"]["owner"], lease["lease"]["spec"]["seat"]) == ("ada", seat.seat_id)
    with client_of(live) as client:
        (status,) = client.seats().seats
    assert (status.owner, status.kernels, status.used_milli) == ("ada", 1, 250)


@pytest.mark.parametrize(
    ("wish", "reason", "named"),
    [
        ({"fraction_milli": 500}, "seat-full", ["1/2", "1/4"]),
        ({"memory_mib": 300}, "seat-memory", ["300 MiB", "256 MiB"]),
        ({"priority": 5}, "seat-priority", ["priority 5", "0"]),
    ],
)
def test_a_kernel_that_asks_for_more_than_its_seat_is_refused(
    live: LiveBroker, caplog: pytest.LogCaptureFixture, wish: dict[str, Any], reason: str, named: list[str]
) -> None:
    seat = take(live)
    with caplog.at_level(logging.WARNING):
        refused = ask(live, seat, **wish).error
    assert refused["reason"] == reason
    assert all(one in refused["message"] for one in named)
    assert any("seat of 'ada'" in record.getMessage() and reason in record.getMessage() for record in caplog.records)


def test_all_kernels_of_a_seat_share_it(live: LiveBroker) -> None:
    seat = take(live, fraction_milli=500)
    assert ask(live, seat).status == 200
    refused = ask(live, seat, fraction_milli=500).error
    assert refused["reason"] == "seat-full"
    assert "1/4" in refused["message"], "what its other kernels have"
    assert ask(live, seat).status == 200
    assert ask(live, seat, fraction_milli=125).error["reason"] == "seat-full"


def test_a_seat_has_so_many_kernels_and_no_more(live: LiveBroker) -> None:
    seat = take(live, fraction_milli=500)
    assert [ask(live, seat, fraction_milli=125).status for _ in range(2)] == [200, 200]
    refused = ask(live, seat, fraction_milli=125).error
    assert (refused["reason"], "2 kernels" in refused["message"]) == ("seat-kernels", True)


def test_without_a_seat_no_kernel_starts_if_seats_are_required(live: LiveBroker) -> None:
    refused = live.call("POST", "/v1/leases", to_builtins(LeaseRequest(fraction_milli=250))).error
    assert refused["reason"] == "no-seat"


def test_a_foreign_token_or_a_seat_that_is_over_gives_the_same_refusal(live: LiveBroker) -> None:
    mine, other = take(live), take(live, owner="bob")
    answers = [
        ask(live, mine, token=other.token),
        ask(live, mine, token=None),
        ask(live, mine, token="x" * 43),
        ask(live, SeatProgress(kind="granted", seat_id="0" * 24, token=mine.token)),
    ]
    assert {answer.status for answer in answers} == {401}
    assert len({answer.error["message"] for answer in answers}) == 1


def test_a_seat_that_is_not_confirmed_ends_by_itself(live: LiveBroker) -> None:
    kept = take(live)
    with client_of(live) as client:
        assert client.confirm_seat(kept.seat_id).expires_ms is None
    lost = take(live, owner="bob", ttl_ms=2_000)  # longer than a busy disk takes for the write

    async def gone() -> None:
        seats: Seats = live.service.seats
        while any(seat.seat_id == lost.seat_id for seat in seats.live()):
            await seats._changed.wait()

    live.on_loop(gone)
    with client_of(live) as client:
        assert [seat.seat_id for seat in client.seats().seats] == [kept.seat_id]
        with pytest.raises(NotFoundError, match=lost.seat_id):
            client.confirm_seat(lost.seat_id)


def test_a_server_has_one_seat(live: LiveBroker) -> None:
    first, second = take(live, server="lab"), take(live, server="lab", fraction_milli=500)
    other = take(live, server="named")
    with client_of(live) as client:
        assert [seat.seat_id for seat in client.seats().seats] == [second.seat_id, other.seat_id]
    assert ask(live, first).error["reason"] == "foreign-seat"


def test_only_the_user_whose_seat_it_is_may_draw_on_it(live: LiveBroker) -> None:
    seat = take(live, uid=12_345)
    # Root may; another user with the token, which may be stolen, may not.
    body = json.dumps(to_builtins(LeaseRequest(fraction_milli=250, seat=seat.seat_id)))
    reply = as_nobody(live, "POST", "/v1/leases", body, token=seat.token)
    assert " 403 " in reply.partition("\n")[0]
    assert "belongs to another user" in reply


def test_users_of_one_uid_see_and_steer_only_what_is_of_their_seat(live: LiveBroker) -> None:
    seats = [take(live, owner=owner) for owner in ("ada", "bob")]
    leases = []
    for seat in seats:
        body = json.dumps(to_builtins(LeaseRequest(fraction_milli=250, seat=seat.seat_id)))
        reply = as_nobody(live, "POST", "/v1/leases", body, token=seat.token)
        leases.append(json.loads(reply.partition("\n\n")[2]))

    def seen(token: str | None) -> list[str]:
        status = json.loads(as_nobody(live, "GET", "/v1/status", "", token=token).partition("\n\n")[2])
        return [lease["lease"]["spec"]["lease_id"] for lease in status["leases"]]

    ids = [lease["lease_id"] for lease in leases]
    assert seen(seats[0].token) == ids[:1]
    assert seen(leases[1]["token"]) == ids[1:]
    assert seen(None) == []
    own, foreign = f"/v1/leases/{ids[0]}", f"/v1/leases/{ids[1]}"
    assert " 200 " in as_nobody(live, "GET", own, "", token=seats[0].token)
    assert " 404 " in as_nobody(live, "GET", own, "")
    as_nobody(live, "DELETE", own, "")  # no error, as for a lease that has ended
    assert " 200 " in as_nobody(live, "GET", own, "", token=seats[0].token), "it was not ended"
    assert " 401 " in as_nobody(live, "GET", foreign, "", token=seats[0].token)
    assert " 401 " in as_nobody(live, "POST", own + "/detach", "{}", token=seats[0].token), "the kernel's own route"


def as_nobody(live: LiveBroker, method: str, target: str, body: str, *, token: str | None = None) -> str:
    """Make one request from a process of another user and return the whole reply."""
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    request = (
        f"{method} {target} HTTP/1.1\r\nHost: broker\r\nConnection: close\r\n{authorization}"
        f"Content-Length: {len(body.encode())}\r\n\r\n{body}"
    )
    program = (
        "import socket, sys\n"
        + BECOME_NOBODY
        + """
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.sendall(sys.argv[2].encode())
while part := line.recv(65536):
    sys.stdout.write(part.decode())
"""
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, live.socket, request],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_a_full_pool_lets_wait_first_come_first_served(live: LiveBroker) -> None:
    pools = {"default": {"oversubscription": 1, "wait_bound": "100%"}}
    with live_broker(pools=pools) as small, client_of(small) as first, client_of(small) as second:
        holder = take(small, fraction_milli=1000)
        lines = [
            client.take_seat(SeatRequest(owner=owner, pool="default", fraction_milli=1000, wait_ms=60_000))
            for client, owner in ((first, "bob"), (second, "eve"))
        ]
        waiting = [next(iter(line)) for line in lines]
        assert [line.position for line in waiting] == [1, 2]
        assert "has promised 1 GiB of the 1 GiB that it may promise" in waiting[0].sentence
        assert waiting[1].sentence == "1 other is waiting ahead of you for a place in pool 'default'"
        with client_of(small) as hub:
            assert hub.seats().waiting == {"default": 2}
            hub.release_seat(holder.seat_id)
            granted = list(lines[0])[-1]
            assert granted.kind == ProgressKind.GRANTED
            hub.release_seat(granted.seat_id)
        assert list(lines[1])[-1].kind == ProgressKind.GRANTED
    assert live.is_alive()


def test_the_wait_for_a_seat_is_forecast_with_bounds_and_compared_with_what_happened() -> None:
    with live_broker(pools={"default": {"oversubscription": 1, "wait_bound": "100%"}}) as live:
        seats: Seats = live.service.seats
        seats.forecasts.lasted_ms["default"] = [60_000 * minutes for minutes in range(1, 21)]
        holder = take(live, fraction_milli=1000)
        with waiting_for(live, "bob", 1000) as lines, client_of(live) as client:
            (wait,) = client.status().seat_queue
            assert (wait.low_ms, wait.expected_ms, wait.high_ms) == (180_000, 630_000, 1_080_000)
            assert "; about 10 min more (3 to 18)" in plain(render_status(client.status()))
            client.release_seat(holder.seat_id)
            assert next(lines).kind == ProgressKind.GRANTED
            (error,) = [one for one in client.status().forecasts if one.what == "seat"]
            assert (error.count, error.covered_permille) == (1, 0), "it was given within a moment"
        assert seats.forecasts.expected("default", 1, 1) != seats.forecasts.worked_out("default", 1, 1), "that widens"


@contextmanager
def waiting_for(live: LiveBroker, owner: str, fraction_milli: int) -> Iterator[Iterator[SeatProgress]]:
    """A request for a seat in the pool's queue; yields its further progress."""
    with client_of(live) as client:
        lines = client.take_seat(
            SeatRequest(owner=owner, pool="default", fraction_milli=fraction_milli, wait_ms=3_600_000)
        )
        assert next(lines).kind == ProgressKind.WAITING
        yield lines


def test_the_status_shows_seats_and_their_queue_only_to_their_users() -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    with live_broker(pools={"default": {"oversubscription": 1, "wait_bound": "100%"}}) as small:

        def seen(token: str | None = None) -> HostStatus:
            return decode_reply(small.call("GET", "/v1/status", token=token).body, HostStatus)

        holder = take(small, owner="ada", server="big", fraction_milli=500, uid=nobody)
        other = take(small, owner="eve", fraction_milli=500, uid=0)
        ask(small, other)
        with waiting_for(small, "bob", 1000):
            status = seen()
            assert [(one.owner, one.server, one.kernels, one.used_milli) for one in status.seats] == [
                ("ada", "big", 0, 0),
                ("eve", "", 1, 250),
            ]
            (wait,) = status.seat_queue
            assert (wait.pool, wait.position, wait.owner, wait.fraction_milli) == ("default", 1, "bob", 1000)
            assert wait.memory_mib == 1024
            own = seen(other.token)
            assert [one.owner for one in own.seats] == ["eve"], "a seat's token shows that seat"
            assert own.seat_queue == []
            theirs = json.loads(as_nobody(small, "GET", "/v1/status", "").partition("\n\n")[2])
            assert [one["owner"] for one in theirs["seats"]] == ["ada"]
            assert "seat_queue" not in theirs or theirs["seat_queue"] == []
            assert holder.token not in json.dumps(to_builtins(status))
            text = plain(render_status(status))
    assert "ada/big" in text
    assert "waiting for a seat of pool default:" in text
    assert "    1. bob: 1 GPU, 1 GiB, for " in text


def offered_free(live: LiveBroker) -> list[int]:
    with client_of(live) as client:
        (pool,) = client.offers(OfferRequest(owner="max")).pools
    return [one.fraction_milli for one in pool.fractions if one.free]


def test_small_seats_pass_a_large_one_that_has_no_room_so_many_times_and_no_more() -> None:
    pools = {"default": {"oversubscription": 1, "wait_bound": "100%", "max_passed_over": 2}}
    with live_broker(pools=pools) as live, client_of(live) as hub:
        holder = take(live, owner="ada")
        with waiting_for(live, "bob", 1000) as large:
            assert offered_free(live) == [125, 250, 500, 750]
            small = [take(live, owner=f"small{number}", fraction_milli=125) for number in range(2)]
            assert {one.kind for one in small} == {ProgressKind.GRANTED}
            assert offered_free(live) == [], "the room is kept for the one that was passed twice"
            late = take(live, owner="late", fraction_milli=125)
            assert (late.kind, late.reason) == (ProgressKind.REFUSED, "seat-queue")
            for one in (holder, *small):
                hub.release_seat(one.seat_id)
            assert list(large)[-1].kind == ProgressKind.GRANTED


@contextmanager
def held_back(live: LiveBroker) -> Iterator[None]:
    """During the block no write reaches the disk."""
    live.disk.goes_on.clear()
    try:
        yield
    finally:
        live.disk.goes_on.set()


def test_a_seat_that_cannot_be_written_down_gives_its_room_back() -> None:
    with (
        live_broker(pools={"default": {"oversubscription": 1, "wait_bound": "100%"}}) as live,
        client_of(live) as client,
    ):
        live.disk.full = True
        with pytest.raises(InternalBrokerError, match="the disk is full"):
            take(live, fraction_milli=1000)
        assert client.seats().seats == []
        live.disk.full = False
        assert take(live, owner="bob", fraction_milli=1000).kind == ProgressKind.GRANTED


def test_a_request_that_is_dropped_while_its_seat_is_written_down_keeps_no_room() -> None:
    with live_broker(pools={"default": {"oversubscription": 1, "wait_bound": "100%"}}) as live:
        seats: Seats = live.service.seats
        with held_back(live):

            async def drop() -> None:
                line = seats.take(SeatRequest(owner="ada", pool="default", fraction_milli=1000))
                asked = asyncio.ensure_future(anext(line))
                while not seats.live():
                    await seats._changed.wait()
                asked.cancel()
                await asyncio.wait([asked])
                await line.aclose()

            live.on_loop(drop)
            assert seats.live() == []
        assert take(live, owner="bob", fraction_milli=1000).kind == ProgressKind.GRANTED
        assert [seat.owner for seat in found_again(live)] == ["bob"]


def test_servers_with_the_same_names_at_two_hubs_have_a_seat_each() -> None:
    hubs = [f"http://127.0.0.1:{port}/hub/api" for port in (8081, 9081)]
    pools = {"default": {"user_limits": {"fraction": "1/2"}, "wait_bound": "100%"}}
    with live_broker(pools=pools) as live, client_of(live) as client:

        def left() -> list[str]:
            return sorted(seat.seat_id for seat in client.seats().seats)

        first, second = (take(live, hub=hub).seat_id for hub in hubs)
        assert left() == sorted([first, second])
        again = take(live, hub=hubs[0])
        assert again.kind == ProgressKind.GRANTED, "the seat that it replaces does not count"
        assert left() == sorted([again.seat_id, second])
        assert take(live, hub="http://127.0.0.1:7081/hub/api").reason == "user-limit", "seats of other hubs count"


def test_who_gives_up_leaves_the_queue(live: LiveBroker) -> None:
    pools = {"default": {"oversubscription": 1, "wait_bound": "100%"}}
    with live_broker(pools=pools) as small, client_of(small) as client, client_of(small) as hub:
        take(small, fraction_milli=1000)
        line = client.take_seat(SeatRequest(owner="bob", pool="default", fraction_milli=1000, wait_ms=60_000))
        with closing(line):  # type: ignore[type-var]
            assert next(iter(line)).position == 1
        seats: Seats = small.service.seats

        async def left() -> None:
            while seats.listing().waiting:
                await seats._changed.wait()

        small.on_loop(left)
        refused = list(hub.take_seat(SeatRequest(owner="eve", pool="default", fraction_milli=1000)))[-1]
        assert (refused.kind, refused.reason) == (ProgressKind.REFUSED, "pool-full")
    assert live.is_alive()


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str, list[str]]] = [
    (
        {"groups": {"staff": {}}},
        {"groups": ["students"]},
        "pool-group",
        ["staff", "students"],
    ),
    ({"groups": {"staff": {}}}, {}, "pool-group", ["staff", "not in any group"]),
    ({"hours": f"{CLOSED} 08:00-08:30"}, {}, "pool-closed", [f"{CLOSED} 08:00;"]),
    ({"user_limits": {"fraction": "1/2"}}, {"fraction_milli": 750}, "user-limit", ["3/4", "1/2"]),
    (
        {"groups": {"staff": {}}, "group_limits": {"staff": {"fraction": "1/8"}}},
        {"groups": ["staff"]},
        "group-limit",
        ["staff", "1/8"],
    ),
    (
        {"group_limits": {"staff": {"fraction": 1}, "students": {"fraction": "1/8"}}},
        {"groups": ["ghosts", "students"]},
        "group-limit",
        ["students", "1/8"],
    ),
    ({}, {"memory_mib": 2048}, "larger-than-device", ["default", "2 GiB", "1 GiB"]),
]


@pytest.mark.parametrize(("policy", "wish", "reason", "named"), REFUSALS)
def test_who_may_not_have_a_seat_is_told_why(
    policy: dict[str, Any], wish: dict[str, Any], reason: str, named: list[str]
) -> None:
    with live_broker(pools={"default": policy}) as live:
        refused = take(live, wait_ms=1000, **wish)
    assert (refused.kind, refused.reason) == (ProgressKind.REFUSED, reason)
    assert all(one in refused.sentence for one in named)


def test_the_terms_of_the_group_are_the_seats() -> None:
    groups = {"students": {}, "staff": {"weight": 300, "priority": 7}}
    with live_broker(pools={"default": {"groups": groups}}) as live, client_of(live) as client:
        seat = take(live, groups=["students", "staff"])
        (status,) = client.seats().seats
        assert (status.group, status.weight, status.priority, seat.priority) == ("staff", 300, 7, 7)
        lease_id = ask(live, seat).body["lease_id"]

        async def spec() -> Any:  # noqa: ANN401 - what a test looks at
            view = live.broker.arbiter.lease(lease_id)
            assert view is not None
            return view.spec

        found = live.on_loop(spec)
        assert (found.owner, found.group, found.priority, found.owner_weight) == ("ada", "staff", 7, 300)


@pytest.mark.parametrize(
    ("fields", "said", "remedy"),
    [
        ({"owner": "a\u202eb"}, "'a\\u202eb' contains U+202E (right-to-left override)", "rename the user at the hub"),
        ({"owner": "a\nb"}, "'a\\nb' contains U+000A (control character)", "rename the user at the hub"),
        ({"server": "x\u200f"}, "'x\\u200f' contains U+200F (right-to-left mark)", "start a server with another name"),
        ({"owner": "a" * 201}, "is too long (201 characters); the maximum is 200", "rename the user at the hub"),
    ],
)
def test_a_name_with_control_or_direction_marks_is_refused_with_a_way_out(
    live: LiveBroker, fields: dict[str, Any], said: str, remedy: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        take(live, **fields)
    assert said in str(caught.value)
    assert remedy in str(caught.value)
    assert str(caught.value).isprintable()


def test_offers_say_what_is_free_what_it_costs_and_what_to_expect(live: LiveBroker) -> None:
    with client_of(live) as client:
        offers = client.offers(OfferRequest(owner="ada"))
    assert (offers.default_pool, offers.default_fraction_milli, offers.simulated) == ("default", 250, True)
    (pool,) = offers.pools
    assert (pool.pool, pool.why_not, pool.free_mib, pool.devices) == ("default", "", 1024, 1)
    quarter = pool.fractions[1]
    assert (quarter.fraction_milli, quarter.memory_mib, quarter.price) == (250, 256, "0.20 EUR per hour")
    assert quarter.free
    assert quarter.sentence == "free now"


def test_offers_leave_out_the_pools_of_others_and_say_why_one_is_closed() -> None:
    policy = {"groups": {"staff": {}}, "hours": f"{CLOSED} 08:00-08:30"}
    with live_broker(pools={"default": policy}) as live, client_of(live) as client:
        assert client.offers(OfferRequest(owner="ada")).pools == []
        offers = client.offers(OfferRequest(owner="ada", groups=["staff"]))
    assert (offers.default_pool, offers.default_fraction_milli) == ("", 0)
    (pool,) = offers.pools
    assert "is currently closed" in pool.why_not


def test_seats_are_packed_by_use_until_cells_would_wait_too_long() -> None:
    with live_broker(pools={"default": {"wait_bound": "5%", "when_full": "refuse"}}) as live, client_of(live) as client:
        count = 0
        while take(live, owner=f"user{count}").kind == ProgressKind.GRANTED:
            count += 1
            assert count < 50
        assert count > 4, "more than the caps alone would allow"
        refused = take(live, owner="one more")
        assert refused.reason == "pool-full"
        assert f"{count} servers are using it" in refused.sentence
        assert "of the cells would wait longer than 30 s for the GPU (5 % are allowed)" in refused.sentence
        offer = client.offers(OfferRequest(owner="one more")).pools[0].fractions[1]
        assert (offer.free, offer.sentence) == (False, "full now")
        # A user known to use little still finds room ...
        hour = 3_600_000
        light = UsageRecord(
            owner="light",
            pool="default",
            day=1,
            live_ms=1000 * hour,
            busy_ms=hour,
            busy_mib_ms=hour * 100,
        )

        async def learn() -> None:
            live.service.seats.forecasts.learn([light])

        live.on_loop(learn)
        assert take(live, owner="light").kind == ProgressKind.GRANTED


def test_seats_outlive_the_broker() -> None:
    with live_broker() as live:
        seat = take(live)

        assert [one.seat_id for one in found_again(live)] == [seat.seat_id]


def found_again(live: LiveBroker) -> list[SeatRecord]:
    """Return what the next broker would find."""

    async def again() -> list[SeatRecord]:
        with suppress(LedgerError):  # a write that is retried at that moment fails, and this one with it
            await live.broker.writer.run(lambda: None)  # everything earlier is on disk
        fresh = Seats(live.broker, live.service.settings)
        fresh.recover(live.broker.writer.ledger)
        return fresh.live()

    return live.on_loop(again)


def test_a_seat_is_confirmed_when_that_is_on_the_disk() -> None:
    with live_broker() as live, client_of(live) as client:
        seat = take(live)
        live.disk.full = True
        with pytest.raises(InternalBrokerError, match="the disk is full"):
            client.confirm_seat(seat.seat_id)
        live.disk.full = False
        assert [one.expires_ms is None for one in found_again(live)] == [False]
        client.confirm_seat(seat.seat_id)
        assert [one.expires_ms is None for one in found_again(live)] == [True]


def test_a_seat_is_given_back_when_that_is_on_the_disk() -> None:
    """Otherwise, if a broker died between its reply and the write, the next one would find the seat again."""
    with live_broker() as live:
        seat, seats = take(live), live.service.seats

        async def give_back() -> None:
            giving = asyncio.ensure_future(seats.release(seat.seat_id))
            while seats.live():
                await seats._changed.wait()
            assert not giving.done()
            live.disk.goes_on.set()
            await giving

        with held_back(live):
            live.on_loop(give_back)
        assert found_again(live) == []


def test_a_seat_that_ended_on_a_full_disk_is_not_there_for_the_next_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_LOOK_AGAIN_S", 0.01)
    with live_broker() as live, client_of(live) as client:
        seat = take(live)
        client.confirm_seat(seat.seat_id)
        live.disk.full = True
        client.release_seat(seat.seat_id)
        assert [one.seat_id for one in found_again(live)] == [seat.seat_id], "it could not be written down"
        live.disk.full = False
        deadline_s = time.monotonic() + DEADLINE_S
        while found_again(live):
            assert time.monotonic() < deadline_s, "it is there for good"


def test_a_seats_news_are_of_its_own_leases(live: LiveBroker) -> None:
    ada, bob = take(live), take(live, owner="bob")
    leases = {seat.seat_id: ask(live, seat).body["lease_id"] for seat in (ada, bob)}
    for seat in (ada, bob):
        told = live.call("GET", "/v1/events", token=seat.token).body
        assert [lease["lease"]["spec"]["lease_id"] for lease in told["leases"]] == [leases[seat.seat_id]]

    async def told_to_the_uid() -> HostStatus | None:
        async with aclosing(StatusStream(live.broker, live.socket).follow(Viewer(os.getuid()))) as news:
            status = await anext(news)
            assert not isinstance(status, HostChange)
            return status

    status = live.on_loop(told_to_the_uid)
    while status is None:
        status = live.on_loop(told_to_the_uid)
    assert status.leases == []  # containers share uids
