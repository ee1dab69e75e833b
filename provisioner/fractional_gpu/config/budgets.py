"""Parses the configured budgets, such as `{"user": "*", "limit": "40 GPU hours", "per": "month"}`, and formats their amounts."""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from fractional_gpu.config import values
from fractional_gpu.config.values import G, PartError, did_you_mean
from fractional_gpu.core.metering.budgets import Budget, Consequence, Unit, WindowKind
from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR
from fractional_gpu.core.units import format_duration

_KEYS = ("user", "group", "limit", "per", "pools")
_MOST = 1000
_LONGEST = 200
_LIMIT = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s+([A-Za-z€$£¥][A-Za-z €$£¥]{0,19})")
_ALLOWED_LIMIT = (
    "an amount and its unit, such as '40 GPU hours', '12.5 kWh' or '100 EUR' (the currency of the pools' prices)"
)
_ALLOWED_PER = (
    "'day', 'week' or 'month' (calendar periods), 'hour' (the last 60 minutes, to limit bursts), or 'rolling 30d'"
)
_GPU_HOURS = frozenset({"gpu hours", "gpu hour", "gpu-hours", "gpuh"})
_EXAMPLE = "{'user': '*', 'limit': '40 GPU hours', 'per': 'month'}"


def parse_budgets(value: object) -> tuple[Budget, ...]:
    """Parse and check the configured budgets. Raises ValueError."""
    if not isinstance(value, list | tuple) or len(value) > _MOST:
        raise ValueError(f"expected a list of at most {_MOST} budgets, such as [{_EXAMPLE}]")
    budgets: list[Budget] = []
    for number, entry in enumerate(value):
        try:
            budget = _budget(entry)
        except ValueError as error:
            raise PartError(f"[{number}]", entry, error) from None
        if budget in budgets:
            raise PartError(f"[{number}]", entry, "this budget is a duplicate; remove one")
        budgets.append(budget)
    return tuple(budgets)


def _budget(entry: object) -> Budget:
    if not isinstance(entry, Mapping):
        raise ValueError(f"a budget must be a dictionary such as {_EXAMPLE}")  # noqa: TRY004 - callers handle one error
    for key in entry:
        if key not in _KEYS:
            raise PartError(f"[{key!r}]", entry[key], f"unknown key; {did_you_mean(str(key), _KEYS)}")
    kinds = [kind for kind in ("user", "group") if kind in entry]
    if len(kinds) != 1:
        raise ValueError(f"a budget needs either 'user' or 'group', a name or '*' for everyone, such as {_EXAMPLE}")

    def parsed(key: str, parse: Callable[[object], G], default: object = None) -> G:
        try:
            return parse(entry.get(key, default))
        except ValueError as error:
            raise PartError(f"[{key!r}]", entry.get(key, default), error) from None

    unit, amount, currency = parsed("limit", parse_amount)
    window, rolling_ms = parsed("per", _window)
    pools = parsed("pools", _pools, [])
    return Budget(
        kind=kinds[0],
        name=parsed(kinds[0], _name),
        unit=unit,
        amount=amount,
        currency=currency,
        window=window,
        rolling_s=rolling_ms // 1000,
        pools=pools,
        text=f"{format_amount(unit, amount, currency)} per {_per(window, rolling_ms)}"
        + (f" in {', '.join(pools)}" if pools else ""),
    )


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or not value.isprintable():
        raise ValueError("expected a name, or '*' for everyone")
    return value


def _pools(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("expected a list of pool names; leave it out to count all pools")
    return tuple(value)


def parse_amount(value: object) -> tuple[Unit, int, str]:
    """Return the unit, the amount (in milli-GPU milliseconds, mJ or thousandths of the currency), and the currency or "".

    Raises ValueError with a message that describes the allowed values.
    """
    match = _LIMIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected {_ALLOWED_LIMIT}")
    amount, unit = Fraction(match[1]), match[2].strip()
    if unit.lower() in _GPU_HOURS:
        return Unit.SHARE, int(amount * SHARE_HOUR), ""
    if unit.lower() == "kwh":
        return Unit.ENERGY, int(amount * MJ_PER_KWH), ""
    return Unit.MONEY, int(amount * 1000), unit


def format_amount(unit: Unit, amount: int, currency: str = "") -> str:
    """Format an amount for display, such as `12.5 GPU hours`, `3.20 kWh` or `7.25 EUR`."""
    match unit:
        case Unit.SHARE:
            hours = amount / SHARE_HOUR
            return f"{hours:.4g} GPU hours" if hours < 1 else f"{hours:,.1f} GPU hours"
        case Unit.ENERGY:
            return f"{amount / MJ_PER_KWH:,.2f} kWh"
        case Unit.MONEY:
            return f"{amount / 1000:,.2f} {currency}"


def _window(value: object) -> tuple[WindowKind, int]:
    if value == "hour":
        return WindowKind.ROLLING, 3_600_000
    if isinstance(value, str) and value in {"day", "week", "month"}:
        return WindowKind(value), 0
    if isinstance(value, str) and value.startswith("rolling "):
        return WindowKind.ROLLING, values.duration(least_ms=3_600_000)(value.removeprefix("rolling ").strip())
    raise ValueError(f"expected {_ALLOWED_PER}")


def _per(window: WindowKind, rolling_ms: int) -> str:
    if window is not WindowKind.ROLLING:
        return window.value
    return "hour" if rolling_ms == 3_600_000 else f"{format_duration(rolling_ms)}, rolling"


def over_budget(value: object) -> tuple[Consequence, ...]:
    """Parse the setting for what to do when a budget is used up. Raises ValueError with a message that lists the allowed values."""
    allowed = (
        "expected 'lower-priority', 'when-free', 'no-new-seats', 'nothing', or one of the first two followed by 'no-new-seats', such as "
        "'when-free, no-new-seats'"
    )
    if value == "nothing":
        return ()
    names = [one.strip() for one in value.split(",")] if isinstance(value, str) else []
    if not names or len(set(names)) < len(names) or not set(names) <= {str(one) for one in Consequence}:
        raise ValueError(allowed)
    found = tuple(Consequence(one) for one in names)
    if {Consequence.LOWER_PRIORITY, Consequence.WHEN_FREE} <= set(found):
        raise ValueError(allowed)
    return found
