"""What a person sees: a real JupyterLab in a real browser, with real kernels on the simulated device."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from fractional_gpu.core.forecasts.habits import Share
from fractional_gpu.core.units import format_forecast
from fractional_gpu.protocol.messages import ResizeRequest
from fractional_gpu_kernel.server.app import STATE_ID
from tests.e2e.browser import Lab, opened_lab
from tests.labextension.conftest import State
from tests.support.axe import SMALL_PX, assert_accessible
from tests.support.pair import NO_TURNS
from tests.support.share_days import keep_days
from tests.support.stories import CHECK, fill
from tests.support.world import World

pytestmark = pytest.mark.promise("accessibility")

KERNEL = "Python 3 · 3/4 GPU"
OURS = ".jp-FractionalGPU-item, .jp-FractionalGPU-panel"
BUSY = """
import pathlib, time
while not pathlib.Path({go!r}).exists():
    time.sleep(0.05)
print("finished")
"""
WORK = """
import pathlib
print("works")
while not pathlib.Path({go!r}).exists():
    cuda.launch(0.05)
print("finished")
"""


def test_two_notebooks_share_a_device_before_a_persons_eyes(world: World, tmp_path: Path) -> None:
    world.configure(NO_TURNS)
    world.install(250, 500, 750)
    with opened_lab(world) as lab:
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

        lab.launch(KERNEL)  # a second notebook, for which there is no room beside the first
        go = tmp_path / "go"
        lab.run(fill(2, 64).strip() + "\n" + BUSY.format(go=str(go)).strip())
        expect(lab.item).to_contain_text("of 768 MiB")
        lab.turn_to("Untitled.ipynb")
        expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")
        lab.item.click()
        expect(lab.panel).to_contain_text(
            re.compile("in the host's memory; bringing it back takes (about|under|up to) ")
        )
        expect(lab.panel).to_contain_text("once there is room")
        expect(lab.panel.get_by_role("button", name="Resume")).to_be_enabled()
        lab.picture("suspended")
        assert_accessible(lab.page, OURS)
        lab.page.keyboard.press("Escape")
        expect(lab.panel).to_be_hidden()
        expect(lab.item).to_be_focused()

        lab.run(CHECK.strip())
        expect(lab.item).to_contain_text("3/4 GPU · waiting, place 1 (simulated)")
        expect(lab.output).to_contain_text(re.compile("wait", re.IGNORECASE))
        expect(lab.page.get_by_role("status").filter(has_text="GPU: waiting for the GPU, place 1")).to_have_count(1)
        lab.picture("waiting")
        lab.page.get_by_role("button", name=re.compile("Interrupt the kernel")).first.click()
        expect(lab.output).to_contain_text("KeyboardInterrupt")
        expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")

        go.touch()
        lab.run(CHECK.strip())
        expect(lab.output).to_contain_text("intact")
        expect(lab.item).to_contain_text("of 768 MiB")
        lab.picture("resumed")
        lab.turn_to("Untitled1.ipynb")
        expect(lab.output).to_contain_text("finished")
        expect(lab.item).to_contain_text("3/4 GPU · suspended (simulated)")


def test_three_notebooks_take_turns_and_each_says_where_it_stands(world: World, tmp_path: Path) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'min_residency': '10m', 'min_residency_swaps': 0}}")
    world.install(750)
    go = tmp_path / "go"
    with opened_lab(world) as lab:
        for seed in (1, 2, 3):
            lab.launch(KERNEL)
            lab.run(fill(seed, 16).strip() + "\n" + WORK.format(go=str(go)).strip())
            if seed == 1:
                expect(lab.output).to_contain_text("works")
            else:
                expect(lab.output).to_contain_text(f"place {seed - 1} in the queue")
                expect(lab.output).to_contain_text(re.compile("or when its turn ends, in about (10|9) min"))
        assert world.command("pool", "default", "min_residency=20s").returncode == 0
        lab.turn_to("Untitled1.ipynb")
        expect(lab.output).to_contain_text("works")
        assert world.command("pool", "default", "min_residency=10m").returncode == 0

        lab.turn_to("Untitled2.ipynb")
        expect(lab.output).to_contain_text("This cell waits for the GPU, place 1 in the queue")
        lab.turn_to("Untitled.ipynb")
        expect(lab.output).to_contain_text(
            "This cell gave the GPU to another kernel and gets it back, place 2 in the queue"
        )
        expect(lab.output).to_contain_text("Untitled1.ipynb is running a cell")
        lab.page.get_by_role("button", name=re.compile("Interrupt the kernel")).first.click()
        expect(lab.output).to_contain_text("KeyboardInterrupt: interrupted while it waited for the GPU")
        expect(lab.output).not_to_contain_text("Traceback")
        expect(lab.output).not_to_contain_text("gave the GPU")
        lab.turn_to("Untitled1.ipynb")
        go.touch()
        expect(lab.output).to_contain_text("finished")
        expect(lab.output).not_to_contain_text("place")


def test_the_panel_does_what_it_says_and_what_jupyterlab_hides_becomes_a_notification(world: World) -> None:
    world.install(250)
    keep_days(world.ledger, str(world.notebooks / "Untitled.ipynb"), Share(250, 256), 60)
    with opened_lab(world) as lab:
        lab.launch("Python 3 · 1/4 GPU")
        lab.run(fill(1, 32).strip() + '\nprint("there")')
        expect(lab.output).to_contain_text("there")
        the_panels_buttons_act(lab)
        a_new_size_becomes_the_kernels_name(world, lab)
        the_panel_is_there_in_the_dark_and_goes_at_a_click_beside_it(lab)
        state = doubt_is_an_alert(lab)
        world.kill_broker()
        expect(lab.item).to_be_hidden()
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
    expect(pin).to_be_focused()  # nothing is to be resumed, and nothing is pinned
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
    assert_accessible(lab.page, OURS)
    the_panel_fits_a_small_screen(lab)
    unpin.click()
    expect(lab.item).not_to_contain_text("pinned")


def the_panel_fits_a_small_screen(lab: Lab) -> None:
    """The item is beyond the screen's edge, where JupyterLab has no room for it; the keyboard reaches it."""
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
    expect(advice).to_contain_text("1/8 GPU (128 MiB) would suffice: at most 60 MiB of 256 MiB was used on 8 days")
    expect(advice).to_contain_text("10 % of the days to come may be short")
    assert advice.evaluate("row => row.scrollWidth <= row.clientWidth")


def a_new_size_becomes_the_kernels_name(world: World, lab: Lab) -> None:
    """Whether the notebook asks for it or another program does."""
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


def the_panel_is_there_in_the_dark_and_goes_at_a_click_beside_it(lab: Lab) -> None:
    lab.turn_dark()
    lab.item.click()
    expect(lab.panel).to_be_visible()
    lab.picture("panel-dark")
    assert_accessible(lab.page, OURS)
    lab.page.locator(".jp-NotebookPanel").click(position={"x": 300, "y": 80})
    expect(lab.panel).to_be_hidden()


def tell(lab: Lab, state: State) -> None:
    """Let the server tell its pages this state, as it tells them the broker's."""
    lab.server.request("POST", "api/events", {"schema_id": STATE_ID, "version": "1", "data": state})


def doubt_is_an_alert(lab: Lab) -> State:
    """Returns the state that was told."""
    state: State = lab.server.request("GET", "jupyter-fractional-gpu/state")
    state["kernels"][0] |= {"state": "quarantined", "sentence": "nobody knows where its memory is"}
    tell(lab, state)
    doubt = lab.page.get_by_role("alert").filter(has_text="Untitled.ipynb: nobody knows where its memory is")
    expect(doubt).to_be_visible()
    expect(lab.item).to_contain_text("1/4 GPU · unknown, under examination (simulated)")
    return state


def slowness_is_told(lab: Lab, state: State) -> None:
    slowed = {
        "state": "resident",
        "slowdown_brief": "runs beside eval.ipynb, about 1.4 times as long as alone (1.2 to 1.9)",
    }
    state["kernels"][0] |= slowed
    state["devices"][0] |= {"demand_percent": 140}
    tell(lab, state)
    lab.item.click()
    expect(lab.panel).to_contain_text("runs beside eval.ipynb, about 1.4 times as long as alone (1.2 to 1.9)")
    needed = "busy kernels need about 140 % of its compute, so they slow each other down"
    expect(lab.panel.get_by_role("listitem")).to_contain_text(needed)


def waits_are_forecast_with_bounds(lab: Lab, state: State) -> None:
    """Needs the panel open. The words are those of `format_forecast`."""
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
    """It restarts while no broker can be started."""
    (kernel,) = lab.server.request("GET", "api/kernels")
    restart_file = Path(world.socket).with_name("broker.json")
    restart_file.write_text("no broker can be started from this")
    lab.server.request("POST", f"api/kernels/{kernel['id']}/restart")
    notice = lab.page.get_by_role("alert").filter(has_text="Untitled.ipynb: This kernel was started without a GPU")
    expect(notice).to_be_visible()
    lab.picture("notice")
    restart_file.unlink()
