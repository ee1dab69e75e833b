"""A fake broker for commands, which control their own user's leases without a token."""

from collections.abc import Iterator
from typing import Any

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.fake_broker import Call, FakeBroker


class OwnBroker(FakeBroker):
    """Lets the caller control everything, as the real one does with a user's own leases."""

    def answer(self, call: Call, token: str) -> dict[str, Any]:
        lease = self.leases.get(call.lease_id)
        return super().answer(call, token if lease is None else lease.token)

    def add(self, state: str, *, kernel_id: str = "", label: str = "") -> str:
        """Make a lease in that state and return its id."""
        with BrokerClient(self.path) as client:
            reply = client.create_lease(LeaseRequest(fraction_milli=250, kernel_id=kernel_id, label=label))
        self.leases[reply.lease_id].state = state
        return reply.lease_id


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnBroker]:
    """A broker that commands find automatically."""
    socket = str(tmp_path_factory.mktemp("s") / "b.sock")
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", socket)
    with OwnBroker(socket) as broker:
        yield broker
