"""`jupyter gpu seats`: an administrator sees the seats and ends one, which the audit log records."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.main import main
from fractional_gpu.commands.seats import find_seat
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.protocol.seats import SeatRequest
from fractional_gpu.protocol.status import SeatStatus
from tests.broker.live import LiveBroker, live_broker


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker(pools={"default": {"wait_bound": "100%"}}) as live:
        yield live


def take(live: LiveBroker, owner: str, server: str = "") -> str:
    request = SeatRequest(owner=owner, server=server, pool="default", fraction_milli=250)
    with SeatClient(live.socket) as client:
        return list(client.take_seat(request))[-1].seat_id


def seats(live: LiveBroker) -> list[SeatStatus]:
    with SeatClient(live.socket) as client:
        return client.seats().seats


def test_a_seat_is_listed_and_released_by_the_name_of_its_server(
    live: LiveBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["seats", "--socket", live.socket]) == 0
    assert capsys.readouterr().out == "no server has a seat\n"
    first, big = take(live, "ada"), take(live, "ada", "big")
    assert main(["seats", "--socket", live.socket]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in listed] == [first[:8], big[:8]]
    assert "ada/big: 1/4 GPU, 256 MiB, of pool default; 0 kernels" in listed[1]

    assert main(["seats", "release", "ada/big", "--socket", live.socket]) == 0
    assert "the seat of ada/big (1/4 GPU, 256 MiB, of pool default) has ended" in capsys.readouterr().out
    assert main(["seats", "--json", "--socket", live.socket]) == 0
    (left,) = json.loads(capsys.readouterr().out)["seats"]
    assert left["seat_id"] == first
    assert main(["seats", "release", first[:8], "--json", "--socket", live.socket]) == 0
    assert json.loads(capsys.readouterr().out)["released"]["owner"] == "ada"
    assert seats(live) == []
    written = [json.loads(line) for line in Path(live.service.audit.path).read_text().splitlines()]
    assert [line["object"] for line in written if (line["act"], line["outcome"]) == ("seat.end", "done")] == [
        "ada/big",
        "ada",
    ]


def test_a_seat_that_is_not_there_or_not_clear_is_refused_with_what_there_is(
    live: LiveBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    seat = take(live, "ada")
    assert main(["seats", "release", "bob", "--socket", live.socket]) == 1
    assert "there is no seat 'bob'; existing seats: ada" in capsys.readouterr().err
    assert main(["seats", "release", "--socket", live.socket]) == 2
    assert "say which seat to release" in capsys.readouterr().err
    (one,) = seats(live)
    with pytest.raises(CommandError, match="matches 2 seats; give the id of one"):
        find_seat(seat[:6], [one, replace(one, owner="bob", seat_id=f"{seat[:6]}0")])
