"""A hub's metrics about its GPUs: spawns by outcome, and the waits for seats."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tornado import web

from tests.broker.live import LiveBroker, live_broker
from tests.hub.test_mixin import Mixed, hub_starts, hub_stops, spawner


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker(seats_required=True, pools={"default": {"wait_bound": "100%", "oversubscription": 1}}) as live:
        yield live


def spawns(outcome: str, reason: str = "") -> float:
    labels = {"outcome": outcome, "reason": reason}
    return REGISTRY.get_sample_value("jupyter_gpu_hub_spawns_total", labels) or 0.0


def waits(pool: str) -> float:
    return REGISTRY.get_sample_value("jupyter_gpu_hub_seat_wait_seconds_count", {"pool": pool}) or 0.0


async def moved_by(one: Mixed, *, outcome: str, reason: str = "", **options: Any) -> float:  # noqa: ANN401
    before = spawns(outcome, reason)
    try:
        await hub_starts(one, **options)
    except (web.HTTPError, RuntimeError):
        pass
    finally:
        await hub_stops(one)
    return spawns(outcome, reason) - before


async def test_a_spawn_is_counted_by_what_became_of_it(live: LiveBroker) -> None:
    waited = waits("default")
    assert await moved_by(spawner(live), outcome="gpu", pool="default", fraction="1/4") == 1
    assert waits("default") == waited + 1
    assert await moved_by(spawner(live), outcome="without", fraction="none") == 1
    refused = moved_by(spawner(live), outcome="refused", reason="unknown-pool", pool="secret-pool", fraction="1/4")
    assert await refused == 1
    assert waits("default") == waited + 1
    assert waits("secret-pool") == 0, "what users write is no label"


async def test_a_server_that_does_not_start_is_a_failure(live: LiveBroker) -> None:
    one = spawner(live)
    one.broken = True
    assert await moved_by(one, outcome="failed", reason="RuntimeError", pool="default", fraction="1/4") == 1


async def test_a_broker_that_does_not_answer_is_a_refusal_of_its_own(live: LiveBroker) -> None:
    one = spawner(live)
    one.gpu_socket = "/nowhere/broker.sock"
    assert await moved_by(one, outcome="refused", reason="broker", pool="default", fraction="1/4") == 1
