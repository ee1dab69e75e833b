"""The hub's page about its GPUs, over HTTP, with a real hub, proxy, broker and kernels: what each user sees and may do.

The users' names cannot occur in a hexadecimal id.
"""

import csv
import io
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub.pages import Visitor
from tests.support.hub import HubServer, HubWorld, new_hub
from tests.support.service_page import PAGE, Answer, Member
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, new_world, until

POOL = {
    "may_move": True,
    "oversubscription": 4,
    "wait_bound": "100%",
    "price": "36000 EUR",
    "group_limits": {"lab": {"leases": 8}},
}
SETTINGS = {"pools": {"default": POOL}, "usage_visible": "group"}
GROUPS = {"lab": ["lise", "otto"]}


@dataclass
class Scene:
    hub: HubWorld
    notebooks: dict[str, Notebook]
    leases: dict[str, str]
    lise: Member
    otto: Member
    grace: Member


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with new_world("2x256MiB") as world:
        (kernel,) = world.install(500)
        with new_hub(world, SETTINGS, groups=GROUPS, page={"admins": ["grace"]}) as hub:
            until(lambda: world.broker_pid() is not None, "the hub's broker serves")
            servers: dict[str, HubServer] = {}
            for user in ("lise", "otto"):
                hub.spawn(user, pool="default", fraction="1/2")
            for user in ("lise", "otto"):
                hub.await_server(user)
                servers[user] = hub.connect(user)
            notebooks, leases = {}, {}
            for number, (user, server) in enumerate(servers.items()):
                notebooks[user] = server.start(kernel)
                notebooks[user].must(fill(number))
                leases[user] = world.lease(notebooks[user].kernel_id).lease_id
            yield Scene(hub, notebooks, leases, *(Member(hub, name) for name in ("lise", "otto", "grace")))


# -- who gets in -------------------------------------------------------------------------------------------------------------


def test_who_is_not_logged_in_is_sent_to_the_hub_and_comes_back(scene: Scene) -> None:
    with urllib.request.urlopen(scene.hub.url + PAGE) as reply:  # noqa: S310 - loopback
        assert "/hub/login" in reply.url
        assert b"Kernels" not in reply.read()
    visitor = Visitor(scene.hub, "eve")
    page = visitor.get(PAGE)
    assert page.url == scene.hub.url + PAGE
    assert (page.status, "Your kernels" in page.text) == (200, True)


def test_the_page_is_for_no_frame_no_cache_and_no_inline_script(scene: Scene) -> None:
    request = urllib.request.Request(scene.hub.url + PAGE)  # noqa: S310
    with scene.lise._opener.open(request) as reply:
        headers, html = reply.headers, reply.read().decode()
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "<script>" not in html
    assert " style=" not in html
    for file in ("page.js", "page.css"):
        assert scene.lise.get(f"{PAGE}static/{file}").status == 200
    assert scene.lise.get(f"{PAGE}static/../app.py").status == 404


def test_nothing_of_a_secret_is_in_the_page(scene: Scene) -> None:
    shown = scene.grace.page.html + json.dumps(scene.grace.status())
    assert scene.hub.token not in shown
    for cookie in scene.grace._jar:
        if cookie.name != "_xsrf" and len(cookie.value or "") > 16:
            assert str(cookie.value) not in shown, cookie.name
    for file in (scene.hub.world.folder).rglob("*.token"):
        assert file.read_text().strip() not in shown


# -- what is seen --------------------------------------------------------------------------------------------------------------


def test_a_user_sees_what_is_theirs_and_of_others_only_sizes(scene: Scene) -> None:
    for member, other in ((scene.lise, "otto"), (scene.otto, "lise")):
        page = member.get(PAGE)
        status = member.status()
        for shown in (page.html, json.dumps(status)):
            assert other not in shown
            assert scene.leases[other] not in shown
            assert scene.leases[other][:8] not in shown
        name = "lise" if other == "otto" else "otto"
        assert [row["id"] for row in status["kernels"]] == [scene.leases[name]]
        assert [row["owner"] for row in status["seats"]] == [name]
        assert any("1 from other users (128 MiB)" in row["kernels"] for row in status["devices"])
        assert all(not row["actions"] for row in [*status["devices"], *status["pools"]])
        assert all("keys" not in row for row in status["pools"])


def test_an_administrator_sees_all_users(scene: Scene) -> None:
    status = scene.grace.status()
    assert {row["id"] for row in status["kernels"]} == set(scene.leases.values())
    assert {row["owner"] for row in status["kernels"]} == {"lise", "otto"}
    assert {row["owner"] for row in status["seats"]} == {"lise", "otto"}
    (pool,) = status["pools"]
    assert (pool["keys"]["may_move"], pool["actions"]) == (True, ["edit"])
    assert scene.lise.get(PAGE).text.count("administrator") == 0
    assert "administrator" in scene.grace.page.text


def test_usage_is_ones_own_with_the_sums_of_ones_group_and_all_of_it_for_administrators(scene: Scene) -> None:
    shown = scene.notebooks["lise"].must("%gpu cost").data[-1]["text/plain"]
    assert "A whole GPU costs 36000.00 EUR per hour;" in shown
    cost = re.search(r"^cost +([0-9,.]+) EUR", shown, flags=re.MULTILINE)
    assert cost, shown
    assert float(cost[1].replace(",", "")) > 0
    mine, own_file = (scene.lise.get(f"{PAGE}{path}") for path in ("usage", "usage.csv"))
    assert (mine.status, own_file.status) == (200, 200)
    assert "simulated" in mine.text
    assert "Group lab" in mine.text
    assert "otto" in mine.html, "the sum of another user of the group"
    assert mine.html.count("otto") == scene.lise.get(f"{PAGE}usage?user=otto").html.count("otto"), "as asked, or not"
    rows = list(csv.DictReader(io.StringIO(own_file.html)))
    assert {row["SubAccountName"] for row in rows} == {"lise"}
    assert sum(float(row["BilledCost"]) for row in rows) >= float(cost[1].replace(",", ""))
    stranger = Member(scene.hub, "eve")
    for path in ("usage", "usage.csv"):
        assert not re.search("lise|otto|Group lab", stranger.get(f"{PAGE}{path}").html), "she is in no group"
    for member in (scene.lise, stranger):
        for path in ("usage/all", "usage/all.csv"):
            refused = member.get(f"{PAGE}{path}")
            assert (refused.status, "otto" in refused.html) == (403, False)
    everybody = scene.grace.get(f"{PAGE}usage/all?by=user")
    assert {"lise", "otto"} <= set(everybody.text.split())
    billed = list(csv.DictReader(io.StringIO(scene.grace.get(f"{PAGE}usage/all.csv").html)))
    assert {row["SubAccountName"] for row in billed} == {"lise", "otto", ""}


# -- what is refused -----------------------------------------------------------------------------------------------------------


def test_another_users_kernel_is_unknown_and_what_administrators_do_is_refused(scene: Scene) -> None:
    for lease in (scene.leases["otto"], "0" * 24):
        for path, body in (("suspend", {}), ("evict", {"confirm": True}), ("story", None)):
            answer = scene.lise.ask(f"leases/{lease}/{path}", body)
            assert (answer.status, answer.reason) == (404, "unknown-lease"), (path, lease, answer)
    for path, changes in (
        (f"leases/{scene.leases['lise']}/evict", {"confirm": True}),
        (f"devices/{scene.lise.status()['devices'][0]['id']}/drain", {}),
        ("pools/default", {"keys": {"idle_after": "1s"}}),
    ):
        answer = scene.lise.ask(path, changes)
        assert (answer.status, answer.reason) == (403, "not-admin"), path
    for notebook in scene.notebooks.values():
        assert notebook.must(CHECK).text == "intact\n"


def test_what_another_site_or_a_forger_sends_is_refused(scene: Scene) -> None:
    path = f"leases/{scene.leases['lise']}/suspend"
    member = scene.lise
    refused = [
        member.ask(path, {}, xsrf=None),
        member.ask(path, {}, xsrf="forged"),
        member.ask(path, {}, xsrf=scene.otto.xsrf),
        member.ask(path, {}, Sec_Fetch_Site="cross-site"),
        member.ask(path, {}, Sec_Fetch_Site="same-site"),
        member.ask(path, {}, Origin="https://evil.example"),
        member.ask(path, {}, Origin="null"),
        member.ask("status", xsrf=None),
        member.ask("events", Sec_Fetch_Site="cross-site"),
    ]
    # Without the page's token the hub's library does not even accept the cookie as a login (401).
    assert [answer.status for answer in refused] == [401] * 3 + [403] * 4 + [401, 403], refused
    member.sees("kernels", scene.leases["lise"], "phase", "resident")


def test_forged_cookies_and_tokens_open_nothing(scene: Scene) -> None:
    for header in ({"Cookie": "service-gpu=forged; _xsrf=forged"}, {"Authorization": "token forged"}, {}):
        request = urllib.request.Request(f"{scene.hub.url}{PAGE}api/status", headers=header)  # noqa: S310
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)  # noqa: S310
        with caught.value as error:
            assert error.code == 401, header
            assert json.loads(error.read())["error"]["message"].startswith("you are not logged in")


def test_a_service_of_the_hub_is_no_user_here(scene: Scene) -> None:
    assert _by_token(scene, scene.hub.token, "status").status == 403


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("pin", {}, "bad-request"),
        ("pin", {"minutes": 0}, "bad-request"),
        ("pin", {"minutes": True}, "bad-request"),
        ("pin", {"minutes": 5, "for": "ever"}, "bad-request"),
        ("suspend", {"force": True}, "bad-request"),
        ("suspend", [], "bad-request"),
        ("explode", {}, "unknown-route"),
    ],
)
def test_what_is_not_understood_is_refused(scene: Scene, path: str, body: object, reason: str) -> None:
    answer = scene.lise.ask(f"leases/{scene.leases['lise']}/{path}", body)
    assert answer.reason == reason


# -- what is done ----------------------------------------------------------------------------------------------------------------


def test_a_user_steers_their_kernel_and_hears_of_it_at_once(scene: Scene) -> None:
    lease = scene.leases["lise"]
    with scene.lise.news() as news:
        next(event for event in news if event["kernels"][0]["phase"] == "resident")
        assert scene.lise.ask(f"leases/{lease}/suspend", {}).body["state"] == "suspended"
        row = next(event["kernels"][0] for event in news if event["kernels"][0]["phase"] == "suspended")
        assert row["memory"].endswith("in host memory")
        assert row["actions"] == ["resume", "story"]
    assert scene.lise.ask(f"leases/{lease}/resume", {}).body["state"] == "resident"
    assert scene.lise.ask(f"leases/{lease}/pin", {"minutes": 5}).status == 200
    scene.lise.sees("kernels", lease, "state", "pinned for")
    assert scene.lise.ask(f"leases/{lease}/unpin", {}).status == 200
    assert scene.notebooks["lise"].must(CHECK).text == "intact\n"
    lines = scene.lise.ask(f"leases/{lease}/story").body["lines"]
    assert "suspend.asked" in [line["reason"] for line in lines]


def test_another_users_act_is_no_news_to_who_may_not_see_it(scene: Scene) -> None:
    with scene.otto.news() as news:
        next(news)
        assert scene.lise.ask(f"leases/{scene.leases['lise']}/suspend", {}).status == 200
        told = json.dumps(next(news))  # the sums of a device changed
        assert scene.leases["lise"][:8] not in told
        assert "lise" not in told
    scene.lise.ask(f"leases/{scene.leases['lise']}/resume", {})


def test_an_administrator_moves_drains_and_edits_under_their_own_name(scene: Scene) -> None:
    grace, lease = scene.grace, scene.leases["lise"]
    before = grace.sees("kernels", lease, "where", "GPU")
    moved = grace.ask(f"leases/{lease}/move", {})
    assert moved.status == 200, moved
    grace.sees("kernels", lease, "where", "GPU 1" if before == "GPU 0" else "GPU 0")
    assert scene.notebooks["lise"].must(CHECK).text == "intact\n"
    device = moved.body["device_id"]
    assert grace.ask(f"leases/{lease}/move", {"device": device}).reason == "there-already"
    assert grace.ask(f"devices/{device}/drain", {}).body["draining"] is True
    grace.sees("devices", device, "state", "being emptied", "emptied")
    assert grace.ask(f"devices/{device}/undrain", {}).body["draining"] is False
    changed = grace.ask("pools/default", {"keys": {"idle_after": "1h"}})
    assert changed.body["changed"] == ["idle_after"], changed
    until(lambda: grace.status()["pools"][0]["changed"] == "idle_after" or None, "the page shows the change")
    refused = grace.ask("pools/default", {"keys": {"idle_after": "soon"}})
    assert (refused.status, refused.reason) == (400, "bad-pool")
    assert "soon" in refused.body["error"]["message"]
    written = Path(scene.hub.world.status().audit_file).read_text().splitlines()
    for_her = {line["act"] for line in map(json.loads, written) if line["acting_for"] == "grace"}
    assert for_her == {"move", "drain", "undrain", "pool.change"}
    assert "Traceback" not in scene.hub.logs()["hub.err"]


def test_a_program_shows_a_token_of_its_user_and_needs_no_page(scene: Scene) -> None:
    token = scene.hub.api("POST", "users/lise/tokens", {"note": "test"})["token"]
    status = _by_token(scene, token, "status")
    assert [row["owner"] for row in status.body["kernels"]] == ["lise"]
    assert _by_token(scene, token, f"leases/{scene.leases['otto']}/suspend", {}).status == 404
    assert _by_token(scene, token, f"leases/{scene.leases['lise']}/suspend", {}).body["state"] == "suspended"
    assert scene.notebooks["lise"].must(CHECK).text == "intact\n"


# -- what restarts -----------------------------------------------------------------------------------------------------------------


def test_a_broker_that_is_killed_is_missed_and_found_again(scene: Scene) -> None:
    with scene.lise.news() as news:
        assert next(news)["problem"] == ""
        scene.hub.world.kill_broker()
        assert next(event["problem"] for event in news if event["problem"])
        back = next(event for event in news if not event["problem"])
        assert back["you"]["name"] == "lise"
    until(
        lambda: [row["id"] for row in scene.lise.status()["kernels"]] == [scene.leases["lise"]] or None, "found again"
    )
    assert scene.notebooks["lise"].must(CHECK).text == "intact\n"


def test_a_hub_that_is_killed_and_started_again_has_its_page_again(scene: Scene) -> None:
    hub = scene.hub
    hub.stop_hub(9)
    hub.start_hub()
    again = Member(hub, "lise")
    until(
        lambda: [row["id"] for row in again.status()["kernels"]] == [scene.leases["lise"]] or None, "the page is there"
    )
    stale = scene.lise.ask("status")
    assert stale.status in (401, 403), "the old page is told to log in"
    scene.lise = again
    scene.grace = Member(hub, "grace")


def test_an_eviction_means_it_and_is_the_end(scene: Scene) -> None:
    lease = scene.leases["otto"]
    unsure = scene.grace.ask(f"leases/{lease}/evict", {})
    assert (unsure.status, unsure.reason) == (400, "not-confirmed")
    assert scene.grace.ask(f"leases/{lease}/evict", {"confirm": True}).status == 200
    until(lambda: lease not in [row["id"] for row in scene.grace.status()["kernels"]] or None, "it is gone")
    assert scene.notebooks["lise"].must(CHECK).text == "intact\n", "its neighbour did not notice"


def _by_token(scene: Scene, token: str, path: str, body: object = None) -> Answer:
    request = urllib.request.Request(  # noqa: S310 - loopback
        f"{scene.hub.url}{PAGE}api/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"token {token}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as reply:  # noqa: S310
            return Answer(reply.status, json.loads(reply.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, json.loads(error.read()))
