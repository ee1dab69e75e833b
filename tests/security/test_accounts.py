"""A user who runs processes with many uids counts as one user, and sees and controls no other user's leases."""

import logging
import pwd
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.broker.api import lease_service, routes, server
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.config import ConfigError, load
from fractional_gpu.host.accounts import ACCOUNTS, Accounts
from fractional_gpu.protocol.seats import SeatRequest
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker
from tests.support.callers import Caller, caller

pytestmark = pytest.mark.promise("one-user")

FIRST, SECOND = 300_000, 300_007  # two of nobody's subordinate uids
UNKNOWN, OTHER = 400_000, 400_001
NOBODY = pwd.getpwnam("nobody").pw_uid


@pytest.fixture(autouse=True)
def _subuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "subuid"
    path.write_text(f"nobody:{FIRST}:10\n")
    monkeypatch.setattr(ACCOUNTS, "__dict__", vars(Accounts(path)))


@contextmanager
def callers(live: LiveBroker, *uids: int) -> Iterator[list[Caller]]:
    """A process for each uid."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(caller(live.socket, first=f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({uid})"))
            for uid in uids
        ]


def ask(who: Caller, token: str = "", **fields: Any) -> tuple[int, Any]:  # noqa: ANN401 - LeaseRequest's
    return who.call("POST", "/v1/leases", token, {"fraction_milli": 125, **fields})


def taken(who: Caller, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    """A lease whose kernel runs on the device."""
    status, lease = ask(who, gated=False, wait_ms=10_000, **fields)
    assert status == 200, lease
    own = who.start_for(lease["lease_id"])
    status, attached = who.call("POST", f"/v1/leases/{lease['lease_id']}/attach", lease["token"], own)
    assert (status, attached["lease"]["state"]) == (200, "resident"), attached
    assert isinstance(lease, dict)
    return lease


def owners(live: LiveBroker) -> list[str]:
    return [lease["lease"]["spec"]["owner"] for lease in live.call("GET", "/v1/status").body["leases"]]


def test_subordinate_uids_and_their_owner_have_the_limits_of_one_user() -> None:
    limits = {"default": {"user_limits": {"leases": 2}}}
    with live_broker(pools=limits) as live, callers(live, FIRST, SECOND, NOBODY, UNKNOWN) as (one, two, owner, other):
        assert [ask(who)[0] for who in (one, two)] == [200, 200]
        for who in (one, two, owner):
            status, refused = ask(who)
            assert (status, "user 'nobody' has 2" in refused["error"]["message"]) == (409, True), refused
        assert ask(other)[0] == 200, "each user has separate limits"
        assert sorted(owners(live)) == ["nobody", "nobody", f"uid {UNKNOWN}"]


def test_subordinate_uids_and_their_owner_have_the_limits_of_one_group() -> None:
    group = "nogroup"
    limits = {"default": {"group_limits": {group: {"leases": 1}}}}
    with live_broker(pools=limits) as live, callers(live, FIRST, NOBODY) as (one, owner):
        assert [ask(who)[0] for who in (one, owner)] == [200, 409]


def test_subordinate_uids_and_their_owner_have_as_many_leases_as_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_service, "MAX_LEASES_PER_UID", 2)
    with live_broker() as live, callers(live, FIRST, SECOND, NOBODY, UNKNOWN) as (one, two, owner, other):
        assert [ask(who)[0] for who in (one, two)] == [200, 200]
        status, refused = ask(owner)
        assert (status, refused["error"]["reason"]) == (413, "too-many-leases-of-a-user")
        assert refused["error"]["message"].startswith("user nobody already has 2 leases, the maximum per user")
        assert ask(other)[0] == 200


def test_subordinate_uids_and_their_owner_have_the_connections_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with live_broker() as live, callers(live, FIRST, SECOND, NOBODY, UNKNOWN) as (one, two, owner, other):
        assert [who.call("GET", "/v1/ping")[0] for who in (one, two)] == [200, 200], "each keeps its connection"
        status, refused = owner.call("GET", "/v1/ping")
        assert (status, refused["error"]["reason"]) == (429, "too-many-connections")
        assert refused["error"]["message"].startswith("user nobody has 2 open connections")
        assert other.call("GET", "/v1/ping")[0] == 200


def test_what_subordinate_uids_cost_the_broker_is_charged_to_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "COST_WAIT_S", 0.05)
    with live_broker() as live, callers(live, FIRST, NOBODY, UNKNOWN) as (one, owner, other):

        async def overdraw() -> None:
            account = live.broker.costs.of_user(FIRST)
            account.charge(account.left_s + 5)

        live.on_loop(overdraw)
        assert [who.call("GET", "/v1/ping")[0] for who in (one, owner, other)] == [429, 429, 200]


def test_subordinate_uids_and_their_owner_leave_as_many_lines_in_the_log_as_one_user(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "LOG_LINES_BURST", 2.0)
    monkeypatch.setattr(routes, "LOG_LINES_PER_S", 1 / 3600)
    caplog.set_level(logging.INFO)
    with live_broker() as live, callers(live, FIRST, SECOND, NOBODY, UNKNOWN) as every:
        assert [who.call("GET", f"/v1/nowhere-{number}")[0] for number, who in enumerate(every)] == [404] * 4
    logged = [number for number in range(4) if f"/v1/nowhere-{number} refused" in caplog.text]
    assert logged == [0, 1, 3]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [f"uid {UNKNOWN}", f"uid {OTHER}"]), ({"account_of_unknown_uids": "daemon"}, ["daemon", "daemon"])],
    ids=["by default", "with an account for them"],
)
def test_uids_without_a_user_are_users_of_their_own_or_one_account(
    settings: dict[str, str], expected: list[str]
) -> None:
    with live_broker(**settings) as live, callers(live, UNKNOWN, OTHER, FIRST) as uids:
        assert [ask(who)[0] for who in uids] == [200, 200, 200]
        assert sorted(owners(live)) == sorted([*expected, "nobody"])


def test_an_account_that_the_machine_lacks_is_refused() -> None:
    where = r"c\.GPUBroker\.account_of_unknown_uids = 'no-such-user': this host has no such user"
    with pytest.raises(ConfigError, match=where):
        load(None, {"account_of_unknown_uids": "no-such-user"})


def test_a_kernel_of_a_seat_counts_for_the_seats_owner_whatever_its_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_service, "MAX_LEASES_PER_UID", 1)
    with live_broker(pools={"default": {"wait_bound": "100%"}}) as live, callers(live, FIRST, SECOND) as (one, two):
        request = SeatRequest(owner="ada", server="s", pool="default", fraction_milli=500, admitted=True)
        with SeatClient(live.socket, timeout_s=DEADLINE_S) as client:
            seat = list(client.take_seat(request))[-1]
        assert [ask(who, seat.token, seat=seat.seat_id)[0] for who in (one, two)] == [200, 200]
        assert owners(live) == ["ada", "ada"]


@pytest.mark.parametrize("settings", [{}, {"account_of_unknown_uids": "nobody"}], ids=["owner", "account"])
def test_who_shares_an_account_neither_sees_nor_steers_the_others_leases(settings: dict[str, str]) -> None:
    """The owner has no access through its subordinates, and they have none to the owner's or each other's leases."""
    uids = (FIRST, SECOND) if not settings else (UNKNOWN, OTHER)
    with live_broker(**settings) as live, callers(live, *uids, NOBODY) as every:
        leases = [taken(who, label=f"secret-{number}.ipynb") for number, who in enumerate(every)]
        assert owners(live) == ["nobody"] * 3
        for who, own in zip(every, leases, strict=True):
            _, status = who.call("GET", "/v1/status")
            assert [lease["lease"]["spec"]["lease_id"] for lease in status["leases"]] == [own["lease_id"]]
            _, shown = who.call("GET", f"/v1/leases/{own['lease_id']}")
            assert [neighbour["label"] for neighbour in shown["neighbours"]] == ["", ""]
            for lease in leases:
                route = f"/v1/leases/{lease['lease_id']}"
                if lease is own:
                    continue
                for token in ("", own["token"], lease["token"]):
                    assert who.call("GET", route, token)[0] == 404
                    assert who.call("POST", f"{route}/suspend", token, {})[0] == 404
                    who.call("DELETE", route, token)  # a lease that is not the caller's counts as already ended
        assert owners(live) == ["nobody"] * 3


def test_a_subordinate_uid_sees_the_budget_that_it_draws_on() -> None:
    budgets = [{"user": "nobody", "limit": "40 GPU hours", "per": "month"}]
    with live_broker(budgets=budgets) as live, callers(live, FIRST, UNKNOWN) as (one, other):
        for who, expected in ((one, ["nobody"]), (other, [])):
            status, listed = who.call("GET", "/v1/budgets")
            assert (status, [budget["name"] for budget in listed["budgets"]]) == (200, expected)


@pytest.mark.parametrize("settings", [{}, {"account_of_unknown_uids": "nobody"}], ids=["owner", "account"])
def test_who_shares_an_account_sees_no_notebooks_of_the_account(settings: dict[str, str]) -> None:
    uid = UNKNOWN if settings else FIRST
    with live_broker(**settings) as live, callers(live, uid, NOBODY) as (other, owner):
        taken(owner, label="secret.ipynb")
        mine = taken(other, label="mine.ipynb")
        for route in ("/v1/usage?by=notebook", "/v1/usage?by=user", f"/v1/leases/{mine['lease_id']}/cost"):
            status, report = other.call("GET", route)
            assert status == 200, report
            assert "secret" not in str(report)
