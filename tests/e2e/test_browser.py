"""What a user sees: a real JupyterLab in a real browser, with real kernels on the simulated device."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, expect

from fractional_gpu.core.forecasts.habits import Share
from fractional_gpu.core.units import format_forecast
from fractional_gpu.protocol.messages import ResizeRequest
from fractional_gpu_kernel.server.app import STATE_ID
from tests.e2e.browser import Lab, new_page, opened_browser, opened_lab, write_notebook
from tests.e2e.test_debugger import TOUCHING
from tests.labextension.conftest import State
from tests.support.axe import ALL_LOOKS, SMALL_PX, assert_accessible
from tests.support.pair import NO_TURNS
from tests.support.paths import DEBUGGER_PYTHONPATH, STRANGER
from tests.support.share_days import keep_days
from tests.support.stories import CHECK, fill
from tests.support.world import World, new_world, until

pytestmark = pytest.mark.promise("accessibility")

DESK = "desk.ipynb"
KERNEL = "Python 3 · 3/4 GPU"
SETTINGS = "lab/api/settings/jupyter-fractional-gpu:status"
UNTOLD = "nobody_may_hear_of_this"
TOLD = "a cell has begun, after waiting"
OURS = ".jp-FractionalGPU-item, .jp-FractionalGPU-panel"
CLOCK = "() => { const now = Date.now; window.ahead = 0; Date.now = () => now() + window.ahead; }"
BUSY = """
import pathlib, time
while not pathlib.Path({go!r}).exists():
    time.sleep(0.05)
print("finished")
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def opened(browser: Browser) -> Iterator[tuple[World, Lab]]:
    """JupyterLab at the launcher. Its kernels have debugpy, and its settings turn foresight off."""
    with new_world() as world:
        world.environment["PYTHONPATH"] = DEBUGGER_PYTHONPATH
        world.configure(NO_TURNS)
        world.install(250, 500, 750)
        settings = world.folder / "config" / "lab" / "user-settings" / "jupyter-fractional-gpu"
        settings.mkdir(parents=True)
        (settings / "status.jupyterlab-settings").write_text(json.dumps({"foresight": False}))
        with opened_lab(world, browser, with_notebook=True) as lab:
            yield world, lab


def test_two_notebooks_share_a_device_before_a_persons_eyes(opened: tuple[World, Lab], tmp_path: Path) -> None:
    world, lab = opened
    told = signs(lab.page)
    by_size = [f"Python 3 · {share} GPU (simulated)" for share in ("1/4", "1/2", "3/4")]
    for category in ("Notebook", "Console"):
        cards = lab.page.locator(f'.jp-LauncherCard[data-category="{category}"] .jp-LauncherCard-label')
        expect(cards.filter(has_text="GPU")).to_have_text(by_size)
    lab.picture("launcher")
    lab.launch(KERNEL)
    expect(lab.item).to_contain_text("3/4 GPU · has not used the GPU (simulated)")
    lab.run(fill(1, 64).strip() + '\nprint("64 MiB on the device")')
    expect(lab.output).to_contain_text("64 MiB on the device")
    expect(lab.item).to_contain_text(re.compile(r"[\d.]+ MiB of 768 MiB"))
    lab.picture("resident")

    lab.launch(KERNEL)  # a second notebook, which does not fit next to the first
    go = tmp_path / "go"
    lab.run(fill(2, 64).strip() + "\n" + BUSY.format(go=str(go)).strip())
    expect(lab.item).to_contain_text("of 768 MiB")
    lab.turn_to("Untitled.ipynb")
    expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")
    lab.item.click()
    expect(lab.panel).to_contain_text(re.compile("in the host's memory; bringing it back takes (about|under|up to) "))
    expect(lab.panel).to_contain_text("once there is room")
    expect(lab.panel.get_by_role("button", name="Resume")).to_be_enabled()
    lab.picture("suspended")
    assert_accessible(lab.page, within=".jp-FractionalGPU-panel")
    if ALL_LOOKS:
        assert_accessible(lab.page, OURS)
    lab.page.keyboard.press("Escape")
    expect(lab.panel).to_be_hidden()
    expect(lab.item).to_be_focused()

    lab.cells.last.locator(".cm-content").click()
    lab.page.keyboard.type("1 + 1\n")
    assert lab.page.evaluate("document.activeElement.closest('.jp-Notebook') !== null")
    lab.run(CHECK.strip())
    expect(lab.item).to_contain_text("3/4 GPU · waiting, place 1 · Untitled1.ipynb is running a cell")
    expect(lab.output).to_contain_text(re.compile("wait", re.IGNORECASE))
    expect(lab.page.get_by_role("status").filter(has_text="GPU: waiting for the GPU, place 1")).to_have_count(1)
    lab.picture("waiting")
    lab.page.get_by_role("button", name=re.compile("Interrupt the kernel")).first.click()
    expect(lab.output).to_contain_text("KeyboardInterrupt")
    expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")

    lab.run(CHECK.strip())
    expect(lab.item).to_contain_text("3/4 GPU · waiting, place 1")
    go.touch()
    expect(lab.output).to_contain_text("intact")
    expect(lab.item).to_contain_text("of 768 MiB")
    expect(lab.page.get_by_role("alert").filter(has_text=TOLD)).to_have_count(0)  # it did not wait for long
    lab.picture("resumed")
    lab.turn_to("Untitled1.ipynb")
    expect(lab.output).to_contain_text("finished")
    expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")
    the_debuggers_panel_shows_what_lies_on_the_gpu_and_leaves_a_kernel_suspended_that_is_to_be(world, lab)
    assert not told, "foresight is switched off"
    for kernel in lab.server.request("GET", "api/kernels"):
        assert "resume.expected" not in story(world, kernel["id"])


def the_debuggers_panel_shows_what_lies_on_the_gpu_and_leaves_a_kernel_suspended_that_is_to_be(
    world: World, lab: Lab
) -> None:
    """Needs two notebooks that do not fit together, with `Untitled.ipynb` on the GPU. The panel asks for variables after each cell."""
    kernels = {one["path"]: one["kernel"]["id"] for one in lab.server.request("GET", "api/sessions")}
    first = kernels["Untitled.ipynb"]
    lab.turn_to("Untitled.ipynb")
    lab.run(f'{TOUCHING.strip()}\nprint("there")')
    expect(lab.output).to_contain_text("there")
    lab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-DebuggerBugButton").click()
    variables = lab.page.locator(".jp-DebuggerVariables-body jp-tree-view")
    expect(variables).to_contain_text("touching")
    lab.turn_to("Untitled1.ipynb")
    lab.run(CHECK.strip())
    expect(lab.output).to_contain_text("intact")
    world.await_state(first, "suspended")
    lab.turn_to("Untitled.ipynb")  # the panel asks for the variables
    world.await_state(first, "resident")
    expect(variables).to_contain_text("touching")
    lab.run("%gpu suspend")
    expect(lab.output).to_contain_text("Suspended")
    assert lab.server.connect(first).debug("debugInfo")["success"], "the page asks for nothing that is behind this"
    expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")
    assert world.lease(first).state == "suspended"
    lab.run(CHECK.strip())
    expect(lab.output).to_contain_text("intact")


@pytest.fixture(scope="module")
def desk(opened: tuple[World, Lab]) -> tuple[World, Lab]:
    """JupyterLab with foresight, and a notebook whose kernel has bytes on the GPU. Its broker knows no other kernel's cells and rhythm."""
    world, lab = opened
    lab.server.clear()
    world.end_broker()
    shutil.rmtree(world.state)
    keep_days(world.ledger, str(world.notebooks / DESK), Share(250, 256), 60)
    write_notebook(world, DESK, world.install(250)[0])
    lab.server.request("PUT", SETTINGS, {"raw": json.dumps({"foresight": True})})
    lab.page.goto(f"{lab.server.url}lab/tree/{DESK}?reset")
    expect(lab.item).to_contain_text("GPU · has not used the GPU (simulated)")
    lab.run(fill(1, 16).strip() + '\nprint("there")')
    expect(lab.output).to_contain_text("there")
    expect(lab.item).to_contain_text("of 256 MiB")
    return world, lab


@contextmanager
def stranger(world: World, mib: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-P", STRANGER, str(world.simulated_folder), "0", str(mib)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=world.environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"holding {process.pid}\n".encode()
        try:
            yield process
        finally:
            process.kill()


def a_cell_waits_for_the_stranger(world: World, lab: Lab, *, accessible: bool = False) -> None:
    """Run a cell while a stranger has the device, until the page has named it everywhere and its clock has gone half a minute ahead."""
    running = lab.page.locator("#jp-running-sessions")
    (kernel,) = lab.server.request("GET", "api/kernels")
    with world.client() as client:
        client.suspend(world.lease(kernel["id"]).lease_id)
    world.await_state(kernel["id"], "suspended")
    with stranger(world, 900) as program:
        until(lambda: world.status().devices[0].strangers, "the broker sees it")
        lab.run(CHECK.strip())
        (seen,) = world.status().devices[0].strangers
        assert (seen.pid, seen.own) == (program.pid, True)
        name = f"{seen.command} (your process {program.pid})"
        expect(lab.item).to_contain_text(f"1/4 GPU · waiting, place 1 · {name} holds ")
        expect(lab.output).to_contain_text(f"{name} holds ")
        lab.item.click()
        expect(lab.panel).to_contain_text(f"{name}: ")
        lab.page.keyboard.press("Escape")
        if not running.is_visible():
            lab.page.get_by_role("tab", name="Running Terminals and Kernels").click()
        expect(running).to_contain_text(f"{name}: ")
        if accessible:
            assert_accessible(lab.page, within=".jp-FractionalGPU-item")
            lab.picture("stranger")
        lab.page.evaluate("window.ahead += 30_000")
    expect(lab.output).to_contain_text("intact")
    expect(lab.item).to_contain_text("of 256 MiB")  # by now the page would have told
    expect(running).not_to_contain_text("your process")


@pytest.mark.promise("early-resume")
def test_a_kernel_is_back_before_shift_enter_and_the_page_sends_one_word_or_nothing(desk: tuple[World, Lab]) -> None:
    """This is the desk's first test, because a kernel with more cells could return by its own rhythm."""
    world, lab = desk
    told = signs(lab.page)
    (kernel,) = lab.server.request("GET", "api/kernels")
    with world.emptied(kernel["id"]):
        expect(lab.item).to_contain_text("GPU · suspended")
        told.clear()  # its kernel was on the GPU until now
        a_cell_is_typed(lab)
    the_kernel_is_back_and_the_cell_waits_for_nothing(world, lab)
    only_one_word_leaves_the_page(told)
    a_released_kernel_stays_away_while_a_comment_is_typed_and_run(world, lab)


def signs(page: Page) -> list[Request]:
    """Return a list that grows with each sign that the page sends."""
    told: list[Request] = []
    page.on("request", lambda one: told.append(one) if one.url.partition("?")[0].endswith("/expect") else None)
    return told


def a_cell_is_typed(lab: Lab) -> None:
    lab.cells.last.locator(".cm-content").click()
    with lab.page.expect_request(lambda one: one.url.partition("?")[0].endswith("/expect")):
        lab.page.keyboard.type(f"{UNTOLD} = 1\n")
        lab.page.keyboard.insert_text(CHECK.strip())


def story(world: World, kernel_id: str) -> list[str]:
    with world.client() as client:
        return [line.reason for line in client.story(world.lease(kernel_id).lease_id).lines]


def the_kernel_is_back_and_the_cell_waits_for_nothing(world: World, lab: Lab) -> None:
    (kernel,) = lab.server.request("GET", "api/kernels")
    until(lambda: "resume.expected" in story(world, kernel["id"]), "the kernel is resumed early")
    world.await_state(kernel["id"], "resident")
    before = story(world, kernel["id"])
    lab.page.keyboard.press("Shift+Enter")
    expect(lab.output).to_contain_text("intact")
    after = story(world, kernel["id"])[len(before) :]
    assert not [one for one in after if one.startswith(("wait.", "resume.", "grant."))], "it ran at once"
    lab.run("%gpu explain")
    expect(lab.output).to_contain_text(
        re.compile(r"a cell is expected \((a cell is being edited|its notebook came|its cells usually run)")
    )


def only_one_word_leaves_the_page(told: list[Request]) -> None:
    assert told, "the page told no sign"
    for request in told:
        body = json.loads(request.post_data or "")
        assert body.keys() == {"sign"}
        assert body["sign"] in {"focus", "scroll", "typing", "hover"}
        assert UNTOLD not in request.url


def a_released_kernel_stays_away_while_a_comment_is_typed_and_run(world: World, lab: Lab) -> None:
    lab.run("%gpu release")
    expect(lab.item).to_contain_text("GPU · suspended")
    (kernel,) = lab.server.request("GET", "api/kernels")
    before = story(world, kernel["id"])
    lab.cells.last.locator(".cm-content").click()
    with lab.page.expect_response(lambda one: one.url.partition("?")[0].endswith("/expect")) as told:
        lab.page.keyboard.type("# think")
    assert told.value.ok
    lab.page.keyboard.press("Shift+Enter")
    assert world.lease(kernel["id"]).state == "suspended"
    assert "resume.expected" not in story(world, kernel["id"])[len(before) :]
    lab.run(CHECK.strip())
    expect(lab.output).to_contain_text("intact")


def test_a_stranger_is_named_where_a_cell_waits_and_the_begin_of_the_cell_is_told_until_switched_off(
    desk: tuple[World, Lab],
) -> None:
    world, lab = desk
    told = lab.page.get_by_role("alert").filter(has_text=TOLD)
    lab.page.evaluate(CLOCK)
    a_cell_waits_for_the_stranger(world, lab, accessible=True)
    expect(told).to_contain_text(f"{DESK}: a cell has begun, after waiting")
    lab.page.get_by_role("button", name="Never show this").click()
    until(lambda: lab.server.request("GET", SETTINGS)["settings"].get("waited") is False, "that is kept")
    a_cell_waits_for_the_stranger(world, lab)
    expect(told).to_have_count(0)
    lab.page.get_by_role("button", name="Suspend All").click()
    lab.page.get_by_role("dialog").get_by_role("button", name="Suspend All").click()
    expect(lab.item).to_contain_text("1/4 GPU · suspended")


@pytest.mark.promise("early-resume")
def test_notebook_7_tells_it_alike(desk: tuple[World, Lab], browser: Browser) -> None:
    world, lab = desk
    lab.server.request("PUT", SETTINGS, {"raw": json.dumps({"foresight": True})})
    (kernel,) = lab.server.request("GET", "api/kernels")
    with closing(new_page(browser)) as page:
        page.goto(f"{lab.server.url}notebooks/{DESK}?token={lab.server.token}")
        notebook = Lab(lab.server, page)
        notebook.run(CHECK.strip())
        expect(notebook.output).to_contain_text("intact")
        spoken = page.get_by_role("status").filter(has_text="GPU: ")
        with world.emptied(kernel["id"]):
            expect(spoken).to_have_text("GPU: suspended")
            told = signs(page)
            a_cell_is_typed(notebook)
        only_one_word_leaves_the_page(told)
        world.await_state(kernel["id"], "resident")
        page.keyboard.press("Shift+Enter")
        expect(notebook.output).to_contain_text("intact")


def test_the_panel_does_what_it_says_and_what_jupyterlab_hides_becomes_a_notification(desk: tuple[World, Lab]) -> None:
    world, lab = desk
    the_panels_buttons_act(lab)
    a_new_size_becomes_the_kernels_name(world, lab)
    state: State = lab.server.request("GET", "jupyter-fractional-gpu/state")
    world.kill_broker()  # from now on the server sends its pages what the test says
    expect(lab.item).to_be_hidden()
    doubt_is_an_alert(lab, state)
    slowness_is_told(lab, state)
    use_is_a_figure_once_it_was_measured(lab, state)
    waits_are_forecast_with_bounds(lab, state)
    a_budget_is_told_once_and_once_more_when_it_is_used_up(lab, state)
    a_deadline_is_told_and_taken_back(lab, state)
    the_panel_does_not_come_back_with_the_item(lab, state)
    a_kernel_without_a_gpu_is_told_of(world, lab)


def the_panels_buttons_act(lab: Lab) -> None:
    lab.item.focus()
    lab.page.keyboard.press("Enter")
    suspend, resume, pin, unpin = (
        lab.panel.get_by_role("button", name=name) for name in ("Suspend", "Resume", "Keep for 30 min", "Unpin")
    )
    expect(lab.panel).to_be_focused()
    the_panel_shows_the_advice(lab)
    lab.page.keyboard.press("Tab")
    expect(suspend).to_be_focused()
    lab.page.keyboard.press("Tab")
    expect(pin).to_be_focused()  # nothing is about to resume, and nothing is pinned
    lab.page.keyboard.press("Shift+Tab")
    lab.page.keyboard.press("Enter")
    expect(lab.panel.get_by_role("status")).to_contain_text("Suspend: done, ")
    expect(lab.item).to_contain_text("1/4 GPU · suspended (simulated)")
    expect(suspend).to_be_disabled()
    expect(lab.panel).to_be_focused()
    lab.page.keyboard.press("Tab")
    expect(resume).to_be_focused()
    lab.page.keyboard.press("Enter")
    expect(lab.panel.get_by_role("status")).to_contain_text("Resume: done, ")
    expect(lab.item).to_contain_text("of 256 MiB")
    pin.click()
    expect(lab.item).to_contain_text("pinned (simulated)")
    expect(lab.panel).to_contain_text("until ")
    lab.picture("panel")
    if ALL_LOOKS:
        assert_accessible(lab.page, OURS)
    the_panel_is_there_in_the_dark_and_goes_at_a_click_beside_it(lab)
    lab.item.click()
    unpin.click()
    expect(lab.item).not_to_contain_text("pinned")


def the_panel_is_there_in_the_dark_and_goes_at_a_click_beside_it(lab: Lab) -> None:
    lab.choose_theme("JupyterLab Dark")
    lab.item.click()
    expect(lab.panel).to_be_visible()
    lab.picture("panel-dark")
    if ALL_LOOKS:
        assert_accessible(lab.page, OURS)
    the_panel_fits_a_small_screen(lab)
    lab.page.locator(".jp-NotebookPanel").click(position={"x": 300, "y": 80})
    expect(lab.panel).to_be_hidden()


def the_panel_fits_a_small_screen(lab: Lab) -> None:
    """The item is outside the visible status bar, where JupyterLab has no room for it; the keyboard reaches it."""
    size = lab.page.viewport_size
    assert size is not None
    lab.page.keyboard.press("Escape")
    expect(lab.panel).to_be_hidden()
    expect(lab.item).to_be_focused()
    lab.page.set_viewport_size({"width": SMALL_PX, "height": size["height"]})
    lab.item.focus()
    lab.page.keyboard.press("Enter")
    expect(lab.panel).to_be_focused()
    box = lab.panel.bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= SMALL_PX, box
    assert not lab.panel.evaluate("panel => panel.scrollWidth > panel.clientWidth"), "only lines go beyond the panel"
    assert_accessible(lab.page, OURS)
    lab.page.set_viewport_size(size)


def the_panel_shows_the_advice(lab: Lab) -> None:
    """One row, with the figures and the risk; a narrow window does not cut it off."""
    advice = lab.panel.locator("dt", has_text="Advice").locator("xpath=following-sibling::dd[1]")
    suffices = (
        r"1/8 GPU \(128 MiB\) would suffice: at most 60 MiB of 256 MiB was used on [89] days"  # with or without today
    )
    expect(advice).to_contain_text(re.compile(suffices))
    expect(advice).to_contain_text(re.compile("(9|10) % of future days may be short"))
    assert advice.evaluate("row => row.scrollWidth <= row.clientWidth")


def a_new_size_becomes_the_kernels_name(world: World, lab: Lab) -> None:
    """The same is true whether the notebook or another program asks for it."""
    name = lab.page.locator(".jp-NotebookPanel .jp-KernelName")
    lab.run("%gpu resize 1/2")
    expect(lab.item).to_contain_text("1/2 GPU · ")
    expect(name).to_have_text("Python 3 · 1/2 GPU (simulated)")
    status = lab.page.get_by_role("button", name="Python 3 · 1/2 GPU (simulated) | Idle", exact=True)
    expect(status).to_be_visible()
    lease = world.lease(lab.server.request("GET", "api/kernels")[0]["id"])
    with world.client() as client:
        client.resize(lease.lease_id, ResizeRequest(fraction_milli=250))
    expect(name).to_have_text("Python 3 · 1/4 GPU (simulated)")
    expect(status).to_have_count(0)


def tell(lab: Lab, state: State) -> None:
    """Make the server send its pages this state, as it does with the broker's."""
    lab.server.request("POST", "api/events", {"schema_id": STATE_ID, "version": "1", "data": state})


def doubt_is_an_alert(lab: Lab, state: State) -> None:
    state["kernels"][0] |= {"state": "quarantined", "sentence": "nobody knows where its memory is"}
    tell(lab, state)
    doubt = lab.page.get_by_role("alert").filter(has_text=f"{DESK}: nobody knows where its memory is")
    expect(doubt).to_be_visible()
    expect(lab.item).to_contain_text("1/4 GPU · unknown, under examination (simulated)")


def slowness_is_told(lab: Lab, state: State) -> None:
    slowed = {
        "state": "resident",
        "slowdown_brief": "runs next to eval.ipynb, about 1.4 times as long as alone (1.2 to 1.9)",
    }
    state["kernels"][0] |= slowed
    state["devices"][0] |= {"demand_percent": 140}
    tell(lab, state)
    lab.item.click()
    expect(lab.panel).to_contain_text("runs next to eval.ipynb, about 1.4 times as long as alone (1.2 to 1.9)")
    needed = "busy kernels need about 140 % of its compute, so they slow each other down"
    expect(lab.panel.get_by_role("listitem")).to_contain_text(needed)


def waits_are_forecast_with_bounds(lab: Lab, state: State) -> None:
    """Needs the panel open. The text comes from `format_forecast`."""
    before = dict(state["kernels"][0])
    for span_ms in (
        (40_000, 10_000, 120_000),
        (8_000, 5_000, 14_000),
        (8_000, 200, 14_000),
        (5_400_000, 3_600_000, 7_200_000),
    ):
        expected_ms, low_ms, high_ms = span_ms
        span = {"expected_ms": expected_ms, "low_ms": low_ms, "high_ms": high_ms}
        waits = {"position": 1, "expected": span}
        state["kernels"][0] |= {"state": "suspended", **waits}
        tell(lab, state)
        expect(lab.panel).to_contain_text(f"{format_forecast(*span_ms)} until it is on the GPU")
    state["kernels"][0] = before


def use_is_a_figure_once_it_was_measured(lab: Lab, state: State) -> None:
    before = dict(state["kernels"][0])
    for used_mib, measured, shown in ((0, False, "measuring"), (0, True, "0 MiB of 256 MiB"), (24, False, "24 MiB of")):
        state["kernels"][0] |= {"state": "resident", "position": None, "used_mib": used_mib, "measured": measured}
        tell(lab, state)
        expect(lab.item).to_contain_text(f"1/4 GPU · {shown}")
        expect(lab.panel).to_contain_text(shown)
    state["kernels"][0] = before


def a_budget_is_told_once_and_once_more_when_it_is_used_up(lab: Lab, state: State) -> None:
    alerts = lab.page.get_by_role("alert").filter(has_text="Your budget of")
    for spent, used_up, told in ((80, False, 1), (90, False, 1), (100, True, 2), (101, True, 2)):
        sentence = f"Your budget of 1.00 EUR per day: {spent} % are spent"
        state["kernels"][0] |= {"budget": sentence, "budget_used_up": used_up}
        tell(lab, state)
        expect(lab.panel).to_contain_text(sentence)
        expect(alerts).to_have_count(told)


def a_deadline_is_told_and_taken_back(lab: Lab, state: State) -> None:
    alerts = lab.page.get_by_role("alert").filter(has_text="goes away at")
    plain = dict(state["kernels"][0])
    state["kernels"][0] |= {"goes_away_in_ms": 600_000}
    state["devices"][0] |= {"draining": True, "goes_away_in_ms": 600_000, "leases_saved": 1}
    tell(lab, state)
    expect(alerts).to_have_text(re.compile("Its GPU goes away at .*, and it is saved before"))
    expect(lab.item).to_contain_text("saved before GPU goes away at")
    expect(lab.panel).to_contain_text(re.compile("goes away at .*: 1 of its kernels will be saved, 0 cannot be"))
    state["kernels"][0] |= {"goes_away_in_ms": 500_000, "lost_because": "it is too large", "sentence": "it stays here"}
    state["devices"][0] |= {"goes_away_in_ms": 500_000, "leases_saved": 0, "leases_lost": 1}
    tell(lab, state)
    expect(alerts).to_have_text(re.compile("cannot be saved before: save to disk now. Why: it is too large"))
    expect(lab.item).to_contain_text("cannot be saved, GPU goes away at")
    state["kernels"][0] |= {"host_goes_away_in_ms": 30_000}
    tell(lab, state)
    expect(alerts).to_have_text(re.compile("Its host goes away at .* with all of its memory: save to a disk"))
    state["kernels"][0] = plain
    state["devices"][0] |= {"draining": False, "goes_away_in_ms": None, "leases_lost": 0}
    tell(lab, state)
    expect(alerts).to_have_count(0)
    expect(lab.item).to_contain_text("1/4 GPU · 0 MiB of" if not plain["used_mib"] else "of 256 MiB")
    expect(lab.panel).not_to_contain_text("Deadline")


def the_panel_does_not_come_back_with_the_item(lab: Lab, state: State) -> None:
    tell(lab, {"broker": False, "simulated": False, "kernels": [], "devices": []})
    expect(lab.item).to_be_hidden()
    tell(lab, state)
    expect(lab.item).to_have_attribute("aria-expanded", "false")
    expect(lab.panel).to_have_count(0)


def a_kernel_without_a_gpu_is_told_of(world: World, lab: Lab) -> None:
    """The kernel restarts while no broker can be started."""
    (kernel,) = lab.server.request("GET", "api/kernels")
    restart_file = Path(world.socket).with_name("broker.json")
    restart_file.write_text("no broker can be started from this")
    lab.server.request("POST", f"api/kernels/{kernel['id']}/restart")
    notice = lab.page.get_by_role("alert").filter(has_text=f"{DESK}: This kernel was started without a GPU")
    expect(notice).to_be_visible()
    lab.picture("notice")
    restart_file.unlink()
