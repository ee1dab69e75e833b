"""What a user chooses when a server is started: read from the page's form or from the REST API, and never trusted.

`user_options` may hold `pool`, `fraction` (1/4, 0.25 or 250m; `none`: a server without a GPU) and `memory` (20GiB); nothing of it: the
default. The form sends one field, `gpu`, with `POOL/THOUSANDTHS` or `none`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fractional_gpu.core.units import parse_fraction_milli, parse_memory_mib
from fractional_gpu.jupyter.kernel_config import check_pool_name
from fractional_gpu.protocol.errors import FractionalGPUError

__all__ = ["FIELD", "KEYS", "WITHOUT", "Choice", "OptionsError", "options_of_form", "parse_options"]

FIELD = "gpu"
KEYS = ("pool", "fraction", "memory")
WITHOUT = "none"
_SHOWN = 80


class OptionsError(ValueError):
    """What was sent is not a choice; says what was given, what is allowed and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A checked wish. None: the default; `without`: no GPU."""

    without: bool = False
    pool: str | None = None
    fraction_milli: int | None = None
    memory_mib: int | None = None


def parse_options(options: object, *, others: Collection[str] | None = ()) -> Choice:
    """Return what was chosen. `others` are keys that belong to somebody else; None: any may be there. Raises OptionsError."""
    if not isinstance(options, Mapping):
        raise OptionsError(f"the options are {_shown(options)}; allowed: an object with {', '.join(KEYS)}")
    for key in options:
        if key not in KEYS and others is not None and key not in others:
            raise OptionsError(f"unknown option {_shown(key)}; allowed: {', '.join(KEYS)}")
    pool, fraction, memory = (options.get(key) for key in KEYS)
    without = fraction == WITHOUT
    if without and (pool is not None or memory is not None):
        raise OptionsError(
            "fraction is 'none', a server without a GPU, but a pool or memory was chosen, too; leave these out"
        )
    try:
        return Choice(
            without=without,
            pool=check_pool_name(pool) if pool is not None else None,
            fraction_milli=None if without or fraction is None else parse_fraction_milli(_scalar(fraction)),
            memory_mib=parse_memory_mib(_scalar(memory)) if memory is not None else None,
        )
    except (ValueError, FractionalGPUError) as error:
        raise OptionsError(str(error)) from None


def options_of_form(form: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the user options that the form's field (or a link's `opt-gpu`) stands for. Raises OptionsError."""
    chosen = form.get(FIELD)
    if not chosen:
        return {key: values[0] for key in KEYS if (values := form.get(key))}
    if len(chosen) != 1:
        raise OptionsError(f"{len(chosen)} fractions were chosen; choose one")
    if chosen[0] == WITHOUT:
        return {"fraction": WITHOUT}
    pool, slash, milli = chosen[0].rpartition("/")
    if not slash or not milli.isascii() or not milli.isdecimal():
        raise OptionsError(f"{_shown(chosen[0])} is none of the choices; reload the page and choose again")
    return {"pool": pool, "fraction": f"{milli[:20]}m"}


def _scalar(value: object) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise OptionsError(
            f"{_shown(value)} is neither a fraction nor a size; allowed: a text such as '1/4' or '20GiB'"
        )
    return value if isinstance(value, int) else str(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
