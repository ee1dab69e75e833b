"""A hub gives back the seats of servers that are gone, but no other hub's and none in use; its broker outlives its service."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub import orm
from traitlets.config import Config
from traitlets.log import get_logger

import fractional_gpu_hub
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.seats import SeatRequest
from fractional_gpu_hub import seats as hub_seats
from fractional_gpu_hub.seats import Reconciler
from fractional_gpu_hub.service import add_page
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker

pytestmark = pytest.mark.promise("seat-ends")

HUB = "http://127.0.0.1:8081/hub/api"
ATTENDANT = str(Path(fractional_gpu_hub.__file__).with_name("attendant.py"))


@pytest.fixture(scope="module")
def _live() -> Iterator[LiveBroker]:
    with live_broker(pools={"default": {"wait_bound": "100%"}}) as live:
        yield live


@pytest.fixture
def live(_live: LiveBroker) -> Iterator[LiveBroker]:
    yield _live
    with SeatClient(_live.socket) as client:
        for seat in client.seats().seats:
            client.release_seat(seat.seat_id)


def take(live: LiveBroker, owner: str, server: str = "", hub: str = HUB) -> str:
    request = SeatRequest(owner=owner, server=server, pool="default", fraction_milli=125, hub=hub)
    with SeatClient(live.socket) as client:
        return list(client.take_seat(request))[-1].seat_id


def left(live: LiveBroker) -> list[str]:
    with SeatClient(live.socket) as client:
        return sorted(f"{seat.owner}/{seat.server}" for seat in client.seats().seats)


def spawner(seat_id: str | None = None, *, active: bool = True, pending: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(active=active, pending=pending, gpu_seat={"seat_id": seat_id} if seat_id else None)


def hub_with(servers: dict[str, dict[str, SimpleNamespace]]) -> Any:  # noqa: ANN401
    db = orm.new_session_factory("sqlite:///:memory:")()
    users: dict[orm.User, SimpleNamespace] = {}
    for name, spawners in servers.items():
        user = orm.User(name=name)
        db.add(user)
        for server in spawners:
            db.add(orm.Spawner(name=server, user=user))
        db.commit()
        users[user] = SimpleNamespace(spawners=spawners)
    return SimpleNamespace(db=db, users=users, hub=SimpleNamespace(api_url=HUB), log=get_logger())


async def test_seats_of_servers_that_are_gone_are_given_back(live: LiveBroker) -> None:
    used, starting = take(live, "ada"), take(live, "ada", "starting")
    for owner, server in (("ada", "stopped"), ("ada", "unknown"), ("nobody", ""), ("bob", "")):
        take(live, owner, server)
    app = hub_with(
        {
            "ada": {
                "": spawner(used),
                "starting": spawner(pending="spawn", active=True),
                "stopped": spawner(active=False),
            },
            "bob": {"": spawner("another-seat")},
        }
    )
    await Reconciler(app, live.socket).reconcile()
    assert left(live) == ["ada/", "ada/starting"], (used, starting)


async def test_the_seat_of_a_user_who_was_renamed_stays_with_the_server(live: LiveBroker) -> None:
    seat_id = take(live, "ada")
    servers = {"ada.lovelace": {"": spawner(seat_id)}}
    await Reconciler(hub_with(servers), live.socket).reconcile()
    assert left(live) == ["ada/"]
    await Reconciler(hub_with({**servers, "ada": {"": spawner(active=False)}}), live.socket).reconcile()
    assert left(live) == ["ada/"], "though there is another user of the old name"
    await Reconciler(hub_with({"ada.lovelace": {"": spawner(seat_id, active=False)}}), live.socket).reconcile()
    assert left(live) == []


async def test_seats_of_another_hub_stay(live: LiveBroker) -> None:
    take(live, "ada", hub="http://127.0.0.1:9999/hub/api")
    take(live, "bob", hub="")
    await Reconciler(hub_with({}), live.socket).reconcile()
    assert left(live) == ["ada/", "bob/"]


async def test_a_hub_whose_configuration_took_the_broker_out_again_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = SimpleNamespace(http_server=object(), services=[{"name": "culler"}], log=get_logger())
    monkeypatch.setattr(hub_seats, "_running_hub", lambda: hub)
    c = Config()
    hub_seats.expect_service("culler", "another call")
    add_page(c, socket="/run/broker.sock")
    fractional_gpu_hub.configure(c, spawner="fractional-gpu-simple", simulate="1x1GiB", broker="managed")
    await asyncio.sleep(0)  # one iteration of the hub's loop
    for call in ("configure", "add_page"):
        assert f"{call}(...) in jupyterhub_config.py added, is missing" in caplog.text
    assert "another call" not in caplog.text


# -- the broker's service -----------------------------------------------------------------------------------------------------

_BROKER = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("serves", flush=True)
signal.sigwait([signal.SIGTERM])
print("stopped", flush=True)
"""
_HUB = """
import os, signal, subprocess, sys
service = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(service.pid, flush=True)
sys.stdin.readline()
service.send_signal(signal.SIGINT)
print(service.wait(), flush=True)
sys.stdin.readline()
"""


def test_the_broker_of_a_hub_that_ends_outlives_its_service_and_ends_with_the_hub() -> None:
    command = [sys.executable, "-c", _HUB, ATTENDANT, sys.executable, "-c", _BROKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdin is not None
        assert hub.stdout is not None
        lines = {hub.stdout.readline().strip() for _ in range(2)}  # the hub's and the broker's, in either order
        assert "serves" in lines
        print("stop", file=hub.stdin, flush=True)
        assert hub.stdout.readline() == "0\n", "the service has ended, and the broker has not"
        print("end", file=hub.stdin, flush=True)
        assert hub.stdout.readline() == "stopped\n"


def test_the_service_ends_as_its_broker_does() -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for code, status in (("raise SystemExit(3)", 3), (killed, 128 + signal.SIGKILL)):
        done = subprocess.run(  # noqa: PLW1510 - its status is the point
            [sys.executable, ATTENDANT, sys.executable, "-c", code], timeout=DEADLINE_S, env=dict(os.environ)
        )
        assert done.returncode == status
