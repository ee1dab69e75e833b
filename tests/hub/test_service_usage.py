"""Which figures each user may read on the hub's pages: the service's handlers, a real broker with figures, and a scripted hub.

`ada`, `bob` and `eve` are users of the hub, and a user of the machine is called `ada`, too.
"""

import asyncio
import csv
import http.client
import io
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from html import unescape
from typing import Any, cast

import jinja2
import pytest
from jupyterhub.services.auth import HubOAuth
from msgspec.structs import replace
from tornado import web

from fractional_gpu.broker.accounting.habits import offered_shares
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.forecasts.habits import HabitKey, HabitKind
from fractional_gpu.core.metering.usage import SHARE_HOUR, Party, Usage, UsageKey, UsageRow
from fractional_gpu.protocol.accounts import BudgetList, UsageEntry, UsageReport
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu_hub.service import app, usage
from fractional_gpu_hub.service.actions import Actions
from fractional_gpu_hub.service.broker_follower import BrokerFollower
from fractional_gpu_hub.service.cluster import ClusterFollower
from fractional_gpu_hub.service.configuration import ADMIN_SCOPE, READ_SCOPE
from fractional_gpu_hub.service.views import Viewer
from tests.broker.live import LiveBroker, live_broker
from tests.hub.test_service_trust import ACCESS, serving
from tests.kernelext.statuses import ADVICE
from tests.support.share_days import days_of_little_use

pytestmark = pytest.mark.promise("usage-privacy")

PREFIX = "/services/gpu/"
OTHERS = re.compile(r"bob|eve|carol|secret")


class Hub(web.RequestHandler):
    """Says which user has a token: the token is the user's name."""

    users: Mapping[str, dict[str, Any]] = {}

    def get(self) -> None:
        name = self.request.headers["Authorization"].removeprefix("token ")
        if name not in self.users:
            raise web.HTTPError(404)
        self.finish({"kind": "user", "name": name, "groups": [], **self.users[name]})


USERS: dict[str, dict[str, Any]] = {
    "ada": {"scopes": [ACCESS, READ_SCOPE], "groups": ["lab"]},
    "left": {"scopes": [ACCESS, READ_SCOPE], "groups": []},
    "grace": {"scopes": [ACCESS, READ_SCOPE, ADMIN_SCOPE], "groups": []},
    "nobody": {"scopes": [ACCESS]},
    "robot": {"kind": "service", "scopes": [ACCESS, READ_SCOPE, ADMIN_SCOPE]},
}


def _row(owner: str, milli: int, *, group: str = "", seated: bool = True, days_ago: int = 0) -> UsageRow:
    hour_s = int(time.time()) // 3600 * 3600 - 86_400 * days_ago
    key = UsageKey(hour_s, f"lease-{owner}-{seated}", "GPU-0", "EUR")
    party = Party("default", owner=owner, group=group, label=f"secret of {owner}.ipynb" if owner else "", seated=seated)
    figures = Usage(charge_milli=milli, resident_milli=milli, charged_share=SHARE_HOUR, reserved_share=SHARE_HOUR)
    return UsageRow(key, party, figures)


def rows_of_now() -> list[UsageRow]:
    return [
        _row("ada", 1_234, group="lab"),
        _row("ada", 40_000, seated=False),
        _row("bob", 5_005, group="lab"),
        _row("eve", 600_006, group="other"),
        _row("carol", 7_000_007),
        _row("", 0, seated=False),
    ]


@contextmanager
def broker(visible: str, rows: Sequence[UsageRow] | None = None) -> Iterator[LiveBroker]:
    with live_broker(usage_visible=visible) as live:

        async def write() -> None:
            live.disk.add_metered(rows_of_now() if rows is None else rows, "{}")

        live.on_loop(write)
        yield live


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: str

    @property
    def text(self) -> str:
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.body)).split())


class Service:
    def __init__(self, port: int) -> None:
        self.port = port

    async def get(self, path: str, user: str | None = "ada") -> Answer:
        return await asyncio.to_thread(self._get, path, user)

    def _get(self, path: str, user: str | None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", PREFIX + path, headers={} if user is None else {"Authorization": f"token {user}"})
            reply = connection.getresponse()
            return Answer(reply.status, reply.headers, reply.read().decode())
        finally:
            connection.close()


@asynccontextmanager
async def service(
    socket: str, monkeypatch: pytest.MonkeyPatch, cluster: ClusterFollower | None = None
) -> AsyncIterator[Service]:
    monkeypatch.setenv("JUPYTERHUB_OAUTH_ACCESS_SCOPES", json.dumps([ACCESS]))
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", PREFIX)
    monkeypatch.setenv("JUPYTERHUB_CLIENT_ID", "service-gpu")
    monkeypatch.setattr(Hub, "users", USERS)
    async with serving(web.Application([(r"/hub/api/user", Hub)])) as hub:
        auth = HubOAuth(api_url=f"http://127.0.0.1:{hub}/hub/api", api_token="the service's", base_url=PREFIX)  # noqa: S106
        monkeypatch.setattr(app._BaseHandler, "hub_auth", auth)
        actions = Actions(socket)
        follower = BrokerFollower(socket)
        async with serving(app._application(cluster or follower, actions)) as port:
            yield Service(port)
        auth._pool.shutdown()
        auth._thread_loop.close()  # the library's own thread, for calls that block


@pytest.fixture(scope="module")
def own() -> Iterator[LiveBroker]:
    with broker("own") as live:
        yield live


@pytest.fixture
async def pages(own: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    async with service(own.socket, monkeypatch) as pages:
        yield pages


def _billed(text: str) -> dict[str, str]:
    return {row["SubAccountName"]: row["BilledCost"] for row in csv.DictReader(io.StringIO(text))}


@pytest.mark.parametrize(
    "query", ["", "?user=bob", "?seated=0", "?user=bob&seated=0&group=other", "?period=this-week&by=device"]
)
async def test_a_user_reads_their_own_figures_as_a_user_of_the_hub_whatever_is_asked(
    pages: Service, query: str
) -> None:
    page, file = await pages.get(f"usage{query}"), await pages.get(f"usage.csv{query}")
    assert (page.status, file.status) == (200, 200)
    assert "1.234 EUR" in page.text
    assert "secret of ada.ipynb" in page.text
    assert _billed(file.body) == {"ada": "1.234"}, "not what the machine's user of that name used"
    for answer in (page, file):
        assert not re.search(r"bob|eve|carol|41\.234|40\.000", answer.body)
    assert "Only you and the GPU administrators can see these figures." in page.text


ADVISED = {("ada", True): 60, ("ada", False): 61, ("bob", True): 62}
"""Users whose notebooks have a record of little use, with its peaks in MiB."""


@pytest.mark.parametrize("visible", ["own", "all"])
async def test_users_read_advice_on_their_own_notebooks_and_administrators_all_of_it(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    with broker(visible) as live:

        async def load() -> None:
            whole = offered_shares(live.broker.arbiter, live.broker.arbiter.pools()["default"])[-1]
            for (owner, seated), peak_mib in ADVISED.items():
                key = HabitKey("default", owner, seated, HabitKind.NOTEBOOK, f"secret of {owner}.ipynb")
                for day in days_of_little_use(whole, peak_mib):
                    live.broker.habits.recorder.load(key, day)

        live.on_loop(load)
        async with service(live.socket, monkeypatch) as pages:
            mine, left = await pages.get("usage"), await pages.get("usage", "left")
            everybody = await pages.get("usage/all", "grace")
            refused = await pages.get("usage/all")
    peaks = [re.findall(r"at most (6\d) MiB", page.text) for page in (mine, left, everybody, refused)]
    assert peaks == [["60"], [], ["61", "60", "62"], []]
    assert "ada (hub), secret of ada.ipynb" in everybody.text
    assert "ada (machine), secret of ada.ipynb" in everybody.text
    assert "secret of bob" not in mine.body + left.body


@pytest.mark.parametrize("path", ["usage/all", "usage/all.csv", "usage/all?by=user", "usage/all?user=ada"])
async def test_figures_of_all_are_for_administrators(pages: Service, path: str) -> None:
    refused = await pages.get(path)
    assert refused.status == 403
    assert not OTHERS.search(refused.body)
    assert "custom:fractional-gpu:admin" in refused.text


async def test_an_administrator_reads_all_figures_and_has_a_page_of_their_own(pages: Service) -> None:
    page = await pages.get("usage/all?by=user", "grace")
    assert all(name in page.text for name in ("ada", "bob", "eve", "carol"))
    assert "7,646.252 EUR" in page.text
    assert "ada (hub)" in page.text
    assert "ada (machine)" in page.text
    file = await pages.get("usage/all.csv", "grace")
    assert file.headers["Content-Disposition"] == 'attachment; filename="gpu-usage.csv"'
    billed = [row["BilledCost"] for row in csv.DictReader(io.StringIO(file.body))]
    assert sum(round(float(cost) * 1000) for cost in billed) == sum(row.usage.charge_milli for row in rows_of_now())
    mine = await pages.get("usage", "grace")
    assert "No kernel used a GPU in this time" in mine.text
    assert 'href="/services/gpu/usage/all"' in mine.body
    assert 'href="/services/gpu/usage/all"' not in (await pages.get("usage")).body


async def test_use_without_a_group_says_why(pages: Service) -> None:
    page = await pages.get("usage/all?by=group,user", "grace")
    assert "no group carol" in page.text
    assert "Use counts for a group that its pool" in page.text


@pytest.mark.parametrize("path", ["usage", "usage.csv", "usage/all", "usage/all.csv"])
async def test_who_has_no_scope_or_is_not_logged_in_reads_nothing(pages: Service, path: str) -> None:
    for user in ("nobody", "robot"):
        assert (await pages.get(path, user)).status == 403
    stranger = await pages.get(path, None)
    assert (stranger.status, stranger.body) == (302, "")
    assert "/oauth2/authorize" in stranger.headers["Location"]


async def test_a_group_sees_the_sums_of_its_users_but_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    with broker("group") as live:
        async with service(live.socket, monkeypatch) as pages:
            page = await pages.get("usage")
            assert "Group lab" in page.text
            assert "5.005 EUR" in page.text
            assert "secret of ada.ipynb" in page.text
            assert not re.search(r"secret of bob|eve|carol|other", page.body)
            assert "Members of your groups can see your totals, but not your notebooks" in page.text
            assert not OTHERS.search((await pages.get("usage", "left")).body), "the hub names no group for this user"
            assert set(_billed((await pages.get("usage.csv")).body)) == {"ada"}, "the file is of one's own"
            assert (await pages.get("usage/all")).status == 403


async def test_where_all_is_visible_users_see_each_users_sum_but_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    with broker("all") as live:
        async with service(live.socket, monkeypatch) as pages:
            page = await pages.get("usage", "left")
            assert all(amount in page.text for amount in ("5.005 EUR", "600.006 EUR", "7,000.007 EUR"))
            assert "secret" not in page.body
            assert (await pages.get("usage/all", "left")).status == 403


async def test_budgets_are_shown_to_whose_they_are_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = [
        {"user": "*", "limit": "1.20 EUR", "per": "month"},
        {"group": "lab", "limit": "7 EUR", "per": "month"},
        {"group": "other", "limit": "900 EUR", "per": "month"},
    ]
    with live_broker(budgets=budgets) as live:

        async def count() -> None:
            live.service.seats.budgets.counted([row for row in rows_of_now() if row.party.seated])

        live.on_loop(count)
        async with service(live.socket, monkeypatch) as pages:
            mine, left, everybody = [
                await pages.get(*which) for which in (("usage",), ("usage", "left"), ("usage/all", "grace"))
            ]
    assert mine.body.count('role="status" class="problem"') == 2
    assert "Your budget of 1.20 EUR per month is used up (1.23 EUR spent)" in mine.text
    assert "The budget of the group 'lab' of 7.00 EUR per month: 6.24 EUR spent (89 %)" in mine.text
    assert not re.search(r"other|bob|eve", mine.body)
    assert "Budgets" not in left.text
    assert "User bob: 1.20 EUR per month: 5.00 EUR spent, used up" in everybody.text
    assert "Group other: 900.00 EUR per month: 600.01 EUR spent, 299.99 EUR left" in everybody.text


class _Careless:
    """A broker that answers every request with everything, and with a setting that this version does not know."""

    def __init__(self, visible: str) -> None:
        self.asked: list[Mapping[str, str] | None] = []
        self._visible = visible

    def budgets(self) -> BudgetList:
        return BudgetList(budgets=[], scope="own")

    def usage(self, by: Any, since_s: int, until_s: int, only: Mapping[str, str] | None = None) -> UsageReport:  # noqa: ANN401
        advice = [replace(ADVICE, owner=name, seated=seated) for name in ("ada", "bob") for seated in (True, False)]
        self.asked.append(only)
        entries = [
            UsageEntry(
                of={"day": "2026-11-24", "user": name, "group": group, "pool": "p", "notebook": "n"},
                currency="EUR",
                usage=Usage(charge_milli=1),
            )
            for name, group in (("ada", "lab"), ("bob", "lab"), ("eve", "other"), ("", ""))
        ]
        return UsageReport(
            by=list(by), since_s=since_s, until_s=until_s, entries=entries, simulated=False, scope="all",
            visible=self._visible, advice=advice,
        )  # fmt: skip


ADA = Viewer(name="ada", admin=False, groups=("lab",))


@pytest.mark.parametrize("visible", ["own", "", "everything", "All"])
def test_a_setting_that_is_not_known_shows_nothing_of_others(visible: str) -> None:
    careless = _Careless(visible)
    figures = usage.own_figures(cast("SeatClient", careless), ADA, usage.chosen({}, everybody=False))
    assert {entry.of["user"] for entry in figures.report.entries} == {"ada"}
    assert [(one.owner, one.seated) for one in figures.report.advice] == [("ada", True)]
    assert figures.others == {}
    assert careless.asked == [{"user": "ada", "seated": "1"}]
    assert figures.report.scope == "own"


def test_entries_of_other_groups_are_dropped_whatever_the_broker_answers() -> None:
    careless = _Careless("group")
    figures = usage.own_figures(cast("SeatClient", careless), ADA, usage.chosen({}, everybody=False))
    assert {entry.of["user"] for entry in figures.others["Group lab"].entries} == {"ada", "bob"}
    assert careless.asked[1:] == [{"group": "lab"}]


def test_a_user_of_very_many_groups_sees_the_first_ones_and_how_many_there_are() -> None:
    many = Viewer(name="ada", admin=False, groups=tuple(f"g{number:02}" for number in range(25)))
    figures = usage.own_figures(cast("SeatClient", _Careless("group")), many, usage.chosen({}, everybody=False))
    assert len(figures.others) == 20
    assert figures.note == "Only 20 of your 25 groups are shown."


# -- what is asked for -------------------------------------------------------------------------------------------------

_NOW_S = 1_790_000_000


@pytest.mark.parametrize(
    ("query", "everybody", "sentence"),
    [
        ({"period": "forever"}, False, "period 'forever' is unknown; choose one of: today; yesterday;"),
        ({"by": "notebook"}, True, "by 'notebook' is unknown; choose one of: group;"),
        ({"period": "dates"}, False, "the first day is missing"),
        ({"period": "dates", "since": "<b>"}, False, "from '<b>' is not a valid time; expected today"),
        ({"period": "dates", "since": "2026-09-01", "until": "2026-08-01"}, False, "it ends"),
        ({"period": "dates", "since": "2026-01-01", "until": "2026-08-01"}, True, "at most 93 days"),
        ({"period": "dates", "since": "2020-01-01"}, False, "at most 400 days"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is_allowed(
    query: dict[str, str], everybody: bool, sentence: str
) -> None:
    with pytest.raises(BadRequestError, match=re.escape(sentence)):
        usage.chosen(query, everybody=everybody, now_s=_NOW_S)


def test_dates_name_whole_days_and_are_asked_for_again_by_the_file() -> None:
    query = {"period": "dates", "since": "2026-09-01", "until": "2026-09-02"}
    found = usage.chosen(query, everybody=False, now_s=_NOW_S)
    assert found.until_s - found.since_s == 2 * 86_400
    assert usage.chosen(found.query, everybody=False, now_s=_NOW_S) == found
    month = usage.chosen({}, everybody=True, now_s=_NOW_S)
    assert (month.query, month.until_s) == ({"period": "this-month", "by": "group"}, _NOW_S)


async def test_a_bad_query_is_answered_with_the_sentence_and_the_form(pages: Service) -> None:
    page = await pages.get("usage?period=dates&since=%3Cscript%3E")
    assert page.status == 400
    assert "From '<script>' is not a valid time; expected today" in page.text.replace(" ' ", "'")
    assert "<script>" not in page.body
    assert 'name="since"' in page.body
    file = await pages.get("usage.csv?period=never")
    assert (file.status, file.headers["Content-Type"]) == (400, "text/plain; charset=utf-8")
    assert file.body.startswith("Period 'never' is unknown")


async def test_without_a_broker_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service("/nowhere/broker.sock", monkeypatch) as pages:
        page = await pages.get("usage")
    assert page.status >= 500
    assert "/nowhere/broker.sock" in page.text
    assert "Download" not in page.text


async def test_the_page_has_no_inline_script_or_style_and_sends_its_form_here_only(pages: Service) -> None:
    page = await pages.get("usage/all", "grace")
    policy = page.headers["Content-Security-Policy"]
    assert "form-action 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"<script|<style| style=| on[a-z]+=", page.body)
    style = await pages.get("static/report.css", None)
    assert (style.status, style.headers["Content-Type"]) == (200, "text/css")
    known = style.body + (app._HERE / "static" / "page.css").read_text()
    assert set(re.findall(r"var\(--([a-z]+)\)", known)) <= set(re.findall(r"--([a-z]+):", known)), (
        "every colour has a value"
    )


def test_the_templates_escape_what_they_are_given() -> None:
    loader = jinja2.FileSystemLoader(app._HERE / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    evil = "<script>alert(1)</script>"
    html = environment.get_template("usage.html").render(
        title="T", prefix="/", hub="/", you=Viewer(name=evil, admin=True), everybody=True, address="/usage/all",
        periods=usage.PERIODS, dates=usage.DATES, by=usage.BY, query={"period": evil, "by": evil, "since": evil},
        figures=None, problem=evil,
    )  # fmt: skip
    assert "<script" not in html
