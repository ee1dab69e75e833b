"""What the spawn page's form says about a pool's prices, terms and budgets: short, once per pool, escaped."""

from html import unescape

from msgspec.structs import replace

from fractional_gpu.protocol.seats import FractionOffer, Offers, PoolOffer
from fractional_gpu_hub.options import gpu_form

POOL = PoolOffer(
    pool="default",
    why_not="",
    hours="",
    devices=1,
    free_mib=1024,
    capacity_mib=1024,
    seats=0,
    waiting=0,
    fractions=[
        FractionOffer(
            fraction_milli=milli, memory_mib=milli, price="0.20 to 0.30 EUR per hour", free=True, sentence="free now"
        )
        for milli in (250, 500)
    ],
    terms="A whole GPU costs 0.80 EUR per hour, 1.20 Mon-Fri 08:00-18:00; suspended time costs nothing.",
    budget="6 GPU hours of 40 GPU hours per month left",
    advice="1/4 GPU (20 GiB) would have been enough on 12 of 12 days",
)


def form(*pools: PoolOffer) -> str:
    return unescape(gpu_form(Offers(pools=list(pools)), chosen=None, without=False, allow_without=True))


def test_a_pool_says_once_what_it_charges_and_what_is_left_of_the_budget() -> None:
    html = form(POOL)
    assert html.count(f"<p>{POOL.terms}</p>") == 1
    assert html.count("<p>Budget: 6 GPU hours of 40 GPU hours per month left.</p>") == 1
    assert html.count("0.20 to 0.30 EUR per hour") == 2, "each fraction has its own price"


def test_a_pool_without_price_and_budget_says_nothing_of_them() -> None:
    html = form(replace(POOL, terms="", budget="", advice=""))
    assert "Budget" not in html
    assert "your servers have used" not in html
    assert "costs" not in html


def test_a_pool_says_in_one_line_which_share_would_have_been_enough() -> None:
    line = "<p>Based on your servers' usage: 1/4 GPU (20 GiB) would have been enough on 12 of 12 days.</p>"
    assert form(POOL).count(line) == 1
    assert "<script>" not in gpu_form(
        Offers(pools=[replace(POOL, advice="<script>")]), chosen=None, without=False, allow_without=False
    )


def test_the_pool_of_the_preselected_fraction_comes_first() -> None:
    pools = [replace(POOL, pool="batch"), POOL, replace(POOL, pool="teaching")]
    for offers, chosen, first in (
        (Offers(pools=pools, default_pool="default", default_fraction_milli=250), None, "default"),
        (Offers(pools=pools, default_pool="default", default_fraction_milli=250), ("teaching", 500), "teaching"),
        (Offers(pools=pools), None, "batch"),
    ):
        html = gpu_form(offers, chosen=chosen, without=False, allow_without=True)
        assert html.index(f"Pool {first}<") == min(html.index(f"Pool {pool.pool}<") for pool in pools)


def test_a_pool_without_a_gpu_has_no_figures() -> None:
    html = form(replace(POOL, devices=0, free_mib=0, capacity_mib=0, why_not="its GPU is being emptied", fractions=[]))
    assert "0 MiB" not in html
    assert "<strong>Not available:</strong> its GPU is being emptied." in html


def test_nothing_of_it_becomes_markup() -> None:
    offers = Offers(pools=[replace(POOL, terms="<b>", budget="<i>")])
    html = gpu_form(offers, chosen=None, without=False, allow_without=False)
    assert "&lt;b&gt;" in html
    assert "&lt;i&gt;" in html
    assert "<b>" not in html
