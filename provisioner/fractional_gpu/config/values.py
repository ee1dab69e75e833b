"""Defines settings, their parsers, and the errors for invalid values.

Parsers convert configured values to plain ones: sizes to MiB, durations to milliseconds, and fractions and shares to thousandths. If a
value is invalid, they raise ValueError (never TypeError) with a message that describes the allowed values.
"""

import pwd
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from fractions import Fraction
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from traitlets import TraitType

from fractional_gpu.core.model import Limits
from fractional_gpu.core.units import format_duration, parse_duration_ms, parse_fraction_milli, parse_memory_mib

# ruff: noqa: TRY004 -- a value of the wrong type is one more wrong value: callers handle one error


_LONGEST_MS = 366 * 86_400_000
_LONGEST_TEXT = 64
_LONGEST_SHOWN = 120
_ZERO = re.compile(r"\s*0+(\.0*)?\s*([KMGT]i?B?)?\s*", re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d)?)\s*%", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_MOST_FILE_MIB = 1 << 20
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_MOST_DEVICES = 1024
_MOST_GROUPS = 1000
_MOST_LEASES = 1_000_000
_LONGEST_GROUP = 200
_LIMITS = {
    "leases": "leases",
    "fraction": "milli",
    "resident": "resident_milli",
}  # names in the configuration and in core


G = TypeVar("G")
E = TypeVar("E", bound=StrEnum)


class ConfigError(Exception):
    """The configuration cannot be used. The message names the file, the key and the value, and describes the allowed values."""


class PartError(ValueError):
    """One part of a value is invalid. `inside` says which part, such as `['limit']`."""

    def __init__(self, inside: str, value: object, problem: object) -> None:
        super().__init__(str(problem))
        self.inside, self.value = inside, value
        if isinstance(problem, PartError):
            self.inside, self.value = inside + problem.inside, problem.value


def config_error(where: str, value: object, problem: str | ValueError) -> ConfigError:
    """Return the error to raise for a setting or a part of it. `where` names the setting and the file."""
    if isinstance(problem, PartError):
        where, value = where + problem.inside, problem.value
    shown = repr(value)
    if len(shown) > _LONGEST_SHOWN:
        shown = shown[:_LONGEST_SHOWN] + "..."
    return ConfigError(f"{where} = {shown}: {problem}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a sentence that lists the allowed names, with the most similar name first."""
    names = sorted(known)
    similar = get_close_matches(given, names, n=1)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    return f"{hint}Allowed: {', '.join(names)}"


class Setting(TraitType[G, Any]):
    """A setting with its parser and help, and a default and an example, both written as in a configuration file.

    `to` names the fields of `PoolSpec` that the setting fills.
    """

    def __init__(
        self,
        parse: Callable[[object], G],
        default: object,
        example: object,
        *,
        help: str,  # noqa: A002 - as traitlets calls it
        to: str = "",
    ) -> None:
        super().__init__(default, help=help)
        self.parse, self.example, self.to = parse, example, to.split()

    def validate(self, obj: object, value: object) -> G:  # noqa: ARG002 - traitlets' own
        """Parse the configured value. Raises ValueError."""
        return self.parse(value)


def settings_of(kind: type) -> dict[str, "Setting[Any]"]:
    """Return a class's settings by name, in the order in which they are declared."""
    return {name: one for name, one in vars(kind).items() if isinstance(one, Setting)}


def duration(*, least_ms: int = 0) -> Callable[[object], int]:
    """Return a parser that converts a duration such as `30s` to milliseconds."""

    def parse(value: object) -> int:
        if not isinstance(value, (str, int)):
            raise ValueError("expected a duration such as '30s', '5m' or '2h'")
        ms = parse_duration_ms(value)
        if not least_ms <= ms <= _LONGEST_MS:
            raise ValueError(f"expected a duration from {format_duration(least_ms)} to 366 days")
        return ms

    return parse


def or_word(word: str, parse: Callable[[object], G]) -> Callable[[object], G | None]:
    """Return a parser that also accepts the given word and returns None for it."""

    def parse_or_word(value: object) -> G | None:
        if isinstance(value, str) and value == word:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{error} or {word!r}") from None

    return parse_or_word


def idle_after(value: object) -> tuple[int | None, bool]:
    """Return how long a kernel may be idle before it is suspended, in ms, and whether the arbiter chooses this time instead.

    If the time is None and the arbiter doesn't choose one, kernels are suspended only to make room for others.
    """
    found = or_word("auto", or_word("on-demand", duration()))(value)
    return found, value == "auto"


def memory(value: object) -> int:
    """Convert a size such as `20GiB` to MiB. Zero is allowed."""
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError("expected a size such as '300MiB', '20GiB' or 0")
    if _ZERO.fullmatch(str(value)[:_LONGEST_TEXT]):
        return 0
    return parse_memory_mib(value)


def host_memory(value: object) -> tuple[int, bool]:
    """Convert a percentage to (thousandths of the host's memory, True), or a size to (MiB, False)."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return share(value), True
    try:
        return memory(value), False
    except ValueError:
        raise ValueError("expected a percentage such as '50%' or a size such as '64GiB'") from None


def fraction(value: object) -> int:
    """Convert a fraction such as `1/4` to milli-GPU."""
    if not isinstance(value, (str, int, float)):
        raise ValueError("expected a fraction such as '1/4', 0.25 or '250m'")
    return parse_fraction_milli(value)


def fractions(value: object) -> tuple[int, ...]:
    """Return the fractions on offer, smallest first, or an empty tuple for 'any'."""
    if value == "any":
        return ()
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("expected a list such as ['1/4', '1/2', '1'], or 'any'")
    return tuple(sorted({fraction(one) for one in value}))


def share(value: object) -> int:
    """Convert a percentage such as `10%` to thousandths."""
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    milli = int(Fraction(match[1]) * 10) if match is not None else 0
    if not 1 <= milli <= 1000:
        raise ValueError("expected a share from '0.1%' to '100%'")
    return milli


def number(least: int, most: int) -> Callable[[object], int]:
    """Return a parser that converts a number in this range to thousandths."""

    def parse(value: object) -> int:
        milli = _thousandths(value)
        if milli is None or not least * 1000 <= milli <= most * 1000:
            raise ValueError(f"expected a number from {least} to {most}")
        return milli

    return parse


hourly_price = number(0, 1_000_000)


def _thousandths(value: object) -> int | None:
    """Convert a non-negative number to thousandths. Return None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not _NUMBER.fullmatch(str(value)):
        return None
    return int(Fraction(str(value)) * 1000)


def limits(value: object) -> Limits:
    """Parse the limits of a user or a group."""
    allowed = "expected a dictionary such as {'leases': 4, 'fraction': 2, 'resident': 1}, with any of these keys"
    if not isinstance(value, Mapping):
        raise ValueError(allowed)
    for name in value:
        if name not in _LIMITS:
            raise ValueError(f"there is no limit named {str(name)[:_LONGEST_TEXT]!r}; {allowed}")
    return Limits(**{_LIMITS[name]: _limit(name, raw) for name, raw in value.items()})


def _limit(name: str, raw: object) -> int:
    if name == "leases":
        if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw <= _MOST_LEASES:
            raise ValueError(
                f"{name!r} is {str(raw)[:_LONGEST_TEXT]}; expected a whole number from 0 to {_MOST_LEASES}"
            )
        return raw
    milli = _thousandths(raw)
    if milli is None and isinstance(raw, str):
        milli = fraction(raw)
    if milli is None:
        raise ValueError(f"{name!r} is {str(raw)[:_LONGEST_TEXT]}; expected a number of GPUs such as 2, 1.5 or '1/2'")
    return milli


def group_limits(value: object) -> tuple[tuple[str, Limits], ...]:
    """Parse each group's limits, sorted by group name."""
    allowed = "expected a dictionary such as {'students': {'leases': 60, 'resident': 2}}"
    if not isinstance(value, Mapping) or len(value) > _MOST_GROUPS:
        raise ValueError(f"{allowed}, with at most {_MOST_GROUPS} groups")
    found: list[tuple[str, Limits]] = []
    for group, raw in value.items():
        if not isinstance(group, str) or not 0 < len(group) <= _LONGEST_GROUP:
            raise ValueError(f"a group's name must have 1 to {_LONGEST_GROUP} characters; {allowed}")
        try:
            found.append((group, limits(raw)))
        except ValueError as error:
            raise ValueError(f"group {group!r}: {error}") from None
    return tuple(sorted(found, key=lambda one: one[0]))


def one_of(*words: str) -> Callable[[object], str]:
    """Return a parser that accepts only these words."""
    return choice({word: word for word in words})


def optional(parse: Callable[[object], G]) -> Callable[[object], G | None]:
    """Return a parser that also accepts None."""
    return lambda value: None if value is None else parse(value)


def choice(words: Mapping[str, G] | type[E]) -> Callable[[object], G | E]:
    """Return a parser that maps words to values or to the members of an enumeration."""
    known: Mapping[str, Any] = words if isinstance(words, Mapping) else {one.value: one for one in words}
    *others, last = (repr(word) for word in known)
    allowed = f"expected {', '.join(others)} or {last}"

    def parse(value: object) -> Any:  # noqa: ANN401 - what the word stands for
        if not isinstance(value, str) or value not in known:
            raise ValueError(allowed)
        return known[value]

    return parse


def boolean(value: object) -> bool:
    """Return the value, which must be True or False. 0, 1 and strings are rejected."""
    if not isinstance(value, bool):
        raise ValueError("expected True or False")
    return value


def whole_number(least: int, most: int) -> Callable[[object], int]:
    """Return a parser of whole numbers in this range."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return value

    return parse


def device_references(value: object) -> tuple[str, ...] | None:
    """Return the configured references to devices, or None for 'all'.

    A reference is a device number as text, a UUID, the beginning of a UUID, or a model.
    """
    if value == "all":
        return None
    allowed = "expected 'all', or a list of device numbers and UUIDs such as [0, 'GPU-8f6a1c55']"
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= _MOST_DEVICES:
        raise ValueError(allowed)
    for one in value:
        if isinstance(one, bool) or not isinstance(one, (str, int)) or str(one).startswith("-") or not str(one).strip():
            raise ValueError(f"{one!r} is not a device; {allowed}")
    return tuple(str(one).strip() for one in value)


def log_level(value: object) -> str:
    """Return the log level in upper case."""
    return one_of(*_LOG_LEVELS)(value.upper() if isinstance(value, str) else value)


def text(value: object) -> str:
    """Return the value, which must be a string. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError("expected a string")
    return value


def path(*examples: str) -> Callable[[object], Path | None]:
    """Return a parser of absolute paths that expands `~` and returns None for an empty value."""
    allowed = f"expected an absolute path such as {' or '.join(repr(one) for one in examples)}"

    def parse(value: object) -> Path | None:
        if value is None or value == "":
            return None
        if not isinstance(value, (str, Path)) or "\0" in str(value):
            raise ValueError(allowed)
        try:
            found = Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{error}; {allowed}") from None
        if not found.is_absolute():
            raise ValueError(allowed)
        return found

    return parse


def library(value: object) -> str:
    """Return the path of a library to preload. The broker checks at startup that the file exists."""
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or not Path(value).is_absolute() or set(value) & set(" :\n\0"):
        raise ValueError(
            "expected the absolute path of a library, such as '/usr/local/vgpu/libvgpu.so', without spaces or colons"
        )
    return value


def account(value: object) -> int | None:
    """Return the uid of the named user on this host, or None if the name is empty."""
    try:
        return pwd.getpwnam(str(value)).pw_uid if value else None
    except (KeyError, ValueError):
        raise ValueError("this host has no such user; create it, or leave the setting empty") from None


def notice_source(value: object) -> Path | str | None:
    """Return the path of a file, or a URL. Return None if the value is empty.

    A URL's host must be the loopback address or the link-local address of cloud metadata services.
    """
    if not isinstance(value, str) or "://" not in value:
        return path("/run/revoked")(value)
    allowed = (
        "expected an absolute path, or an http URL on 169.254.169.254 or a loopback address, such as "
        "'http://169.254.169.254/latest/meta-data/spot/instance-action'"
    )
    url = urlsplit(value)
    try:
        host, _ = ip_address(url.hostname or ""), url.port
    except ValueError:
        raise ValueError(allowed) from None
    known = host.is_loopback or str(host) == "169.254.169.254"
    plain = value.isascii() and value.isprintable() and " " not in value
    if url.scheme != "http" or not known or url.username is not None or not plain:
        raise ValueError(allowed)
    return value


def file_size(value: object) -> int:
    """Convert a file size to MiB. It must be at least 1 MiB."""
    mib = memory(value)
    if not 1 <= mib <= _MOST_FILE_MIB:
        raise ValueError("expected a size from 1MiB to 1TiB")
    return mib


def metrics_address(value: object) -> tuple[str, int] | None:
    """Return an IP address and a port, or None if the value is empty. Reject host names, because their addresses may change."""
    if value == "":
        return None
    allowed = "expected an IP address and a port such as '127.0.0.1:9464' or '[::1]:9464', or '' for none"
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not _PORT.fullmatch(port) or not 0 < int(port) < 65_536 or (":" in bare) != (bare != host):
        raise ValueError(allowed)
    try:
        return str(ip_address(bare)), int(port)
    except ValueError:
        raise ValueError(allowed) from None
