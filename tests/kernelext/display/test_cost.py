"""What `%gpu cost` shows: the same in HTML and in plain text, amounts exact, nothing unescaped."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fractional_gpu.core.metering.usage import SHARE_HOUR, Usage
from fractional_gpu.protocol.accounts import Cost, UsageEntry
from fractional_gpu_kernel.display.cost import CostView
from tests.kernelext.display.test_views import html_of
from tests.kernelext.statuses import COST, EVIL, UNPRICED


def figures(cost: Cost) -> dict[str, Sequence[str]]:
    return {name: row for name, *row in CostView(cost).rows()}


@pytest.mark.parametrize("cost", [COST, UNPRICED])
def test_the_page_says_what_the_text_says(cost: Cost) -> None:
    view = CostView(cost)
    words = html_of(view).words
    for row in view.rows():
        assert set(row) <= set(words), row
    assert " ".join(view.sentences()) in words
    assert all(sentence in repr(view) for sentence in view.sentences())


def test_without_a_price_hours_take_the_place_of_money() -> None:
    assert not [name for name in figures(UNPRICED) if name in {"cost", "as whole GPUs", "saved by suspending"}]
    assert figures(UNPRICED)["GPU hours suspended"] == ["0.000", "0.094", "5.000"]
    assert figures(UNPRICED)["hours open"] == ["0.000", "0.750", "40.000"]
    assert "simulated" in html_of(CostView(UNPRICED)).words[0]


def test_what_was_used_before_there_was_a_price_has_hours_but_no_amount() -> None:
    mixed = replace(COST, month=[*COST.month[:1], *UNPRICED.month])
    assert figures(mixed)["cost"][2] == "1,234.550 EUR"
    assert figures(mixed)["GPU hours charged"][2] == "1,548.188"
    assert figures(replace(UNPRICED, currency="EUR"))["cost"] == ["0.000 EUR"] * 3


def test_what_is_not_known_is_left_out() -> None:
    assert "energy" not in figures(UNPRICED), "nothing was measured"
    assert "CO2" not in figures(replace(COST, carbon="")), "no carbon is configured"


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_what_is_charged_and_what_was_saved_add_up_to_what_staying_would_have_cost(charge: int, saved: int) -> None:
    usage = Usage(charge_milli=charge, resident_milli=charge + saved, charged_share=charge * SHARE_HOUR // 1000)
    shown = figures(replace(COST, lease=[UsageEntry(of={}, currency="EUR", usage=usage)]))
    charged_milli, saved_milli = (
        int("".join(each for each in shown[name][0] if each.isdigit())) for name in ("cost", "saved by suspending")
    )
    assert charged_milli + saved_milli == usage.resident_milli
    assert int(shown["GPU hours charged"][0].replace(",", "").replace(".", "")) == charge


def test_nothing_of_what_others_wrote_becomes_markup() -> None:
    evil = replace(COST, currency=EVIL, terms=EVIL, carbon=EVIL, note=EVIL)
    evil = replace(evil, month=[replace(COST.month[0], currency=EVIL)])
    assert EVIL in "".join(html_of(CostView(evil)).words)
