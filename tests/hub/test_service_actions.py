"""A page's requests are withdrawn when the page closes; only administrators end seats, after a confirmation."""

# ruff: noqa: ASYNC240 -- nobody waits for this loop

import asyncio
import json
import threading
from pathlib import Path

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NotFoundError
from fractional_gpu.protocol.seats import SeatRequest
from fractional_gpu_hub.service.actions import _ACTIONS, Actions
from fractional_gpu_hub.service.views import Viewer
from tests.broker.live import live_broker
from tests.support.fake_broker import DEADLINE_S, FakeBroker, FakeLease

LEASE = {"pool": "default", "label": "", "kernel_id": "k", "fraction_milli": 250, "gated": True}

CONFIRMED = b'{"confirm": true}'
OWN = {"suspend", "resume", "pin", "unpin", "story"}  # of a kernel; all else is for administrators
BODIES = {"pin": b'{"minutes": 5}', "evict": CONFIRMED, "release": CONFIRMED, "change": b'{"keys": {}}'}


@pytest.mark.parametrize(("kind", "action"), [(kind, action) for kind in _ACTIONS for action in _ACTIONS[kind]])
async def test_each_action_is_for_the_kernels_user_or_for_administrators(
    tmp_path_factory: pytest.TempPathFactory, kind: str, action: str
) -> None:
    with FakeBroker(str(tmp_path_factory.mktemp("s") / "b.sock")) as broker:
        broker.leases["lease-1"] = FakeLease(request=LEASE, token="", state="resident")
        broker.lease_fields["seat"] = "seat-1"

        async def reason(name: str, lease: str = "lease-1") -> str:
            try:
                await Actions(broker.path).act(
                    Viewer(name=name, admin=False), kind, lease, action, BODIES.get(action, b"")
                )
            except (ForbiddenError, NotFoundError) as error:
                return error.reason
            return ""

        own = "" if kind == "leases" and action in OWN else "not-admin"
        others = "unknown-lease" if kind == "leases" else "not-admin"
        assert (await reason("me"), await reason("eve"), await reason("me", "lease-2")) == (own, others, others)
        assert broker.routes().count(action) == (not own), "nothing is asked of the broker that is refused"


@pytest.mark.parametrize("admin", [False, True], ids=["a user, whose kernel is looked up first", "an administrator"])
async def test_a_page_that_goes_away_takes_a_waiting_resume_back(
    tmp_path_factory: pytest.TempPathFactory, admin: bool
) -> None:
    socket: Path = tmp_path_factory.mktemp("s") / "b.sock"
    with FakeBroker(str(socket)) as broker:
        broker.leases["lease-1"] = FakeLease(request=LEASE, token="", state="suspended")
        broker.lease_fields["seat"] = "seat-1"
        held = broker.held["resume"] = threading.Event()
        actions = Actions(broker.path)
        asked = asyncio.ensure_future(actions.act(Viewer(name="me", admin=admin), "leases", "lease-1", "resume", b""))
        await asyncio.to_thread(broker.wait_for, lambda: "resume" in broker.routes())
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        try:
            for thread in threading.enumerate():
                if thread.name == "gpu-stream":
                    await asyncio.to_thread(thread.join, DEADLINE_S)
                    assert not thread.is_alive()
        finally:
            held.set()
        assert broker.routes().count("resume") == 1


async def test_an_administrator_who_means_it_releases_a_seat_and_the_audit_log_has_it() -> None:
    with live_broker(pools={"default": {"wait_bound": "100%"}}) as live:
        actions = Actions(live.socket)

        def take() -> str:
            with SeatClient(live.socket) as client:
                return list(client.take_seat(SeatRequest(owner="ada", pool="default", fraction_milli=250)))[-1].seat_id

        def seats() -> int:
            with SeatClient(live.socket) as client:
                return len(client.seats().seats)

        seat_id = await asyncio.to_thread(take)
        with pytest.raises(ForbiddenError):
            await actions.act(Viewer(name="ada", admin=False), "seats", seat_id, "release", CONFIRMED)
        with pytest.raises(BadRequestError, match="send confirm = true"):
            await actions.act(Viewer(name="grace", admin=True), "seats", seat_id, "release", b"{}")
        assert await asyncio.to_thread(seats) == 1
        assert await actions.act(Viewer(name="grace", admin=True), "seats", seat_id, "release", CONFIRMED) == {
            "ok": True
        }
        assert await asyncio.to_thread(seats) == 0
        written = [json.loads(line) for line in Path(live.service.audit.path).read_text().splitlines()]
        done = {(line["act"], line["acting_for"]) for line in written if line["outcome"] == "done"}
        assert ("seat.end", "grace") in done
