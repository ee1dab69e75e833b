"""Describes a pool's prices in words, for `%gpu cost` and the hub's spawn page."""

from typing import Final

from fractional_gpu.core.metering.tariffs import Basis, Tariff
from fractional_gpu.core.units import plural

_MOST_BANDS: Final = 4  # bands to list at most; a pool may have many more


def charge_terms(tariff: Tariff) -> str:
    credit = "costs nothing" if tariff.credit_milli == 1000 else f"gets {tariff.credit_milli / 10:g} % of it back"
    basis = {
        Basis.HELD: "the time during which a kernel has memory on a GPU counts, and suspended time costs nothing",
        Basis.BUSY: "the time during which a kernel runs cells on a GPU counts",
        Basis.RESERVED: f"the time during which a kernel exists counts, and suspended time {credit}",
    }[tariff.basis]
    if not tariff.currency:
        return f"No price is set; {basis}."
    prices = [f"{_amount(tariff.price_milli)} {tariff.currency} per hour"]
    prices += [f"{_amount(band.price_milli)} {band.hours}" for band in tariff.bands[:_MOST_BANDS]]
    if (more := len(tariff.bands) - _MOST_BANDS) > 0:
        prices.append(f"other prices apply at {plural(more, 'other time')} of the week")
    return f"A whole GPU costs {', '.join(prices)}; {basis}."


def fraction_price(tariff: Tariff, fraction_milli: int) -> str:
    """Return a fraction's price, such as `0.20 EUR per hour`, or the range of its prices over the week. Return "" if no price is set."""
    if not tariff.currency:
        return ""
    prices = {_of(price, fraction_milli) for price in (tariff.price_milli, *(one.price_milli for one in tariff.bands))}
    low, high = min(prices), max(prices)
    return f"{_cents(low)}{f' to {_cents(high)}' if high != low else ''} {tariff.currency} per hour"


def _of(price_milli: int, fraction_milli: int) -> int:
    return (price_milli * fraction_milli + 5000) // 10_000


def _cents(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"


def _amount(milli: int) -> str:
    whole, rest = divmod(milli, 1000)
    return f"{whole}.{rest:03}" if rest % 10 else f"{whole}.{rest // 10:02}"
