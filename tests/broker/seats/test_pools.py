"""An administrator changes a pool while the broker runs: at once and for existing leases too, or not at all."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.protocol.messages import ProgressKind
from fractional_gpu.protocol.seats import OfferRequest, SeatRequest
from tests.broker.live import LiveBroker, live_broker


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker(pools={"default": {"price": "1 EUR"}}) as live:
        yield live


@pytest.fixture
def client(live: LiveBroker) -> Iterator[SeatClient]:
    with SeatClient(live.socket) as client:
        yield client


def spec(live: LiveBroker) -> Any:  # noqa: ANN401 - a PoolSpec
    async def look() -> Any:  # noqa: ANN401
        return live.broker.arbiter.pools()["default"]

    return live.on_loop(look)


def test_a_change_reaches_the_arbiter_and_the_hubs_users_at_once(live: LiveBroker, client: SeatClient) -> None:
    before = spec(live)
    changed = client.change_pool("default", {"idle_after": "2m", "fractions": ["1/2"], "price": "4 EUR"})
    assert changed.changed == ["fractions", "idle_after", "price"]
    after = spec(live)
    assert (after.idle_after_ms, after.fractions_milli, after.devices) == (120_000, (500,), before.devices)
    (pool,) = client.offers(OfferRequest(owner="ada")).pools
    assert [(one.fraction_milli, one.price) for one in pool.fractions] == [(500, "2.00 EUR per hour")]
    assert client.change_pool("default", {"price": "1 EUR"}).changed == ["fractions", "idle_after"], "the others stay"


def test_what_exists_keeps_its_size(live: LiveBroker, client: SeatClient) -> None:
    seat = list(client.take_seat(SeatRequest(owner="ada", pool="default", fraction_milli=250)))[-1]
    lease = live.lease(fraction_milli=250)
    client.change_pool("default", {"fractions": ["1"], "groups": {"staff": {}}})
    assert [one.seat_id for one in client.seats().seats] == [seat.seat_id]
    assert live.call("GET", f"/v1/leases/{lease.lease_id}").body["lease"]["spec"]["fraction_milli"] == 250
    refused = list(client.take_seat(SeatRequest(owner="bob", pool="default", fraction_milli=1000)))[-1]
    assert (refused.kind, refused.reason) == (ProgressKind.REFUSED, "pool-group")


def test_who_waits_for_a_seat_is_let_in_by_a_change(client: SeatClient, live: LiveBroker) -> None:
    client.change_pool("default", {"oversubscription": 1, "wait_bound": "100%"})
    list(client.take_seat(SeatRequest(owner="ada", pool="default", fraction_milli=1000)))
    with SeatClient(live.socket) as other:
        line = other.take_seat(SeatRequest(owner="bob", pool="default", fraction_milli=1000, wait_ms=60_000))
        assert next(iter(line)).position == 1
        client.change_pool("default", {"oversubscription": 2})
        assert list(line)[-1].kind == ProgressKind.GRANTED


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"idle_after": "soon"}, r"pools\['default'\]\['idle_after'\] = 'soon'"),
        ({"idle_afetr": "5m"}, "did you mean 'idle_after'"),
        ({"idle_after": "1m", "hours": "whenever"}, "is not a time of the week"),
        ({"devices": [0]}, "devices cannot be changed while the broker runs"),
    ],
)
def test_what_is_wrong_changes_nothing(
    live: LiveBroker, client: SeatClient, keys: dict[str, Any], sentence: str
) -> None:
    before = spec(live)
    with pytest.raises(BadRequestError, match=sentence):
        client.change_pool("default", keys)
    assert spec(live) == before
    assert client.pools().pools[0].changed == []


def test_the_command_shows_and_changes(live: LiveBroker) -> None:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "pool", *words, "--socket", live.socket]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = run("default", "idle_after=2m", 'user_limits={"leases": 2}')
    assert done.returncode == 0, done.stderr
    assert 'idle_after           "2m"  (changed since the broker started)' in done.stdout
    assert spec(live).user_limits.leases == 2
    assert '"price": "1 EUR"' in run("--json").stdout
    refused = run("default", "idle_after=soon")
    assert refused.returncode != 0
    assert "'soon'" in refused.stderr
    assert "KEY=VALUE" in run("default", "idle_after").stderr
    assert "'gold'" in run("gold").stderr
