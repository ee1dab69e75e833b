"""The page about runs: what it says first, its axes, its inputs, and that it needs nothing else."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.experience import Spread
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.picture import RunDescription, headline, picture
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from tests.simulator.loads import BUSY

pytestmark = pytest.mark.promise("accessibility")

ABOUT = RunDescription(
    users=50, machine="6 devices of 80 GiB", whole_gpus=41, command="jupyter gpu simulate --users 50", version="1.2"
)


@pytest.fixture(scope="module")
def runs() -> list[Result]:
    return two_runs()


def two_runs() -> list[Result]:
    device = DeviceSpec(device_id="d0", name="d", memory_mib=81_920)
    host = Host(devices=(device,), pools=(PoolSpec(name="default", devices=("d0",)),))
    trace = synthetic_sessions(8, 1, 2, BUSY)
    return [simulate([host, host], trace), run_baseline("reservation", [host, host], trace)]


class Closed(HTMLParser):
    """Fails where elements are not closed in the order in which they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_shows_every_run(runs: list[Result]) -> None:
    named = [runs[0], replace(runs[1], name="<b>plain</b>")]
    page = picture(named, ABOUT)
    assert page.count('<svg role="img"') == 4
    assert page.count("<polyline") == 8
    assert page.count('class="swatch"') == 2
    assert "&lt;b&gt;plain" in page
    assert not any(outside in page for outside in ("<script", "http:", "https:", "url(", "@import", "<b>plain"))
    checked = Closed()
    checked.feed(page)
    checked.close()
    assert not checked.open


def test_all_that_is_given_is_escaped(runs: list[Result]) -> None:
    about = RunDescription(
        users=1, machine="<i>a</i>", whole_gpus=1, command="<i>b</i>", version="<i>c</i>", policy="<i>d</i>"
    )
    page = picture(runs, about)
    assert "<i>" not in page
    assert [page.count(f"&lt;i&gt;{letter}&lt;/i&gt;") for letter in "abcd"] == [1, 1, 1, 1]


def test_the_page_has_colours_for_light_and_dark_for_each_run_and_a_dash(runs: list[Result]) -> None:
    page = picture(runs * 5, ABOUT)
    assert 'content="light dark"' in page
    used = set(re.findall(r'class="run(\d)"', page))
    assert used == set("0123456")
    for number in used:
        assert f"--run{number}: light-dark(" in page
        assert f".run{number} {{ stroke: var(--run{number});" in page


def test_the_worst_host_is_shown_where_there_are_several(runs: list[Result]) -> None:
    assert len(runs[0].host_p95_ms) == 2
    page = picture(runs, ABOUT)
    assert f"<td>{max(runs[0].host_p95_ms) / 1000:,.12g}</td>" in page
    assert "on the worst host" in page
    assert "worst host" not in picture([replace(run, hosts=1) for run in runs], ABOUT)


def test_the_first_sentence_has_the_figures_of_the_first_run(runs: list[Result]) -> None:
    result = replace(runs[0], waits=Spread.of([0, 100, 2_620]), out_of_memory=0, lost=0)
    rarely = headline(replace(result, waits=Spread.of([0] * 976 + [13_000] * 24)), ABOUT)
    assert ": 97.6 % of the GPU cells did not wait, and the others waited at most 13 s; whole GPUs" in rarely
    said = "50 users on 6 devices of 80 GiB: 95 % of the GPU cells waited at most 2.6 s"
    needed = "whole GPUs for each open session would have taken 41 devices"
    assert headline(result, ABOUT) == f"{said}; {needed}."
    assert headline(replace(result, waits=Spread.of([600_000])), ABOUT).startswith(said.replace("2.6 s", "10 min"))
    assert headline(replace(result, waits=Spread.of([9_000_000])), ABOUT).startswith(said.replace("2.6 s", "2.5 h"))
    assert ": no GPU cell waited; whole" in headline(replace(result, waits=Spread.of([0, 0])), ABOUT)
    bad = replace(result, out_of_memory=3, lost=2)
    failures = "a cell ran out of memory 3 times; 2 sessions could not finish"
    assert headline(bad, ABOUT) == f"{said}; {needed}; {failures}."
    none = headline(replace(result, waits=Spread()), replace(ABOUT, users=1, whole_gpus=1))
    assert (
        none == "1 user on 6 devices of 80 GiB: no cell used a GPU; " + needed.replace("41 devices", "1 device") + "."
    )
    assert picture([result], ABOUT).count(f"{said}; {needed}.") == 1
