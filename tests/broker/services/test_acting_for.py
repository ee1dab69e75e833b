"""For which user an administrator's program asks: any name is accepted, but only from an administrator."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.broker.api import server
from fractional_gpu.broker.api.handler import Handler
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.protocol.names import MAX_ACTING_FOR, decode_acting_for, encode_acting_for
from tests.broker.live import LiveBroker

NAMES = st.text(min_size=1, max_size=MAX_ACTING_FOR).filter(lambda name: name.isprintable() and not name.isspace())


@given(name=NAMES)
def test_any_printable_name_survives_the_header(name: str) -> None:
    value = encode_acting_for(name)
    assert value.isascii()
    assert value.isprintable()
    assert " " not in value
    assert decode_acting_for([value]) == name


@pytest.mark.parametrize("name", ["", " ", "ada\n", "a\0b", "\x1b[2J", "x" * 256, "\ud800", "one\r\nX-Evil: two"])
def test_what_is_no_name_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(BadRequestError, match="expected a name of 1 to 255 printable characters"):
        BrokerClient("/nowhere", acting_for=name)


@pytest.fixture
def heard(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return the users for which the broker took the requests, in order."""
    del live
    names: list[str | None] = []
    prepare = Handler.prepare

    def noting(self: Handler) -> None:
        prepare(self)
        names.append(self.peer.acting_for)

    monkeypatch.setattr(Handler, "prepare", noting)
    return names


def test_an_administrators_program_is_believed(live: LiveBroker, heard: list[str | None]) -> None:
    with BrokerClient(live.socket) as plain, SeatClient(live.socket, acting_for="Zoë Ünal 雪") as acting:
        plain.ping()
        acting.ping()
        acting.seats()
    assert live.call("GET", "/v1/ping", **{"X-Acting-For": "ada@example.org"}).status == 200
    assert heard == [None, "Zoë Ünal 雪", "Zoë Ünal 雪", "ada@example.org"]


@pytest.mark.parametrize("value", [quote("a\nb"), "%ff", "", "%20", "x" * 256, "a%00"])
def test_a_header_that_is_no_name_is_refused(live: LiveBroker, value: str) -> None:
    answer = live.call("GET", "/v1/ping", **{"X-Acting-For": value})
    assert (answer.status, answer.error["reason"]) == (400, "bad-acting-for")


def test_two_names_are_refused(live: LiveBroker) -> None:
    twice = b"X-Acting-For: ada\r\nX-Acting-For: bob\r\n"
    reply = live.raw(b"GET /v1/ping HTTP/1.1\r\nHost: broker\r\n" + twice + b"Connection: close\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"was sent 2 times" in reply


def test_from_who_is_no_administrator_it_is_refused_whatever_it_says(
    live: LiveBroker, heard: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server, "peer_credentials", lambda _: PeerCredentials(1, 65_534, 65_534))
        for value in ("root", "%ff", ""):
            answer = live.call("GET", "/v1/ping", **{"X-Acting-For": value})
            assert (answer.status, answer.error["reason"]) == (403, "not-admin")
        assert live.call("GET", "/v1/ping").status == 200
    assert heard == [None]
