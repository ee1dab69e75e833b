"""Another version at the other end works as far as both go, and what does not is said with both versions and what to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu import __version__
from fractional_gpu.client import client, discovery, http
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.codec import changed_fields
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError, NotFoundError
from fractional_gpu.protocol.limits import VERSION_HEADER
from fractional_gpu.protocol.messages import Done, LeaseRequest
from fractional_gpu.protocol.names import OWN, Version, hint, refusal
from fractional_gpu.protocol.routes import ANYONE, Nothing, Route
from tests.broker.live import LiveBroker

NEWER = Version("99.1", OWN.protocol + 1)
LATER = Version("99.1", OWN.protocol)


class LaterLeaseRequest(LeaseRequest, frozen=True, kw_only=True):
    """What a later version may ask."""

    colour: str = "any"


@pytest.mark.parametrize(
    ("other", "older"),
    [(OWN.protocol + 1, "where the broker is installed"), (OWN.protocol - 1, "in this environment")],
)
def test_a_client_of_another_protocol_is_told_both_versions_and_which_to_update(
    live: LiveBroker, other: int, older: str
) -> None:
    header = {VERSION_HEADER: f"7.5; protocol={other}"}
    assert live.call("GET", "/v1/ping", **header).body["protocol"] == OWN.protocol
    for method, target in (("GET", "/v1/status"), ("POST", "/v1/leases"), ("GET", "/v1/nowhere")):
        answer = live.call(method, target, **header)
        assert (answer.status, answer.error["reason"]) == (400, "version")
        message = answer.error["message"]
        assert (
            f"(version {__version__}) speaks protocol {OWN.protocol} and its client (version 7.5) protocol {other}"
            in message
        )
        assert older in message


UNREADABLE = [
    "",
    "x",
    "1; protocol=",
    "1; protocol=-1",
    "0.3.1; protocol=99999999999999999999999999",
    "1; protocol=9" * 99,
    "1; protocol=1, 1; protocol=1",
    "1; protocol=٣",
    "\xff",
]


@pytest.mark.parametrize("header", UNREADABLE)
def test_a_version_that_cannot_be_read_is_refused_with_what_is_allowed(live: LiveBroker, header: str) -> None:
    answer = live.call("GET", "/v1/status", **{VERSION_HEADER: header.encode("utf-8").decode("latin-1")})
    assert (answer.status, answer.error["reason"]) == (400, "bad-version")
    message = answer.error["message"]
    assert message.isascii()
    assert len(message) < 300
    assert f"such as {OWN.to_header()!r}, or no such header" in message


def test_a_request_without_a_version_is_served(live: LiveBroker) -> None:
    assert live.call("GET", "/v1/status").status == 200


def test_a_client_takes_a_broker_whose_version_cannot_be_read_for_one_that_names_none(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Version, "to_header", lambda _: "x")
    with BrokerClient(live.socket) as speaker, pytest.raises(NotFoundError, match=r"of yours; .* lists them$"):
        speaker.lease("nobody")


def test_this_version_can_be_read() -> None:
    assert Version.from_header(OWN.to_header()) == OWN


def test_a_later_client_that_asks_nothing_new_is_understood(live: LiveBroker) -> None:
    assert changed_fields(LaterLeaseRequest(fraction_milli=250, label="x")) == {"fraction_milli": 250, "label": "x"}
    with BrokerClient(live.socket) as speaker:
        speaker.release(speaker.create_lease(LaterLeaseRequest(fraction_milli=250)).lease_id)


def test_a_later_client_that_asks_something_new_is_told_both_versions(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "OWN", LATER)
    monkeypatch.setattr(http, "_VERSION", f"{VERSION_HEADER}: {LATER.to_header()}")
    both = rf"the GPU broker is version {__version__} and its client version 99.1: "
    with BrokerClient(live.socket) as speaker:
        with pytest.raises(BadRequestError, match=f"unknown field 'colour'.*{both}"):
            speaker.create_lease(LaterLeaseRequest(fraction_milli=250, colour="green"))
        with pytest.raises(NotFoundError, match=f"no such route.*{both}"):
            speaker.call(Route("paint", "POST", "/v1/paint", Nothing, Done, ANYONE, ""))
        with pytest.raises(NotFoundError, match=r"there is no lease 'nobody' of yours[^(]*$"):
            speaker.lease("nobody")


def test_a_client_does_not_begin_with_a_broker_of_another_protocol(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "OWN", NEWER)
    monkeypatch.setattr(discovery, "check_folder", lambda _: None)
    with pytest.raises(
        BrokerUnavailableError, match=rf"version {__version__}\) speaks protocol 1 .*version 99.1\) protocol 2"
    ):
        discovery.ensure_broker(live.socket)


@given(st.text(max_size=60) | st.from_regex(r"[0-9a-z.+]{1,42}; protocol=[0-9]{1,8}", fullmatch=True))
def test_any_header_is_a_version_or_refused(text: str) -> None:
    try:
        version = Version.from_header(text)
    except BadRequestError as error:
        assert len(str(error)) < 300  # noqa: PT017 - most texts are refused
        return
    assert version is not None
    assert version.to_header().isascii()
    assert Version.from_header(version.to_header()) == version
    assert bool(refusal(client=OWN, broker=version)) == (version.protocol != OWN.protocol)
    assert bool(hint(client=OWN, broker=version)) == (version.release != OWN.release)
