"""Endless connections, even when the broker can open no file, block neither its loop nor a core."""

import asyncio
import uuid
from collections.abc import Iterator

import pytest

from fractional_gpu.broker.api import server
from fractional_gpu.broker.api.server import drain_claim_queries
from fractional_gpu.host.claims import DeviceClaim, DeviceClaimedError
from tests.broker.live import DEADLINE_S
from tests.support.descriptors import no_free_descriptors

DEVICE = f"GPU-{uuid.uuid4()}"


class Drained(DeviceClaim):
    """A claim that counts how often it was drained, and from how many."""

    calls = 0
    forgotten = 0
    drained: asyncio.Event | None = None

    def drain(self) -> int:
        self.calls += 1
        asked = super().drain()
        self.forgotten += asked
        if self.drained is not None:
            self.drained.set()
        return asked

    async def has_forgotten(self, times: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.forgotten < times:
                self.drained = asyncio.Event()
                await self.drained.wait()


@pytest.fixture
def claim() -> Iterator[Drained]:
    with Drained.claim(DEVICE) as claim:
        yield claim


def ask(times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(DeviceClaimedError):
            DeviceClaim.claim(DEVICE)


async def turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_all_who_ask_who_holds_a_device_are_forgotten(claim: Drained) -> None:
    drain_claim_queries(claim)
    ask(200)
    await turns()
    assert claim.forgotten == 200
    assert claim.calls > 1, "no other request had a turn in between"


async def test_a_claim_is_drained_again_when_there_are_descriptors(
    claim: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PAUSE_S", 0.01)
    drain_claim_queries(claim)
    ask()
    with no_free_descriptors():
        await turns()
    assert claim.forgotten == 0
    await claim.has_forgotten(1)
    ask()
    await claim.has_forgotten(2)
