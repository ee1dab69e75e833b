"""Clients and brokers of different versions work together within one protocol number; otherwise both versions are named, and what to do."""

import pytest

from fractional_gpu import __version__
from fractional_gpu.client import discovery
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.codec import changed_fields
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.limits import PROTOCOL_VERSION, VERSION_HEADER
from fractional_gpu.protocol.messages import LeaseRequest, Pong
from tests.broker.live import LiveBroker

pytestmark = pytest.mark.promise("versions")

LATER = f"99.1; protocol={PROTOCOL_VERSION}"


class LaterLeaseRequest(LeaseRequest, frozen=True, kw_only=True):
    """What a later version may ask."""

    colour: str = "any"


@pytest.mark.parametrize(
    "other", [f"7.5; protocol={PROTOCOL_VERSION + 1}", "", "x", "1; protocol=", "1; protocol=9" * 99, "\xff"]
)
def test_a_client_of_another_protocol_is_told_both_versions_and_what_to_do(live: LiveBroker, other: str) -> None:
    header = {VERSION_HEADER: other}
    assert live.call("GET", "/v1/ping", **header).body["protocol"] == PROTOCOL_VERSION
    for method, target in (("GET", "/v1/status"), ("POST", "/v1/leases"), ("GET", "/v1/nowhere")):
        answer = live.call(method, target, **header)
        assert (answer.status, answer.error["reason"]) == (400, "version")
        message = answer.error["message"]
        assert message.isascii()
        assert len(message) < 400
        assert f"'{__version__}; protocol={PROTOCOL_VERSION}' and its client {other[:60]!a}" in message
        assert "install the same version of jupyter-fractional-gpu on both sides" in message


def test_requests_without_a_version_and_of_a_later_release_are_served(live: LiveBroker) -> None:
    assert live.call("GET", "/v1/status").status == 200
    assert live.call("GET", "/v1/status", **{VERSION_HEADER: LATER}).status == 200


def test_a_later_client_that_asks_nothing_new_is_understood(live: LiveBroker) -> None:
    assert changed_fields(LaterLeaseRequest(fraction_milli=250, label="x")) == {"fraction_milli": 250, "label": "x"}
    with BrokerClient(live.socket) as speaker:
        speaker.release(speaker.create_lease(LaterLeaseRequest(fraction_milli=250)).lease_id)


def test_a_client_does_not_begin_with_a_broker_of_another_protocol(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pong = Pong(version="99.1", protocol=PROTOCOL_VERSION + 1, pid=1, simulated=True)
    monkeypatch.setattr(BrokerClient, "ping", lambda *_: pong)
    monkeypatch.setattr(discovery, "check_folder", lambda _: None)
    with pytest.raises(BrokerUnavailableError, match=rf"'99.1; protocol=2' and its client '{__version__}; protocol=1'"):
        discovery.ensure_broker(live.socket)
