"""`jupyter gpu budget`: what is left, and an administrator's addition, which is in the audit log."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.main import main
from fractional_gpu.core.metering.usage import SHARE_HOUR, Party, Usage, UsageRow
from fractional_gpu.protocol.seats import OfferRequest, SeatRequest
from tests.broker.live import LiveBroker, live_broker

pytestmark = pytest.mark.promise("budgets")

BUDGETS = [
    {"user": "*", "limit": "40 GPU hours", "per": "month"},
    {"group": "students", "limit": "10 GPU hours", "per": "week"},
]
POOLS = {"default": {"over_budget": "no-new-seats", "groups": {"students": {}}, "wait_bound": "100%"}}


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker(budgets=BUDGETS, pools=POOLS) as live:
        yield live


def spend(live: LiveBroker, owner: str, hours: float, *, seated: bool = False) -> None:
    """The meter has counted this much of a student."""
    share = int(hours * SHARE_HOUR)
    row = UsageRow.of(
        int(time.time()) // 3600 * 3600,
        "",
        Party("default", owner, "students", seated=seated),
        Usage(charged_share=share),
    )

    async def count() -> None:
        live.service.seats.budgets.counted([row])

    live.on_loop(count)


def budget(live: LiveBroker, capsys: pytest.CaptureFixture[str], *words: str) -> Any:  # noqa: ANN401 - JSON
    assert main(["budget", *words, "--json", "--socket", live.socket]) == 0
    return json.loads(capsys.readouterr().out)["budgets"]


def take(live: LiveBroker, owner: str) -> str:
    request = SeatRequest(owner=owner, groups=["students"], pool="default", fraction_milli=125)
    with SeatClient(live.socket) as client:
        last = list(client.take_seat(request))[-1]
    return last.seat_id or last.reason


def test_a_hubs_user_and_one_of_the_machine_with_the_same_name_are_added_to_apart(
    live: LiveBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    spend(live, "ada", 4)
    spend(live, "ada", 40, seated=True)
    budget(live, capsys, "--group", "students", "--add", "100 GPU hours")  # this test is not about that budget
    assert main(["budget", "--user", "ada", "--socket", live.socket]) == 0
    hub, machine = capsys.readouterr().out.splitlines()
    assert hub.startswith("user ada (hub): 40.0 GPU hours per month: 40.0 GPU hours spent, used up")
    assert machine.startswith("user ada (machine): 40.0 GPU hours per month: 4.0 GPU hours spent, 36.0 GPU hours left")
    assert take(live, "ada") == "over-budget"
    (more,) = budget(live, capsys, "--user", "ada", "--account", "machine", "--add", "10 GPU hours")
    assert (more["account"], more["amount_text"]) == ("machine", "50.0 GPU hours")
    assert take(live, "ada") == "over-budget"
    budget(live, capsys, "--user", "ada", "--account", "hub", "--add", "10 GPU hours")
    assert take(live, "ada") not in {"over-budget", "refused"}
    assert len(budget(live, capsys, "--user", "ada", "--account", "hub")) == 1
    assert main(["budget", "--group", "students", "--account", "hub", "--socket", live.socket]) == 2
    assert "--account hub needs --user NAME" in capsys.readouterr().err


def test_what_is_left_is_listed(live: LiveBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "--socket", live.socket]) == 0
    assert "no budget applies" in capsys.readouterr().out
    spend(live, "ada", 4)
    spend(live, "eve", 5)
    assert main(["budget", "--socket", live.socket]) == 0
    first, ada, _ = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "group students: 10.0 GPU hours per week: 9.0 GPU hours spent, 1.0 GPU hours left; resets 20"
    )
    assert ada.startswith("user ada: 40.0 GPU hours per month: 4.0 GPU hours spent, 36.0 GPU hours left; resets 20")
    assert [one["name"] for one in budget(live, capsys, "--user", "eve")] == ["eve"]
    assert [one["name"] for one in budget(live, capsys, "--group", "students")] == ["students"]


def test_two_users_race_for_the_last_of_a_groups_budget(live: LiveBroker, capsys: pytest.CaptureFixture[str]) -> None:
    spend(live, "ada", 9.99)
    assert "over-budget" not in {take(live, "ada"), take(live, "eve")}  # nothing is reserved: both may use the rest
    spend(live, "eve", 0.02)
    assert {take(live, name) for name in ("ada", "eve", "mia")} == {"over-budget"}
    with SeatClient(live.socket) as client:
        (offer,) = client.offers(OfferRequest(owner="mia", groups=["students"])).pools
        assert "The budget of the group 'students' of 10.0 GPU hours per week is used up" in offer.why_not
        assert len(client.seats().seats) == 2  # running ones continue
    (mine,) = budget(live, capsys, "--group", "students", "--add", "5 GPU hours")
    assert (mine["amount"], mine["used_up"]) == (15 * SHARE_HOUR, False)
    assert take(live, "mia") != "over-budget"
    with SeatClient(live.socket) as client:
        (offer,) = client.offers(OfferRequest(owner="eva", groups=["students"])).pools
        assert offer.budget == (
            "5.0 GPU hours of 10.0 GPU hours per week left; 40.0 GPU hours of 40.0 GPU hours per month left"
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--add", "10 EUR"], "--add needs --user or --group"),
        (["--until", "7d"], "--until can only be used with --add"),
        (["--user", "ada", "--add", "much"], "expected an amount and its unit"),
        (["--user", "ada", "--add", "10 EUR"], "has no budget in the same unit as '10 EUR'"),
        (["--user", "ada", "--add", "1 GPU hour", "--until", "soon"], "--until 'soon' is not valid"),
        (["--user", "ada", "--add", "1 GPU hour", "--until", "2020-01-01"], "is in the past"),
    ],
)
def test_a_slip_is_told_in_one_line(
    live: LiveBroker, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["budget", *words, "--socket", live.socket]) in {1, 2}
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
