"""How likely the next cell of an expected lease is, and how soon a lease is expected to run."""

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease
from fractional_gpu.core.forecasts.forecasts import Forecasts

LIKELY_MILLI = 250
"""Nothing is done for a cell that is less likely than this, thousandths."""


def likelihood_milli(forecasts: Forecasts, lease: Lease) -> int:
    """Return how likely the expected cell is, thousandths: by the best of its signs, none trusted beyond what it has shown."""
    known = lease.expectation
    if known is None:
        return 0
    return max(min(sure, forecasts.sign_milli(lease.lease_id, sign)) for sign, sure in known.signs.items())


def is_expected(books: Books, lease: Lease) -> bool:
    """Return whether a cell of the lease is likely to come before its expectation lapses."""
    known = lease.expectation
    return (
        known is not None and known.until_ms > books.now_ms and likelihood_milli(books.forecasts, lease) >= LIKELY_MILLI
    )


def next_cell_in_ms(books: Books, lease: Lease) -> int:
    """Return in how many ms the lease is expected to run something: by its gaps, sooner where signs say so."""
    gap_ms = books.forecasts.gap_left_ms(lease.lease_id, books.now_ms)
    known = lease.expectation
    if known is None or known.until_ms <= books.now_ms:
        return gap_ms
    milli, soon_ms = likelihood_milli(books.forecasts, lease), max(1, known.until_ms - books.now_ms)
    if gap_ms <= soon_ms:
        return gap_ms
    # The mean of the two rates, by their weights: cells per time is what a victim's cost is about.
    return 1000 * soon_ms * gap_ms // (milli * gap_ms + (1000 - milli) * soon_ms)
