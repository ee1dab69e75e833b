"""How likely the next cell of an expected lease is, and how soon a lease is expected to run."""

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease

LIKELY_MILLI = 250
"""Nothing is done for a cell that is less likely than this, thousandths."""


def likelihood_milli(lease: Lease) -> int:
    """Return how likely the expected cell is, thousandths; 0 without an expectation."""
    return lease.expectation.milli if lease.expectation is not None else 0


def is_expected(books: Books, lease: Lease) -> bool:
    """Return whether a cell of the lease is likely to come before its expectation lapses."""
    known = lease.expectation
    return known is not None and known.until_ms > books.now_ms and likelihood_milli(lease) >= LIKELY_MILLI


def next_cell_in_ms(books: Books, lease: Lease) -> int:
    """Return in how many ms the lease is expected to run something: by its gaps, sooner where signs say so."""
    gap_ms = books.forecasts.gap_left_ms(lease.lease_id, books.now_ms)
    known = lease.expectation
    if known is None or known.until_ms <= books.now_ms:
        return gap_ms
    milli, soon_ms = likelihood_milli(lease), max(1, known.until_ms - books.now_ms)
    if gap_ms <= soon_ms:
        return gap_ms
    # The mean of the two rates, by their weights: cells per time is what a victim's cost is about.
    return 1000 * soon_ms * gap_ms // (milli * gap_ms + (1000 - milli) * soon_ms)
