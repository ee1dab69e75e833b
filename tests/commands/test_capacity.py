"""`jupyter gpu capacity`: what a pool can still give, for people and for programs."""

import json

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.main import main
from fractional_gpu.protocol.seats import SeatRequest
from tests.broker.live import live_broker


def test_it_says_what_is_held_and_what_more_is_granted(capsys: pytest.CaptureFixture[str]) -> None:
    with live_broker(pools={"default": {"wait_bound": "100%", "oversubscription": 2}}) as live:
        with SeatClient(live.socket) as client:
            list(client.take_seat(SeatRequest(owner="ada", pool="default", fraction_milli=250)))
        assert main(["capacity", "--socket", live.socket]) == 0
        shown = capsys.readouterr().out
        assert "pool default: 1 GPU, 1/4 GPU held, 1.75 GPUs available now" in shown
        assert "free for saved state" in shown
        assert main(["capacity", "--json", "--socket", live.socket]) == 0
        (pool,) = json.loads(capsys.readouterr().out)["pools"]
        assert (pool["held_milli"], pool["admissible_milli"], pool["total_milli"]) == (250, 1750, 1000)
