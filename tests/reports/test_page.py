"""The page in a real browser and by its colours: readable at 320 pixels, in light and dark, and loading nothing."""

import csv
import dataclasses
import json
import re
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser

from fractional_gpu import pages
from fractional_gpu.core.metering.usage import SHARE_HOUR, Party, Usage, UsageKey, UsageRow
from fractional_gpu.protocol.accounts import UsageReport
from fractional_gpu.reports.as_json import as_json
from fractional_gpu.reports.chargeback import as_csv
from fractional_gpu.reports.columns import tabulated
from fractional_gpu.reports.page import PARTS, bars, day_bars, page
from fractional_gpu.simulator.picture import picture
from tests.e2e.browser import opened_browser
from tests.kernelext.statuses import ADVICE
from tests.reports.made import BEGINS_S, report_of
from tests.simulator.test_picture import ABOUT, two_runs
from tests.support.axe import assert_accessible, assert_accessible_in_any_look, violations

pytestmark = pytest.mark.promise("accessibility")

PAGES = {"light": "#ffffff", "dark": "#14171c"}
H = SHARE_HOUR


def week(users: int = 25, days: int = 7) -> UsageReport:
    """A report of a week of users with long names in two groups."""
    rows = [
        UsageRow(
            UsageKey(BEGINS_S + day * 86_400 + 36_000, f"lease-{user}", "gpu-0", "EUR"),
            Party("large", f"a-user-with-a-rather-long-name-{user}", ("physics", "biology")[user % 2], "a.ipynb"),
            Usage(
                reserved_share=3 * H, held_share=2 * H, busy_share=H, suspended_share=H, occupied_us=2 * H,
                charge_milli=1_234_567 * (user + 1), resident_milli=10**10, energy_mj=10**9,
            ),
        )
        for day in range(days)
        for user in range(users)
    ]  # fmt: skip
    rows.append(UsageRow(UsageKey(BEGINS_S, "", "gpu-0", "EUR"), Party("large"), Usage(occupied_us=50 * H)))
    return report_of(rows)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as opened:
        yield opened


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (1100, "dark")])
def test_the_page_fits_its_window_and_loads_nothing(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    file = tmp_path / "use.html"
    report = replace(week(), advice=[replace(ADVICE, notebook="a-notebook-with-a-long-name" * 4 + ".ipynb")])
    file.write_text(page(report, ["user", "day"], made_by="jupyter gpu report --by user,day", zone=UTC))
    opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    asked: list[str] = []
    complaints: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("console", lambda message: complaints.append(message.text))
    opened.goto(file.as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert asked == [file.as_uri()]
    assert complaints == []
    assert (
        opened.evaluate("getComputedStyle(document.body).backgroundColor")
        == {
            "light": "rgb(255, 255, 255)",
            "dark": "rgb(20, 23, 28)",
        }[scheme]
    )
    smallest = opened.evaluate(
        "Math.min(...[...document.querySelectorAll('svg.days text')].map(e => e.getBoundingClientRect().height))"
    )
    assert smallest >= 10
    opened.close()


def test_axe_finds_nothing_on_the_pages_in_any_look(browser: Browser, tmp_path: Path) -> None:
    """A report with advice and in several pools, as for an administrator, one of a time without use, and simulated runs in every colour."""
    large = replace(week(days=2), advice=[replace(ADVICE, notebook="a-notebook-with-a-long-name" * 4 + ".ipynb")])
    for text in (
        page(large, ["user", "day"], made_by="jupyter gpu report", zone=UTC),
        page(report_of([]), ["user"], made_by="jupyter gpu report", zone=UTC),
        picture(two_runs() * 5, dataclasses.replace(ABOUT, policy="c.GPUBroker.pools = {...}\n" * 3)),
    ):
        file = tmp_path / "page.html"
        file.write_text(text)
        opened = browser.new_page(viewport={"width": 1280, "height": 800})
        opened.goto(file.as_uri())
        assert_accessible_in_any_look(opened)
        opened.close()


def test_axe_finds_what_is_wrong_and_tells_ours_from_the_pages(browser: Browser) -> None:
    opened = browser.new_page()
    label = '<label>size <input id="size"></label>'
    body = f'<style>input {{ height: 3em }}</style><input id="theirs"><div id="ours">{label}</div>'
    opened.set_content(f'<html lang="en"><title>a</title><body>{body}</html>')
    assert_accessible(opened, "#ours")
    opened.evaluate("document.querySelector('#ours label').replaceWith(document.querySelector('#size'))")
    with pytest.raises(AssertionError, match=r"label: .*size"):
        assert_accessible(opened, "#ours")
    assert list(violations(opened)) == [
        "label: html > body > input:nth-child(2)",
        "label: html > body > div:nth-child(3) > input",
    ]
    opened.evaluate("document.querySelector('#ours').innerHTML = '<p style=\"color: #999\">Faint</p>'")
    with pytest.raises(AssertionError, match=r"contrast of 2\.84"):
        assert_accessible(opened, "#ours")
    opened.close()


def test_the_page_prints(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "use.html"
    file.write_text(page(week(3), ["user"], made_by="a test", zone=UTC))
    opened = browser.new_page(color_scheme="dark")
    opened.goto(file.as_uri())
    opened.emulate_media(media="print")
    assert opened.evaluate("getComputedStyle(document.querySelector('.wide')).overflowX") == "visible"
    assert opened.pdf(format="A4").startswith(b"%PDF")
    opened.close()


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_drawn_stands_out_from_the_page(scheme: str) -> None:
    style = Path(pages.__file__).parent.joinpath("templates", "report.css").read_text()
    pairs = re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", style)
    colours = {name: {"light": light, "dark": dark}[scheme] for name, light, dark in pairs}
    drawn = [name for name in (*PARTS, "bar") if name != "free"]  # what is free has a border in the colour of texts
    assert {name: contrast(colours[name], PAGES[scheme]) >= 3 for name in drawn} == dict.fromkeys(drawn, True)
    text = {"light": "#4b5563", "dark": "#a8b0bd"}[scheme]
    assert contrast(text, PAGES[scheme]) >= 4.5
    assert contrast(text, colours["stripe"]) >= 4.5


def test_what_is_drawn_is_also_said() -> None:
    text = page(week(3, 2), ["user"], made_by="a test", zone=UTC)
    assert "2026-01-05: busy 3.00, held idle 3.00, free 50.00, suspended 3.00 (GPU hours)" in text
    assert re.search(r'<svg role="img" class="days"[^>]*><title>', text)
    assert text.count("<caption>") == text.count("<table>")


def test_a_hubs_user_and_one_of_the_machine_with_the_same_name_are_two_lines_two_bars_and_two_bills() -> None:
    def used(hour: int, owner: str, amount: int, *, seated: bool) -> UsageRow:
        party, key = Party("large", owner, seated=seated), UsageKey(BEGINS_S + 3600 * hour, "a", "gpu-0", "EUR")
        return UsageRow(key, party, Usage(charge_milli=amount, held_share=H))

    both = report_of([used(1, "ada", 1000, seated=True), used(2, "ada", 3, seated=False)])
    assert [line.names for line in tabulated(both, ["user"]).lines] == [("ada (hub)",), ("ada (machine)",), ("total",)]
    html = page(both, ["user"], made_by="a test", zone=UTC)
    assert html.count('<td class="name">ada (hub)</td>') == html.count('<td class="name">ada (machine)</td>') == 3
    billed = {
        row["SubAccountId"]: row["BilledCost"]
        for row in csv.DictReader(as_csv(both, ["user"], provider="p").splitlines())
    }
    assert billed == {"hub-user/ada": "1.000", "user/ada": "0.003"}
    found = {one["of"]["account"]: one["charge_milli"] for one in json.loads(as_json(both, ["user"]))["entries"]}
    assert found == {"hub": 1000, "machine": 3}
    alone = report_of([used(1, "ada", 1000, seated=True), used(2, "bob", 1, seated=True)])
    assert [line.names[0] for line in tabulated(alone, ["user"]).lines] == ["ada", "bob", "total"]


def test_advice_is_a_list_that_names_users_where_there_are_several() -> None:
    hers = replace(ADVICE, owner="ada", notebook="<b>.ipynb")
    one = page(replace(week(3, 2), advice=[hers]), ["notebook"], made_by="a test", zone=UTC)
    assert "<li><strong>&lt;b&gt;.ipynb</strong>: 1/8 GPU (10 GiB) would suffice: at most 8 GiB of 20 GiB" in one
    both = page(replace(week(3, 2), advice=[hers, ADVICE]), ["notebook"], made_by="a test", zone=UTC)
    assert "<strong>ada, &lt;b&gt;.ipynb</strong>" in both
    assert "<strong>me, train.ipynb</strong>" in both
    assert "Advice on shares" not in page(week(3, 2), ["notebook"], made_by="a test", zone=UTC)
    assert "Advice on shares" in page(replace(week(0, 0), entries=[], advice=[hers]), [], made_by="a test", zone=UTC)


def test_free_is_shown_of_whole_devices_alone() -> None:
    assert [one.free for one in day_bars(week(3, 2), whole=True)] == [50 * H, 0]
    assert [one.free for one in day_bars(week(3, 2), whole=False)] == [0, 0]


def test_days_without_use_are_there_and_many_days_become_months() -> None:
    def on(*days: int) -> UsageReport:
        return report_of([
            UsageRow(UsageKey(BEGINS_S + day * 86_400, "a", "", "EUR"), Party("large", "ada"), Usage(suspended_share=H))
            for day in days
        ])  # fmt: skip

    assert [(one.when, one.suspended // H) for one in day_bars(on(0, 2), whole=True)] == [
        ("2026-01-05", 1),
        ("2026-01-06", 0),
        ("2026-01-07", 1),
    ]
    assert [(one.when, one.suspended // H) for one in day_bars(on(0, 1, 80), whole=True)] == [
        ("2026-01", 2),
        ("2026-02", 0),
        ("2026-03", 1),
    ]


def test_beyond_twenty_users_the_rest_is_one_line() -> None:
    (found,) = bars(week(25), "user")
    names = [name for name, _, _ in found.rows]
    assert len(names) == 21
    assert names[-1] == "5 others"
    assert names[0].endswith("long-name-24")
    assert names[1].endswith("long-name-23")
