"""Adds up lease usage, grouped by the requested columns. The usage comes from the broker's ledger or from a file of rows.

Entries grouped by user always have an `account`, even if it was not requested, because a hub user and a machine user can have the same
name. All figures are integers, so adding up a more detailed report (`rolled_up`) gives exactly the less detailed one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from operator import attrgetter
from typing import Final

from fractional_gpu.core.metering.usage import ACCOUNTS, FIGURES, Usage, UsageRow
from fractional_gpu.protocol.accounts import UsageEntry
from fractional_gpu.reports.periods import bounds

CarbonOf = Callable[[int, int], int]
"""A function that returns the CO2 (in mg) for the energy drawn during an hour (in mJ).

The arguments are the energy and the start of the hour, in seconds since 1970.
"""
ACCOUNT: Final = "account"
TIMES: Final = ("hour", "day", "month")
_SHAPES: Final = {"hour": "%Y-%m-%dT%H:%M%z", "day": "%Y-%m-%d", "month": "%Y-%m"}
_figures_of = attrgetter(*FIGURES)
_LENGTHS: Final = {"day": 10, "month": 7}  # how many characters of a time are the day or the month


def time_text(name: str, hour_s: int, zone: tzinfo | None = None) -> str:
    """Format an hour, or its day or month, as in `2026-11-24T08:00+0100`, `2026-11-24` or `2026-11`.

    If `zone` is None, use the machine's time zone.
    """
    at = datetime.fromtimestamp(hour_s, UTC).astimezone(zone)
    return at.strftime(_SHAPES[name])


def with_account(by: Sequence[str]) -> list[str]:
    return [*by, ACCOUNT] if "user" in by and ACCOUNT not in by else list(by)


def columns_for(by: Sequence[str]) -> list[str]:
    return ["seated" if one == ACCOUNT else one for one in with_account(by) if one not in TIMES]


def summed(
    rows: Iterable[tuple[Mapping[str, str | int], Usage]],
    by: Sequence[str],
    carbon_of: CarbonOf | None = None,
    zone: tzinfo | None = None,
) -> list[UsageEntry]:
    """Return sorted totals, grouped by the columns in `by` and currency. Rows need `columns_for(by)`, `currency` and, for times, `hour`."""
    named = with_account(by)
    text = lru_cache(maxsize=None)(time_text)  # there are many rows, but few hours

    def parts() -> Iterator[tuple[tuple[str, ...], str, Usage, int]]:
        for key, usage in rows:
            hour_s = int(key.get("hour", 0))
            values = tuple(text(one, hour_s, zone) if one in TIMES else _column(key, one) for one in named)
            carbon_mg = carbon_of(usage.energy_mj, hour_s) if carbon_of is not None else 0
            yield values, str(key["currency"]), usage, carbon_mg

    return _added_up(named, parts())


def _column(key: Mapping[str, str | int], name: str) -> str:
    if name == ACCOUNT:
        return ACCOUNTS[int(key["seated"])] if key["user"] else ""
    return str(key[name])


def columns_of(row: UsageRow) -> dict[str, str | int]:
    key, party = row.key, row.party
    return {
        "hour": key.hour_s,
        "lease": key.lease_id,
        "device": key.device_id,
        "currency": key.currency,
        "pool": party.pool,
        "user": party.owner,
        "group": party.group,
        "notebook": party.label,
        "seated": int(party.seated),
    }


def rolled_up(entries: Iterable[UsageEntry], by: Sequence[str]) -> list[UsageEntry]:
    """Add up the entries of a more detailed report, grouped by the columns in `by`. Hours add up to days, and both add up to months.

    Raises KeyError if the report is not detailed enough.
    """
    named = with_account(by)
    return _added_up(
        named,
        (
            (tuple(_value(entry.of, name) for name in named), entry.currency, entry.usage, entry.carbon_mg)
            for entry in entries
        ),
    )


def periods_of(entries: Iterable[UsageEntry], zone: tzinfo | None = None) -> dict[str, tuple[int, int]]:
    """Return the start and end of each day and month that occurs in the entries, in seconds since 1970.

    `zone` is the broker's time zone, or None for the machine's time zone.
    """
    texts = {text for one in entries if (text := next((one.of[name] for name in TIMES if name in one.of), ""))}
    named = {text[:length] for text in texts for length in _LENGTHS.values() if len(text) >= length}
    return {one: bounds(one, zone) for one in sorted(named)}


def of_leases(entries: Iterable[UsageEntry]) -> list[UsageEntry]:
    return [entry for entry in entries if entry.of["user"]]


def of_no_lease(entries: Iterable[UsageEntry]) -> list[UsageEntry]:
    return [entry for entry in entries if not entry.of["user"]]


def _value(of: Mapping[str, str], name: str) -> str:
    if name in of or name not in _LENGTHS:
        return of[name]
    return next(of[finer] for finer in TIMES if finer in of)[: _LENGTHS[name]]


def _added_up(by: Sequence[str], parts: Iterable[tuple[tuple[str, ...], str, Usage, int]]) -> list[UsageEntry]:
    """Add up parts with the same values and currency into sorted entries. A part is (values of `by`, currency, usage, mg of CO2)."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for values, currency, usage, carbon_mg in parts:
        more = (*_figures_of(usage), carbon_mg)
        known = sums.get((*values, currency))
        sums[*values, currency] = (
            list(more) if known is None else [one + other for one, other in zip(known, more, strict=True)]
        )
    return [
        UsageEntry(
            of=dict(zip(by, key[:-1], strict=True)),
            currency=key[-1],
            usage=Usage(**dict(zip(FIGURES, figures, strict=False))),
            carbon_mg=figures[-1],
        )
        for key, figures in sorted(sums.items())
    ]
