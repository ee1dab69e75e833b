"""What users see at a hub: the spawn page and the page about the GPUs, in a real browser while kernels take turns."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect

from fractional_gpu.broker.accounting.habits import offered_shares
from fractional_gpu.core.forecasts.habits import HabitKey, HabitKind
from fractional_gpu_hub.service.broker_follower import StartupPlaceholder
from tests.e2e.browser import new_page, opened_browser
from tests.hub.month_of_use import month_of_use
from tests.hub.test_cluster_page import Slurm, with_page
from tests.hub.test_service_usage import Service, broker, service
from tests.support.axe import SMALL_PX, assert_accessible, assert_accessible_in_any_look
from tests.support.hub import HubWorld, new_hub
from tests.support.ports import free_port
from tests.support.screenshots import take
from tests.support.service_page import PAGE, Member
from tests.support.share_days import days_of_little_use
from tests.support.stories import CHECK, fill
from tests.support.world import new_world, until

pytestmark = pytest.mark.promise("accessibility")

POOLS = {
    # A waiting kernel keeps waiting, however long axe takes, and a third server with three quarters waits for a seat.
    "default": {
        "devices": [0],
        "oversubscription": 2,
        "preempt": "never",
        "wait_bound": "100%",
        "price": "0.80 EUR",
    },
    "teaching": {"devices": [1], "fractions": ["1/8"], "hours": "Mon-Fri 08:00-18:00"},
}
BUSY = """
import pathlib, time
while not pathlib.Path({go!r}).exists():
    time.sleep(0.05)
print("finished")
"""


Seen = Callable[..., Future[None]]


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """Calls a function with a browser, in the browser's own thread: the tests' one may have an event loop."""
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        browser = thread.submit(stack.enter_context, opened_browser()).result()
        yield lambda look, *given: thread.submit(_look_and_close, browser, look, *given)
        thread.submit(stack.close).result()


def _look_and_close(browser: Browser, look: Callable[..., None], *given: object) -> None:
    look(browser, *given)
    for context in browser.contexts:
        context.close()


@pytest.fixture
def hub() -> Iterator[HubWorld]:
    with new_world("2x1GiB") as world:
        world.install(750)
        with new_hub(world, {"pools": POOLS}, page={"admins": ["grace"]}) as hub:
            until(lambda: world.broker_pid() is not None, "the hub's broker serves")
            yield hub


def logged_in(browser: Browser, hub: HubWorld, name: str) -> Page:
    page = new_page(browser)
    page.goto(f"{hub.url}hub/login")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(hub.password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/login" not in url)
    return page


def an_administrator_changes_a_pools_settings_by_keyboard(page: Page) -> None:
    pool = page.locator("#pools").get_by_role("row").filter(has_text="teaching")
    edit = pool.get_by_role("button", name="Edit… teaching")
    edit.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Edit teaching")
    idle = dialog.get_by_label("idle_after", exact=True)
    expect(idle).to_be_focused()
    expect(idle).to_have_value("auto")
    expect(idle).to_have_accessible_description(re.compile("How long a kernel must be idle .* By default auto"))
    take(page, "hub-pool-settings")
    fractions = dialog.get_by_role("group", name="fractions")
    expect(fractions.get_by_role("checkbox")).to_have_count(6)
    expect(fractions.get_by_role("checkbox", checked=True)).to_have_count(1)
    expect(fractions.get_by_label("1/8")).to_be_checked()
    fractions.get_by_label("1/8").uncheck()
    dialog.get_by_role("button", name="Change").click()
    expect(dialog.get_by_role("alert")).to_contain_text("expected a list")
    expect(fractions.get_by_label("1/8")).to_be_focused()
    for share in ("1/8", "1/4"):
        fractions.get_by_label(share).check()
    idle.focus()
    tabs_go_through_a_dialog_in_its_order(page, dialog)
    foresight = dialog.get_by_label("foresight", exact=True)
    expect(foresight).to_be_hidden()
    dialog.get_by_text(re.compile(r"All settings \(\d\d more\)")).focus()
    page.keyboard.press("Enter")
    expect(foresight).to_be_visible()
    assert_accessible_in_any_look(page)
    foresight.fill("soon")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("'soon'")
    expect(foresight).to_be_focused()
    expect(foresight).to_have_attribute("aria-invalid", "true")
    foresight.fill("off")
    dialog.get_by_label("move_busy", exact=True).select_option("true")
    idle.fill("5m")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(edit).to_be_focused()
    expect(pool).to_contain_text("foresight, fractions, idle_after, move_busy")
    expect(pool).to_contain_text("1/8, 1/4")
    page.keyboard.press("Enter")
    expect(idle).to_have_value("5m")
    expect(dialog.locator(".changed:visible")).to_have_count(4)
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("no setting has another value than before")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(edit).to_be_focused()


# Words that are split over two lines, and boxes that scroll sideways.
_BROKEN = """() => {
  const broken = [...document.querySelectorAll('html, main *:not(thead, thead *)')]
    .filter((box) => box.scrollWidth > box.clientWidth + 1 && box.clientWidth)
    .map((box) => `${box.tagName} ${box.id} ${box.className} scrolls`);
  const texts = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const { index, 0: word } of texts.currentNode.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, index);
      range.setEnd(texts.currentNode, index + word.length);
      if (range.getClientRects().length > 1) broken.push(word);
    }
  }
  return broken;
}"""


def a_phone_shows_whole_words_and_scrolls_one_way(page: Page) -> None:
    size = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(_BROKEN) == []
    assert_accessible(page)
    assert size is not None
    page.set_viewport_size(size)


def tabs_go_through_a_dialog_in_its_order(page: Page, dialog: Locator) -> None:
    """From the first control, which has the focus, through all of them, and back with Shift."""
    controls = dialog.locator("input:visible, select:visible, summary:visible, button:visible")
    count = controls.count()
    assert count > 8
    for number in range(1, count):
        page.keyboard.press("Tab")
        expect(controls.nth(number)).to_be_focused()
    for number in reversed(range(count - 1)):
        page.keyboard.press("Shift+Tab")
        expect(controls.nth(number)).to_be_focused()


def every_dialog_can_be_left_by_keyboard(page: Page, row: Locator, device: Locator) -> None:
    seat = page.locator("#seats").get_by_role("row").filter(has_text="ada")
    for where, name in (
        (row, "Why?"),
        (row, "Pin…"),
        (row, "Move…"),
        (row, "Evict…"),
        (seat, "Release…"),
        (device, "Drain…"),
    ):
        opener = where.get_by_role("button", name=re.compile(f"^{re.escape(name)}"))
        opener.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        expect(dialog.locator(":focus")).to_have_count(1)
        assert_accessible(page, within="dialog[open]")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(opener).to_be_focused()


def a_third_server_waits_for_its_place(browser: Browser, hub: HubWorld) -> None:
    page = logged_in(browser, hub, "carol")
    page.goto(f"{hub.url}hub/spawn")
    page.get_by_label("1 GPU, 1 GiB").focus()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("3/4 GPU, 768 MiB")).to_be_checked()
    page.keyboard.press("Enter")
    expect(page.locator("#progress-message")).to_contain_text("You are number 1 in the queue")
    assert_accessible_in_any_look(page, "#progress-message, #progress-log")
    page.close()


def a_user_reads_their_own_usage(page: Page) -> None:
    page.get_by_role("link", name="My usage").click()
    expect(page.get_by_role("heading", name="By notebook")).to_be_visible()
    expect(page.locator(".gpu-report")).to_contain_text("EUR")
    expect(page.locator("body")).not_to_contain_text("bob")
    page.get_by_role("link", name="last month").click()
    expect(page.locator(".gpu-report")).to_contain_text("No kernel used a GPU in this time")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as CSV").click()
    assert download.value.suggested_filename == "gpu-usage.csv"
    page.get_by_label("from").fill(time.strftime("%Y-%m-%d"))
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", name="By notebook")).to_be_visible()


def an_administrator_reads_everybodys(page: Page, hub: HubWorld) -> None:
    complaints: list[str] = []
    page.on("console", partial(_complain, complaints))
    page.set_viewport_size({"width": 1360, "height": 980})
    page.goto(f"{hub.url}{PAGE}usage/all")
    page.get_by_role("link", name="user", exact=True).click()
    expect(page.get_by_role("heading", name="By user", exact=True)).to_be_visible()
    expect(page.locator(".gpu-report svg.days")).to_be_visible()
    expect(page.get_by_role("cell", name="bob").first).to_be_visible()
    assert complaints == []


def an_administrator_suspends_drains_and_may_evict_by_keyboard(
    grace: Page, row: Locator, first_device: Locator
) -> None:
    row.get_by_role("button", name=re.compile("^Suspend")).focus()
    grace.keyboard.press("Enter")
    expect(row).to_contain_text("suspended")
    expect(grace.get_by_role("status")).to_contain_text("suspended")
    expect(row.get_by_role("button").first).to_be_focused()
    row.get_by_role("button", name=re.compile("^Why")).click()
    expect(grace.get_by_role("dialog")).to_contain_text("suspended because of a request by administrator grace")
    grace.keyboard.press("Escape")
    expect(grace.get_by_role("dialog")).to_be_hidden()

    first_device.get_by_role("button", name="Drain… GPU 0").focus()
    grace.keyboard.press("Enter")
    grace.get_by_role("dialog").get_by_role("button", name="Drain").press("Enter")
    expect(first_device).to_contain_text("empt")
    expect(first_device.get_by_role("button", name="Undrain GPU 0")).to_be_focused()
    grace.emulate_media(color_scheme="dark")
    row.get_by_role("button", name=re.compile("^Evict")).click()
    expect(grace.get_by_role("dialog")).to_contain_text("All its variables are lost, for good")
    expect(grace.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    take(grace, "hub-page-dark")
    assert_accessible_in_any_look(grace)
    grace.keyboard.press("Escape")
    first_device.get_by_role("button", name="Undrain GPU 0").click()
    expect(first_device).to_contain_text("in service")


@pytest.mark.timeout(600)
def test_a_person_picks_a_fraction_and_an_administrator_watches_kernels_take_turns(
    seen: Seen, hub: HubWorld, tmp_path: Path
) -> None:
    Member(hub, "grace")  # the service is up, and she is a user of the hub
    seen(_look_at_hub, hub, tmp_path / "go").result()


def _look_at_hub(browser: Browser, hub: HubWorld, go: Path) -> None:
    ada = logged_in(browser, hub, "ada")
    ada.goto(f"{hub.url}hub/spawn")
    ada.get_by_label("3/4 GPU, 768 MiB").check()
    take(ada, "hub-spawn")
    assert_accessible_in_any_look(ada, ".gpu-choice")
    ada.get_by_role("button", name=re.compile("Start", re.IGNORECASE)).click()
    hub.await_server("ada")
    first = hub.connect("ada").start("fractional-gpu-default-750")
    first.must(fill(1, 32))

    grace = logged_in(browser, hub, "grace")
    grace.goto(hub.url + PAGE)
    grace.set_viewport_size({"width": 1360, "height": 980})
    kernels, devices = grace.locator("#kernels"), grace.locator("#devices")
    row = kernels.get_by_role("row").filter(has_text="ada")
    expect(row).to_contain_text("idle on the GPU")
    expect(row).to_contain_text("of 768 MiB on the GPU")

    second = hub.server("bob", pool="default", fraction="3/4").start("fractional-gpu-default-750")
    running = second.send(fill(2, 32) + BUSY.format(go=str(go)))
    expect(row).to_contain_text("suspended")  # live: the page is not reloaded
    expect(row).to_contain_text("in host memory")
    expect(kernels.get_by_role("row").filter(has_text="bob")).to_contain_text("in use")
    waiting = first.send(CHECK)
    expect(row).to_contain_text("waiting, place 1")
    take(grace, "hub-page")
    assert_accessible_in_any_look(grace)
    a_phone_shows_whole_words_and_scrolls_one_way(grace)

    ada.goto(hub.url + PAGE)
    expect(ada.locator("#kernels")).to_contain_text("waiting, place 1")
    expect(ada.locator("#devices")).to_contain_text("1 from other users (768 MiB)")
    expect(ada.locator("body")).not_to_contain_text("bob")
    expect(ada.get_by_role("button", name=re.compile("Drain|Evict|Move|Edit"))).to_have_count(0)
    assert_accessible_in_any_look(ada)
    a_user_reads_their_own_usage(ada)
    an_administrator_reads_everybodys(grace, hub)
    grace.goto(hub.url + PAGE)

    go.touch()
    assert second.wait(running).text == "finished\n"
    assert first.wait(waiting).text == "intact\n"
    expect(row).to_contain_text("idle on the GPU")
    first_device = devices.get_by_role("row").filter(has_text="GPU 0")
    every_dialog_can_be_left_by_keyboard(grace, row, first_device)
    an_administrator_suspends_drains_and_may_evict_by_keyboard(grace, row, first_device)
    an_administrator_changes_a_pools_settings_by_keyboard(grace)
    assert first.must(CHECK).text == "intact\n"
    a_third_server_waits_for_its_place(browser, hub)

    hub.world.kill_broker()
    expect(grace.locator("#problem")).to_contain_text("may be out of date")
    expect(grace.locator("#problem")).to_be_hidden()  # the hub has started another one
    expect(row).to_contain_text("ada")


async def test_weeks_of_use_can_be_read_on_any_screen(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(month_of_use(int(time.time())))
    with broker("own", rows) as live:

        async def load() -> None:
            for user in ("ada", "bob"):
                key = HabitKey("default", user, True, HabitKind.NOTEBOOK, f"a-long-name-of-a-notebook-of-{user}.ipynb")
                whole = offered_shares(live.broker.arbiter, live.broker.arbiter.pools()["default"])[-1]
                for day in days_of_little_use(whole, 50):
                    live.broker.habits.recorder.load(key, day)

        live.on_loop(load)
        async with service(live.socket, monkeypatch) as pages:
            await asyncio.wrap_future(seen(_look_at_weeks, f"http://127.0.0.1:{pages.port}/services/gpu/usage"))


def _complain(complaints: list[str], message: ConsoleMessage) -> None:
    if message.type == "error":
        complaints.append(message.text)


def _look_at_weeks(browser: Browser, address: str) -> None:
    since = time.strftime("%Y-%m-%d", time.localtime(time.time() - 20 * 86_400))  # a new month may have just begun
    dates = f"period=dates&since={since}"
    for user, path, by in (("grace", f"/all?by=user&{dates}", "By user"), ("ada", f"?{dates}", "By notebook")):
        context = browser.new_context(extra_http_headers={"Authorization": f"token {user}"})
        page = context.new_page()
        complaints: list[str] = []
        page.on("console", partial(_complain, complaints))
        page.set_viewport_size({"width": 1100, "height": 1020})
        page.goto(f"{address}{path}")
        expect(page.get_by_role("heading", name=by, exact=True)).to_be_visible()
        expect(page.locator("svg.days rect.busy").first).to_be_visible()
        expect(page.locator("ul.advice > li")).to_have_count({"grace": 2, "ada": 1}[user])
        if user == "grace":
            take(page, "hub-usage")
        assert_accessible_in_any_look(page)
        assert [one for one in complaints if "404" not in one] == [], "the browser refuses nothing but its icon"


async def test_the_page_of_a_cluster_is_readable_on_any_screen_and_follows_it(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(pages: Service, slurm: Slurm) -> None:
        await asyncio.wrap_future(seen(_look_at_cluster, f"http://127.0.0.1:{pages.port}/services/gpu/", slurm))

    await with_page(monkeypatch, look)


def _look_at_cluster(browser: Browser, address: str, slurm: Slurm) -> None:
    complaints: list[str] = []
    context = browser.new_context(extra_http_headers={"Authorization": "token grace"})
    page = context.new_page()
    page.on("console", partial(_complain, complaints))
    page.goto(address)
    expect(page.locator("#nodes tr").filter(has_text="gpu01")).to_contain_text("0.75 GPUs at once")
    expect(page.get_by_role("table", name="Servers")).to_contain_text("bob")
    expect(page.locator("#simulated")).to_be_visible()
    page.set_viewport_size({"width": 1200, "height": 720})
    take(page, "hub-cluster")
    assert_accessible_in_any_look(page)
    _a_wide_table_is_scrolled_by_keyboard(page)
    started = replace(slurm.there.servers[1], state="running", node="gpu03")
    slurm.there = replace(slurm.there, servers=[slurm.there.servers[0], started])
    expect(page.get_by_role("status")).to_have_text("job 12 of bob: running")
    slurm.problem = "Slurm does not answer"
    expect(page.locator("#problem")).to_contain_text("may be out of date: Slurm does not answer")
    expect(page.locator("#nodes tr").filter(has_text="gpu01")).to_be_visible()
    slurm.problem = ""
    expect(page.locator("#problem")).to_be_hidden()
    assert [one for one in complaints if "404" not in one] == [], "the browser refuses nothing but its icon"


def _a_wide_table_is_scrolled_by_keyboard(page: Page) -> None:
    """The page has no buttons: after the link only tables wider than the screen can get the focus. On phones none are."""
    nodes = page.get_by_role("region", name="Nodes")
    link = page.get_by_role("link", name="Hub")
    link.focus()
    page.keyboard.press("Tab")
    expect(nodes).not_to_be_focused()
    size = page.viewport_size
    assert size is not None
    page.set_viewport_size({"width": SMALL_PX, "height": size["height"]})
    expect(nodes).to_have_attribute("tabindex", "-1")
    page.set_viewport_size({"width": 800, "height": size["height"]})
    expect(nodes).to_have_attribute("tabindex", "0")
    link.focus()
    page.keyboard.press("Tab")
    expect(nodes).to_be_focused()
    page.keyboard.press("ArrowRight")
    until(lambda: nodes.evaluate("box => box.scrollLeft > 0"), "the table is scrolled")
    page.set_viewport_size(size)


class _Ready(BaseHTTPRequestHandler):
    """The service that takes over."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>here it is</p>")

    def log_message(self, *_: object) -> None:
        """Log nothing: all requests are the test's."""


def test_a_page_that_came_early_is_accessible_and_turns_into_the_services_by_itself(seen: Seen) -> None:
    seen(_look_early).result()


def _look_early(browser: Browser) -> None:
    port = free_port()
    early = StartupPlaceholder(f"http://127.0.0.1:{port}")
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{port}/services/gpu/")
    expect(page.get_by_role("status")).to_contain_text("it appears in a moment")
    assert_accessible_in_any_look(page)
    server = HTTPServer(("127.0.0.1", port), _Ready, bind_and_activate=False)
    server.socket.close()
    server.socket = early.hand_over()
    server.socket.setblocking(True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        expect(page.get_by_text("here it is")).to_be_visible()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
