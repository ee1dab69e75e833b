"""The settings of a pool as the page's editor shows them: the common ones first, each with its help, default and another value.

They are the keys of the pools' configuration, without the devices: these cannot be changed while the broker runs.
"""

import json
from dataclasses import dataclass
from functools import cache

from fractional_gpu.config import COMMON_POOL_KEYS, POOL_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key. `default` and `example` are as one types them; `boolean`: only true and false are allowed; `choices`: of a list."""

    key: str
    help: str
    default: str
    example: str
    boolean: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """All settings, in the order in which they are shown."""

    common: tuple[Setting, ...]
    others: tuple[Setting, ...]


@cache
def pool_settings() -> PoolSettings:
    others = [key for key in POOL_KEYS if key != "devices" and key not in COMMON_POOL_KEYS]
    return PoolSettings(
        common=tuple(_setting(key) for key in COMMON_POOL_KEYS), others=tuple(_setting(key) for key in others)
    )


def _setting(key: str) -> Setting:
    rule = POOL_KEYS[key]
    text = rule.help.removeprefix("Hub: ")
    return Setting(
        key=key,
        help=text[:1].upper() + text[1:],
        default=_typed(rule.default_value),
        example=_typed(rule.example),
        boolean=isinstance(rule.default_value, bool),
        choices=tuple(rule.default_value) if isinstance(rule.default_value, list) else (),
    )


def _typed(value: object) -> str:
    """Return what one types: a text as it is, anything else in JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
