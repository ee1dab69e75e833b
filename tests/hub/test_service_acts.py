"""What pages ask for is taken back when they go away."""

import asyncio
import threading
from pathlib import Path

import pytest

from hub_spawner.service.acts import Acts
from hub_spawner.service.views import Viewer
from tests.support.fake_broker import DEADLINE_S, FakeBroker, FakeLease

LEASE = {"pool": "default", "label": "", "kernel_id": "k", "fraction_milli": 250, "gated": True}


@pytest.mark.parametrize("admin", [False, True], ids=["a user, whose kernel is looked up first", "an administrator"])
async def test_a_page_that_goes_away_takes_a_waiting_resume_back(
    tmp_path_factory: pytest.TempPathFactory, admin: bool
) -> None:
    socket: Path = tmp_path_factory.mktemp("s") / "b.sock"
    with FakeBroker(str(socket)) as broker:
        broker.leases["lease-1"] = FakeLease(request=LEASE, token="", state="suspended")
        broker.extra["seat"] = "seat-1"
        held = broker.held["resume"] = threading.Event()
        acts = Acts(broker.path)
        asked = asyncio.ensure_future(acts.lease(Viewer(name="me", admin=admin), "lease-1", "resume", {}))
        await asyncio.to_thread(broker.wait_for, lambda: "resume" in broker.routes())
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.to_thread(acts._threads.shutdown)  # its thread has ended
        finally:
            held.set()
        assert broker.routes().count("resume") == 1
