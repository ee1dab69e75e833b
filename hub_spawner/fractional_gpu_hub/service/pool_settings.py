"""The settings of a pool as the page's editor shows them: the common ones first, each with its help, default and another value.

They are the keys of the pools' configuration, without the devices: these cannot be changed while the broker runs.
"""

import json
from functools import cache
from typing import NamedTuple

from fractional_gpu.config import COMMON_POOL_KEYS, POOL_KEYS


class Setting(NamedTuple):
    """One key. `default` and `example` are as one types them; `boolean`: only true and false are allowed; `choices`: of a list."""

    key: str
    help: str
    default: str
    example: str
    boolean: bool
    choices: tuple[str, ...]


class PoolSettings(NamedTuple):
    """All settings, in the order in which they are shown."""

    common: list[Setting]
    others: list[Setting]


@cache
def pool_settings() -> PoolSettings:
    """Return the settings of this version."""
    shown = {}
    for key, rule in POOL_KEYS.items():
        # A text is typed as it is, anything else in JSON.
        default, example = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for value in (rule.default_value, rule.example)
        )
        choices = tuple(rule.default_value) if isinstance(rule.default_value, list) else ()
        text = rule.help.removeprefix("Hub: ")
        text = text[:1].upper() + text[1:]
        shown[key] = Setting(key, text, default, example, isinstance(rule.default_value, bool), choices)
    others = [one for key, one in shown.items() if key != "devices" and key not in COMMON_POOL_KEYS]
    return PoolSettings([shown[key] for key in COMMON_POOL_KEYS], others)
