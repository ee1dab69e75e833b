"""Seats of an engine's jobs and pods, and what the host reports that it can still give: `GET /v1/capacity`."""

from collections.abc import Iterator
from typing import Any

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.protocol.messages import ProgressKind, Workload
from fractional_gpu.protocol.nodes import PoolCapacity
from fractional_gpu.protocol.seats import SeatProgress, SeatRequest
from fractional_gpu.protocol.status import SeatStatus
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker

pytestmark = pytest.mark.promise("workload-seat")

POOLS: dict[str, Any] = {
    # By its forecast, `small` can take only one seat of an eighth, even if it has no other seats.
    "default": {"devices": [0, 1], "fractions": ["1/8", "1/4", "1/2", "1"], "wait_bound": "5%"},
    "promised": {"devices": [2], "fractions": ["1/4"], "oversubscription": 1, "wait_bound": "100%"},
}
JOB = Workload(engine="slurm", id="4711")


@pytest.fixture(scope="module")
def _live() -> Iterator[LiveBroker]:
    with live_broker("3x1GiB", pools=POOLS) as live:
        yield live


@pytest.fixture
def live(_live: LiveBroker) -> Iterator[LiveBroker]:
    yield _live
    with client_of(_live) as client:
        for seat in client.seats().seats:
            client.release_seat(seat.seat_id)


def client_of(live: LiveBroker) -> SeatClient:
    return SeatClient(live.socket, timeout_s=DEADLINE_S)


def take(live: LiveBroker, server: str, **fields: Any) -> SeatProgress:  # noqa: ANN401 - SeatRequest's
    request = SeatRequest(
        **{"owner": "ada", "pool": "default", "fraction_milli": 125, "server": server, "wait_ms": 0, **fields}
    )
    with client_of(live) as client:
        return list(client.take_seat(request))[-1]


def pool(live: LiveBroker, name: str = "default") -> PoolCapacity:
    with client_of(live) as client:
        return next(one for one in client.capacity().pools if one.name == name)


def seats(live: LiveBroker) -> list[SeatStatus]:
    with client_of(live) as client:
        return client.seats().seats


def test_what_is_admissible_is_granted_and_no_more(live: LiveBroker) -> None:
    empty = pool(live)
    assert (empty.total_milli, empty.held_milli, len(empty.devices)) == (2000, 0, 2)
    assert empty.admissible_milli >= 2000, "an idle pool can be given away at least once"
    given = 0
    while (left := pool(live).admissible_milli) >= 1000:
        assert take(live, str(given), fraction_milli=1000).kind == ProgressKind.GRANTED
        given += 1000
        assert pool(live).held_milli == given
        assert given < 20_000, left
    before = pool(live)
    assert take(live, "one more", fraction_milli=1000).kind == ProgressKind.REFUSED
    assert before.admissible_milli < 1000
    while pool(live).admissible_milli >= 125:
        assert take(live, str(given), fraction_milli=125).kind == ProgressKind.GRANTED
        given += 125
        assert given < 40_000


def test_an_admitted_seat_is_granted_past_the_forecast_and_shown_as_such(live: LiveBroker) -> None:
    for number in range(4):
        assert take(live, str(number), fraction_milli=1000, admitted=True).kind == ProgressKind.GRANTED
    crowded = pool(live)
    assert (crowded.held_milli, crowded.admissible_milli) == (4000, 0)
    assert crowded.wait_p95_s >= crowded.wait_p50_s
    assert crowded.wait_p95_s > 0
    refused = take(live, "hub", fraction_milli=1000)
    assert (refused.kind, refused.reason) == (ProgressKind.REFUSED, "pool-full")
    assert take(live, "job", fraction_milli=1000, admitted=True, workload=JOB).kind == ProgressKind.GRANTED
    (seat,) = [one for one in seats(live) if one.server == "job"]
    assert seat.admitted
    assert seat.workload == JOB
    assert seat.device_id in crowded.devices, "the forecast places it"


def test_leases_of_a_seat_go_only_to_its_devices(live: LiveBroker) -> None:
    second = pool(live).devices[1]
    for number in range(2):
        seat = take(live, str(number), fraction_milli=250, admitted=True, allowed_devices=[second])
        assert [one.device_id for one in seats(live) if one.seat_id == seat.seat_id] == [second]
        body = {"fraction_milli": 250, "seat": seat.seat_id, "gated": False, "wait_ms": 10_000}
        answer = live.call("POST", "/v1/leases", body, token=seat.token)
        assert answer.body["device_id"] == second, answer
    assert {one.server: one.allowed_devices for one in seats(live)} == {"0": (second,), "1": (second,)}


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"allowed_devices": []}, "allowed_devices is empty"),
        ({"allowed_devices": ["GPU-not-there"]}, "GPU-not-there"),
        ({"workload": Workload(engine="pbs", id="1")}, "expected slurm or kubernetes"),
        ({"workload": Workload(engine="slurm", id="12; true")}, "the number of a job"),
        ({"workload": Workload(engine="kubernetes", id="../../x")}, "the UID of a pod"),
        ({"workload": Workload(engine="slurm", id="1", control_group="/slurm/../..")}, "without `..`"),
    ],
)
def test_what_an_engine_says_wrongly_is_refused_with_what_is_allowed(
    live: LiveBroker, wish: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadRequestError, match=said.replace(".", r"\.")):
        take(live, "wrong", **wish)


def test_capacity_names_no_user(live: LiveBroker) -> None:
    take(live, "secret-server", owner="secret-owner")
    answer = live.call("GET", "/v1/capacity")
    assert answer.status == 200
    assert "secret" not in str(answer.body)
    assert answer.body["host_memory_total_mib"] >= answer.body["host_memory_left_mib"] >= 0
    assert answer.body["simulated"] is True
