"""The output of the commands: the same in HTML and in plain text, sizes of other users' leases without names, nothing unescaped."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fractional_gpu.protocol.status import History, Story, StoryLine, Stranger, UsagePoint
from fractional_gpu_kernel.display.chart import HistoryView, columns
from fractional_gpu_kernel.display.lines import View
from fractional_gpu_kernel.display.views import StatusView, StoryView, TopView, bar, moment, text_bar
from tests.kernelext.statuses import DEVICE, EVIL, LEASE, NOW_MS, host, points
from tests.support.statuses import changed


class Text(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def html_of(view: View) -> Text:
    parsed = Text(view.bundle()["text/html"])
    assert parsed.open == [], "every tag is closed"
    assert "script" not in parsed.tags
    return parsed


def test_the_status_shows_share_use_state_pin_and_neighbours_as_sizes() -> None:
    view = StatusView(LEASE)
    assert [name for name, _ in view.rows()] == [
        "share",
        "state",
        "device",
        "memory",
        "cap",
        "pinned",
        "neighbours",
        "last",
    ]
    shown = " ".join(html_of(view).words)
    for _, sentence in view.rows():
        assert sentence in shown


def test_a_suspended_kernel_says_what_is_held_and_when_it_is_back() -> None:
    suspended = changed(
        LEASE, state="suspended", used_mib=0, saved_mib=512, resume_ms=2100, position=2, expected_ms=40_000, pinned_ms=0
    )
    rows = dict(StatusView(suspended).rows())
    assert "512 MiB" in rows["saved"]
    assert "2 s" in rows["resume"]
    assert "place 2" in rows["queue"]
    assert "40 s" in rows["queue"]


def test_a_kernel_that_cannot_be_suspended_says_why() -> None:
    rows = dict(StatusView(changed(LEASE, unsuspendable_reason="its memory is managed (RMM)")).rows())
    assert rows["stays"].endswith("its memory is managed (RMM)")


def test_several_devices_are_said() -> None:
    assert "2 devices" in repr(StatusView(changed(LEASE, device_ids=["GPU-0", "GPU-1"])))


def test_top_names_ones_own_and_sums_up_the_others() -> None:
    waiting = changed(
        LEASE, lease_id="lease-3", label="", state="suspended", reserved_mib=0, busy=False, pinned_ms=0, position=1
    )
    mine = changed(LEASE, lease_id="lease-2", label="eval.ipynb", fraction_milli=125, reserved_mib=10240)
    empty = replace(DEVICE, device_id="GPU-1", index=1, used_mib=0, reserved_mib=0, stranger_mib=0, draining=True)
    view = TopView(host(LEASE, mine, waiting, devices=(DEVICE, empty)), "lease-1")
    drawn = repr(view)
    words = html_of(view).words
    for cell in ("this kernel", "eval.ipynb", "lease-3", "others", "40 GiB", "2 GiB", "GPU 1", "place 1"):
        assert cell in drawn
        assert any(cell in word for word in words), cell


def test_a_story_is_told_newest_last_and_says_what_is_left_out() -> None:
    lines = [StoryLine(at_ms=NOW_MS - 1000 * each, reason="r", sentence=f"line {each}") for each in (9, 5, 1)]
    view = StoryView(Story(lease_id="lease-1", lines=lines, omitted=4), 2, NOW_MS)
    assert [sentence for _, sentence in view.rows()] == ["line 5", "line 1"]
    assert repr(view).splitlines()[-1].startswith("5 older lines left out;")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", view.rows()[0][0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", moment(NOW_MS - 200_000_000, NOW_MS))
    assert StoryView(Story(lease_id="lease-1"), 20, NOW_MS).rows() == []


def test_nothing_of_what_others_wrote_becomes_markup() -> None:
    evil = changed(LEASE, pool=EVIL, label=EVIL, device_name=EVIL, sentence=EVIL, state=EVIL)
    evil = changed(evil, neighbours=[replace(LEASE.neighbours[1], label=EVIL, state=EVIL)])
    program = Stranger(pid=4711, user=EVIL, used_mib=1, command=EVIL, own=True)
    device = replace(DEVICE, name=EVIL, pool=EVIL)
    strangers_only = replace(DEVICE, strangers=[program])
    views: list[View] = [
        StatusView(evil),
        TopView(host(evil, changed(evil, lease_id=EVIL, reserved_mib=0), devices=(device,)), "lease-9"),
        TopView(host(devices=(strangers_only,))),
        StoryView(Story(lease_id=EVIL, lines=[StoryLine(at_ms=NOW_MS, reason=EVIL, sentence=EVIL)]), 20, NOW_MS),
        HistoryView(History(lease_id=EVIL, cap_mib=1, points=[replace(points()[1], state=EVIL)]), now_ms=NOW_MS),
    ]
    for view in views:
        assert EVIL in "".join(html_of(view).words)


def test_every_colour_has_a_theme_variable_and_every_picture_a_description() -> None:
    views: list[View] = [
        StatusView(LEASE),
        TopView(host(LEASE), "lease-1"),
        HistoryView(History(lease_id="lease-1", cap_mib=20480, points=points()), now_ms=NOW_MS),
    ]
    for view in views:
        html = view.bundle()["text/html"]
        for colour in re.findall(r"#[0-9a-f]{3,6}\b|rgba?\(", html):
            assert re.search(rf"var\(--jp-[a-z0-9-]+,{re.escape(colour)}", html)
        assert re.findall(r'role="img" aria-label="[^"]+"', html)


def test_the_history_says_the_same_in_signs_and_in_a_picture() -> None:
    view = HistoryView(History(lease_id="lease-1", cap_mib=20480, points=points()), now_ms=NOW_MS)
    summary, used, saved, strip, legend = repr(view).splitlines()
    assert re.findall(r"\d+ (?:%|GiB)", summary) == ["50 %", "10 GiB", "20 GiB", "10 GiB"]
    assert used == "used    " + " " * 6 + "▄" * 24 + " " * 24 + "▂" * 6
    assert saved.rstrip() == "saved   " + " " * 30 + "▄" * 24
    assert strip == "on GPU  " + " " * 6 + "█" * 24 + "░" * 24 + "█" * 6
    assert "20 GiB" in legend
    parsed = html_of(view)
    assert {"svg", "path", "rect", "title"} <= parsed.tags
    assert any(summary == word for word in parsed.words)


def test_only_the_last_part_of_a_history_is_shown_when_asked() -> None:
    view = HistoryView(History(lease_id="lease-1", cap_mib=20480, points=points()), last_ms=20_000, now_ms=NOW_MS)
    assert re.findall(r"\d+ (?:%|GiB)", view.summary())[:3] == ["50 %", "5 GiB", "20 GiB"]
    longer = HistoryView(History(lease_id="lease-1", cap_mib=20480, points=points()), last_ms=10**9, now_ms=NOW_MS)
    assert longer.summary().count("50 %") == 1


def test_a_history_without_points_says_so() -> None:
    view = HistoryView(History(lease_id="lease-1", cap_mib=20480), now_ms=NOW_MS)
    assert html_of(view).words[-1] == repr(view)


@given(
    st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from(["resident", "suspended"]), st.integers(0, 99)), min_size=1
    ),
    st.integers(0, 5_000),
    st.integers(1, 10_000),
    st.integers(1, 50),
)
def test_columns_keep_every_peak_and_invent_none(
    raw: list[tuple[int, str, int]], since_ms: int, length_ms: int, count: int
) -> None:
    until_ms = since_ms + length_ms
    history = [UsagePoint(at_ms=at, state=state, used_mib=mib, saved_mib=0) for at, state, mib in sorted(raw)]
    row = columns(history, since_ms, until_ms, count)
    assert len(row) == count
    ends = [point.at_ms for point in history[1:]] + [until_ms]
    seen = [point for point, end in zip(history, ends, strict=True) if min(end, until_ms) > max(point.at_ms, since_ms)]
    assert max((column.used_mib for column in row), default=0) == max((point.used_mib for point in seen), default=0)
    assert {column.state for column in row} - {""} <= {point.state for point in seen}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, "#")], "[----------]"),
        ([(1, "#")], "[#---------]"),
        ([(100, "#")], "[##########]"),
        ([(500, "#"), (5, "+")], "[##########]"),
        ([(50, "#"), (-5, "+")], "[#####-----]"),
        ([(50, "#"), (25, "+")], "[#####+++--]"),
    ],
)
def test_a_bar_shows_what_there_is(parts: list[tuple[int, str]], expected: str) -> None:
    assert text_bar(parts, 100, 10) == expected


def test_a_bar_never_overflows() -> None:
    widths = re.findall(r"width:([\d.]+)%", bar([(80, "a"), (80, "b")], 100, "<full>"))
    assert [float(width) for width in widths] == [80.0, 20.0]
    assert "&lt;full&gt;" in bar([], 0, "<full>")
