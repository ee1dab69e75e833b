"""Parses and formats sizes (`20GiB`), durations (`5m`) and fractions (`1/4`). The rest of the code handles them as integers."""

import re
from fractions import Fraction

_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB|MB|GB|TB|M|G|T)?\s*", re.IGNORECASE | re.ASCII)
_MIB_PER = {"mib": 1, "gib": 1024, "tib": 1024 * 1024, "m": 1, "g": 1024, "t": 1024 * 1024}
_BYTES_PER = {"mb": 10**6, "gb": 10**9, "tb": 10**12}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", re.IGNORECASE | re.ASCII)
_MS_PER = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
# No exponents: 1e99999999 would take forever to compute.
_DECIMAL = re.compile(r"(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})", re.ASCII)
_RATIO = re.compile(r"(\d{1,20})/(\d{1,20})", re.ASCII)
_MILLI = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)m", re.ASCII)
_LONGEST = 64
_COMMON_PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_UNDER = "under"
RESTORE_MARGIN_MIB = 256
"""How much memory, in MiB, a restore needs beyond what it restores. Running out is fatal. An H200 (driver 580) needed 4 MiB."""
_LARGEST = 10**18  # larger integers are no sizes or durations, and Python may refuse to print them


def parse_memory_mib(text: str | int) -> int:
    """Parse a size and return it in MiB, rounded down. A number without a unit is in MiB.

    Raise ValueError if it isn't a valid size. The message says what is allowed.
    """
    expected = "expected a positive size such as 512MiB, 20GiB or 20GB"
    shown = _text(text)
    match = _MEMORY.fullmatch(shown) if shown is not None else None
    if match is None:
        raise ValueError(f"memory {_shown(text)} is not a valid size; {expected}")
    number, unit = Fraction(match[1]), (match[2] or "MiB").lower()
    mib = number * _MIB_PER[unit] if unit in _MIB_PER else number * _BYTES_PER[unit] / 2**20
    if int(mib) < 1:
        raise ValueError(f"memory {_shown(text)} is less than 1 MiB; {expected}")
    return int(mib)


def parse_duration_ms(text: str | int) -> int:
    """Parse a duration and return it in milliseconds. A number without a unit is in seconds.

    Raise ValueError if it isn't a valid duration. The message says what is allowed.
    """
    expected = "expected a duration such as 30s, 5m, 2h or 0"
    shown = _text(text)
    match = _DURATION.fullmatch(shown) if shown is not None else None
    if match is None:
        raise ValueError(f"invalid duration {_shown(text)}; {expected}")
    return int(Fraction(match[1]) * _MS_PER[(match[2] or "s").lower()])


def parse_fraction_milli(value: str | float) -> int:
    """Parse a fraction and return it in milli-GPU, from 1 to 1000. It can be written as 0.25, "1/4", "0.25" or "250m".

    Raise ValueError if it isn't a valid fraction. The message says what is allowed.
    """
    expected = 'expected more than 0 and at most 1, such as 0.25, "1/4" or "250m"'
    text = _text(value, float)
    milli = _milli(text.strip()) if text is not None else None
    shown = _shown(value if text is None else text)
    if milli is None:
        raise ValueError(f"invalid fraction {shown}; {expected}")
    if not 0 < milli <= 1000:
        raise ValueError(f"fraction {shown} is out of range; {expected}")
    return max(1, int(milli))


def _milli(text: str) -> Fraction | None:
    if match := _MILLI.fullmatch(text):
        return Fraction(match[1])
    if match := _RATIO.fullmatch(text):
        numerator, denominator = int(match[1]), int(match[2])
        return Fraction(numerator * 1000, denominator) if denominator else None
    return Fraction(text) * 1000 if _DECIMAL.fullmatch(text) else None


def _text(value: object, *also: type) -> str | None:
    """Return a string or number as a string, or None if the value is too long or of another type."""
    if isinstance(value, bool) or not isinstance(value, (str, int, *also)):
        return None
    if isinstance(value, int) and abs(value) > _LARGEST:
        return None
    text = str(value)
    return text if len(text) <= _LONGEST else None


def _shown(value: object) -> str:
    """Format the value for an error message, shortened to fit on a line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return f"of more than {_LARGEST}"
    return repr(value[:_LONGEST]) if isinstance(value, str) else repr(value)[:_LONGEST]


def format_memory(mib: int) -> str:
    """Format a size, as in `512 MiB` or `1.5 GiB`."""
    if mib < 1024:
        return f"{mib} MiB"
    return f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def format_duration(ms: int) -> str:
    """Format a duration, as in `350 ms`, `4.2 s`, `3 min` or `1 h 20 min`."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    minutes = ms // 60_000
    hours, minutes = divmod(minutes, 60)
    return f"{minutes} min" if not hours else f"{hours} h" + (f" {minutes} min" if minutes else "")


def format_rough(ms: int) -> str:
    """Format a duration in coarse steps, because forecasts are inexact and a countdown shouldn't change often."""
    seconds = max(0, ms) / 1000
    if seconds < 1:
        return f"{_UNDER} 1 s"
    if seconds < 10:
        return f"{seconds:.0f} s"
    if seconds < 57.5:
        return f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{max(1, minutes)} min"
    hours, minutes = divmod(round(seconds / 600) * 10, 60)
    return f"{hours} h" + (f" {minutes} min" if minutes else "")


def format_forecast(expected_ms: int, low_ms: int | None, high_ms: int | None, *, more: bool = False) -> str:
    """Format a forecast with its 80% interval, as in `about 8 s (5 to 9)` or `about 40 s (10 s to 2 min)`.

    Set `more` if something is already in progress, to get `about 8 s more (5 to 9)`. All duration forecasts are shown this way.
    """
    about = format_rough(expected_ms)
    text = (about if about.startswith(_UNDER) else f"about {about}") + (" more" if more else "")
    if low_ms is None or high_ms is None:
        return text
    low, high = format_rough(low_ms), format_rough(high_ms)
    if low == high:
        return text
    units = {one.split(" ", 1)[1] for one in (about, low, high) if not one.startswith(_UNDER)}
    if len(units) == 1 and not about.startswith(_UNDER):  # show the unit once: about 8 s (5 to 9)
        unit = f" {units.pop()}"
        low, high = low.removesuffix(unit), high.removesuffix(unit)
    return f"{text} (up to {high})" if low.startswith(_UNDER) else f"{text} ({low} to {high})"


def format_fraction(milli: int) -> str:
    """Return `1` for a whole GPU, a fraction such as `1/4` or `1/16` if one matches, and a decimal such as `0.23` otherwise."""
    for parts in _COMMON_PARTS:
        count = -(-milli * parts // 1000)
        if count * 1000 // parts == milli:
            return f"{count}/{parts}" if parts > 1 else f"{count}"
    return f"{milli / 1000:g}"


def host_capacity(budget_mib: int, device_mib: int, milli: int) -> str:
    """Describe how many suspended kernels fit in `budget_mib` of host memory if each one used `milli` thousandths of a device."""
    share_mib = max(1, device_mib * milli // 1000)
    number = budget_mib // share_mib
    return f"room for {number} that filled {format_fraction(milli)} of a GPU, {format_memory(share_mib)} each"


def format_gpus(milli: int) -> str:
    """Format a number of GPUs, as in `1/4 GPU` or `1.5 GPUs`. A sum of fractions can exceed one GPU."""
    return f"{format_fraction(milli)} GPU" if milli <= 1000 else f"{milli / 1000:g} GPUs"


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, as in `1 kernel` or `2 kernels`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
