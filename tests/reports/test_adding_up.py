"""What is charged is the sum of its parts, and so is every other figure: in tables, JSON, chargeback rows and on the page."""

import csv
import io
import json
import re
from collections import Counter
from decimal import Decimal
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.metering.usage import FIGURES, UsageRow
from fractional_gpu.protocol.accounts import USAGE_BY, UsageReport
from fractional_gpu.reports.as_json import as_json
from fractional_gpu.reports.chargeback import NO_CURRENCY, as_csv
from fractional_gpu.reports.columns import AMOUNT, decimals, tabulated
from fractional_gpu.reports.page import day_bars, page
from fractional_gpu.reports.sums import columns_of, rolled_up, summed
from tests.reports.made import report_of, reports, rows

pytestmark = pytest.mark.promise("reports-add-up")

questions = st.lists(st.sampled_from(USAGE_BY), unique=True, max_size=4)


def charged(report: UsageReport) -> Counter[str]:
    """Thousandths by currency, from the entries as they came."""
    found: Counter[str] = Counter()
    for entry in report.entries:
        found[entry.currency] += entry.usage.charge_milli
    return found


def milli(text: str) -> int:
    whole, _, part = text.replace(",", "").partition(".")
    assert len(part) == 3
    return int(whole) * 1000 + int(part)


@given(st.lists(rows(), max_size=8), questions)
def test_a_sum_of_a_finer_report_is_what_the_coarser_one_says(found: list[UsageRow], by: list[str]) -> None:
    direct = summed([(columns_of(row), row.usage) for row in found], by, carbon_of=lambda mj, _: mj // 7)
    finer = report_of(found).entries
    again = rolled_up(finer, by)
    assert [(one.of, one.currency, one.usage) for one in again] == [(one.of, one.currency, one.usage) for one in direct]
    assert sum(one.carbon_mg for one in again) == sum(one.carbon_mg for one in finer)


@given(st.lists(rows(), max_size=8))
def test_summing_leaves_the_rows_as_they_were(found: list[UsageRow]) -> None:
    before = [[getattr(row.usage, name) for name in FIGURES] for row in found]
    report_of(found)
    assert [[getattr(row.usage, name) for name in FIGURES] for row in found] == before


@given(reports, questions)
def test_json_entries_and_what_no_lease_held_add_up_to_the_totals(report: UsageReport, by: list[str]) -> None:
    found = json.loads(as_json(report, by))
    totals = {one["currency"]: one for one in found["totals"]}
    names = [name for name, value in next(iter(totals.values()), {}).items() if isinstance(value, int)]
    assert len(names) == len(FIGURES) + 1 or not totals
    for currency, total in totals.items():
        parts = [one for one in found["entries"] + found["no_lease"] if one["currency"] == currency]
        assert {name: sum(one[name] for one in parts) for name in names} == {name: total[name] for name in names}
    assert Counter({one: total["charge_milli"] for one, total in totals.items()}) == charged(report)


@given(reports, questions)
def test_chargeback_rows_add_up_to_what_is_charged(report: UsageReport, by: list[str]) -> None:
    found = list(csv.DictReader(io.StringIO(as_csv(report, by, provider="here"))))
    billed: Counter[str] = Counter()
    for row in found:
        assert re.fullmatch(r"\d+\.\d{3}", row["BilledCost"])
        billed[row["BillingCurrency"].replace(NO_CURRENCY, "")] += int(Decimal(row["BilledCost"]) * 1000)
    assert billed == charged(report)
    share = sum(one.usage.charged_share for one in report.entries)
    quantity = sum((Decimal(row["PricingQuantity"]) for row in found), Decimal())
    assert abs(quantity - Decimal(share) / 3_600_000_000) <= Decimal("0.0000005")


@given(reports, questions)
def test_a_table_shows_parts_that_add_up_to_the_total_that_it_shows(report: UsageReport, by: list[str]) -> None:
    table = tabulated(report, by)
    totals = [line for line in table.lines if line.kind == "total"]
    assert len(totals) == len(charged(report))
    for index, column in enumerate(table.columns):
        if column.unit > 0:
            parts = [Decimal(one.cells[index].replace(",", "")) for one in table.lines if one.kind != "total"]
            sums = [Decimal(one.cells[index].replace(",", "")) for one in totals]
            assert sum(parts) == sum(sums)
    if AMOUNT in table.columns:
        index = table.columns.index(AMOUNT)
        shown: Counter[str] = Counter()
        for line in table.lines:
            text, _, currency = line.cells[index].partition(" ")
            if text != "-" and line.kind != "total":
                shown[currency] += milli(text)
        assert +shown == +charged(report)


class _Tables(HTMLParser):
    """The texts of the cells of each table of a page, by row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - the base's
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._open = tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - the base's
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.tables[-1][-1][-1] += data


@given(reports, questions)
def test_each_table_of_the_page_that_shows_amounts_adds_up_to_what_is_charged(
    report: UsageReport, by: list[str]
) -> None:
    reader = _Tables()
    reader.feed(page(report, by, made_by="a test"))
    with_amounts = [rows for rows in reader.tables if rows and "amount" in rows[0]]
    assert bool(with_amounts) is any(charged(report))
    for rows_ in with_amounts:
        at = rows_[0].index("amount")
        parts: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        for row in rows_[1:]:
            text, _, currency = row[at].partition(" ")
            if text != "-":
                (totals if row[0] == "total" else parts)[currency] += milli(text)
        assert +parts == +totals == +charged(report)


@given(reports)
def test_the_bars_of_days_have_all_the_hours(report: UsageReport) -> None:
    bars = day_bars(report, whole=False)
    usages = [one.usage for one in report.entries]
    assert sum(one.busy + one.idle for one in bars) == sum(one.held_share for one in usages)
    assert sum(one.suspended for one in bars) == sum(one.suspended_share for one in usages)


@given(st.lists(st.integers(0, 10**15)), st.integers(1, 10**10), st.integers(0, 6))
def test_rounded_parts_add_up_and_none_is_off_by_more_than_its_last_digit(
    values: list[int], unit: int, places: int
) -> None:
    shown = [Decimal(one.replace(",", "")) for one in decimals(values, unit, places or 1)]
    step = Decimal(1).scaleb(-(places or 1))
    assert all(abs(one - Decimal(value) / unit) <= step for one, value in zip(shown, values, strict=True))
    assert sum(shown, Decimal()) == Decimal(decimals([sum(values)], unit, places or 1)[0].replace(",", ""))
