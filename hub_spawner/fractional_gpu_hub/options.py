"""Handles the GPU choice for a new server: the form on the spawn page, and the options sent by the form or the REST API.

`user_options` may contain `pool`, `fraction` (such as 1/4, 0.25 or 250m, or `none` for a server without a GPU) and `memory` (such as
20GiB). Missing options get defaults, and unknown options are left to other code. Users can send anything, so all values are checked here.
The form is plain HTML without scripts. It sends one field, `gpu`, which contains `POOL/THOUSANDTHS` or `none`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fractional_gpu.core.units import format_fraction, format_memory, parse_fraction_milli, parse_memory_mib, plural
from fractional_gpu.jupyter.kernel_command import check_pool_name, shown
from fractional_gpu.pages import templates
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.seats import FractionOffer, Offers, PoolOffer

FIELD = "gpu"
KEYS = ("pool", "fraction", "memory")
WITHOUT = "none"


class ClusterPoolOffer(PoolOffer, frozen=True, kw_only=True):
    """A pool on a cluster's nodes. The form shows `facts`, which has no full stop at the end, instead of the figures for one machine."""

    facts: str


class OptionsError(ValueError):
    """Raised if the options are invalid. The message says what was given, what is allowed and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A user's options, validated. None stands for the default."""

    without: bool = False
    pool: str | None = None
    fraction_milli: int | None = None
    memory_mib: int | None = None


def parse_options(options: object) -> Choice:
    if not isinstance(options, Mapping):
        raise OptionsError(f"the options are {shown(options)}; expected an object with {', '.join(KEYS)}")
    pool, fraction, memory = (options.get(key) for key in KEYS)
    without = fraction == WITHOUT
    if without and (pool is not None or memory is not None):
        raise OptionsError(
            "fraction is 'none' (a server without a GPU), but a pool or memory was also chosen; leave those out"
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
    """Return the user options from the form's field, or from `opt-gpu` in a link. Raises OptionsError."""
    chosen = form.get(FIELD)
    if not chosen:
        return {key: values[0] for key in KEYS if (values := form.get(key))}
    if len(chosen) != 1:
        raise OptionsError(f"{len(chosen)} fractions were chosen; choose only one")
    if chosen[0] == WITHOUT:
        return {"fraction": WITHOUT}
    pool, slash, milli = chosen[0].rpartition("/")
    if not slash or not milli.isascii() or not milli.isdecimal():
        raise OptionsError(f"{shown(chosen[0])} is not one of the choices; reload the page and choose again")
    return {"pool": pool, "fraction": f"{milli[:20]}m"}


def _scalar(value: object) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise OptionsError(
            f"{shown(value)} is neither a fraction nor a size; expected a string such as '1/4' or '20GiB'"
        )
    return value if isinstance(value, int) else str(value)


def gpu_form(
    offers: Offers | None, *, chosen: tuple[str, int] | None, without: bool, allow_without: bool, problem: str = ""
) -> str:
    """Return the form. The last choice is preselected: the pool and fraction in `chosen`, or no GPU if `without` is set."""
    checked = _checked(offers, chosen, without=without and allow_without)
    first = checked.rpartition("/")[0]
    pools = sorted(offers.pools, key=lambda pool: pool.pool != first) if offers is not None else []
    return (
        templates("fractional_gpu_hub")
        .get_template("options.html")
        .render(
            offers=offers,
            pools=[(pool, _facts(pool), [(one, _label(one)) for one in pool.fractions]) for pool in pools],
            problem=problem,
            checked=checked,
            field=FIELD,
            without=WITHOUT,
            allow_without=allow_without,
        )
    )


def _checked(offers: Offers | None, chosen: tuple[str, int] | None, *, without: bool) -> str:
    if offers is None or without:
        return WITHOUT
    there = {(pool.pool, one.fraction_milli) for pool in offers.pools if not pool.why_not for one in pool.fractions}
    default = (offers.default_pool, offers.default_fraction_milli)
    for pool, milli in (chosen, default) if chosen is not None else (default,):
        if (pool, milli) in there:
            return f"{pool}/{milli}"
    return WITHOUT


def _facts(pool: PoolOffer) -> str:
    if isinstance(pool, ClusterPoolOffer):
        return pool.facts
    free = f"{plural(pool.devices, 'GPU')}, {format_memory(pool.free_mib)} of {format_memory(pool.capacity_mib)} currently free"
    facts = [
        *([free] if pool.devices else []),
        {0: "no servers have a place", 1: "1 server has a place"}.get(pool.seats, f"{pool.seats} servers have a place"),
    ]
    if pool.waiting:
        facts.append(f"{plural(pool.waiting, 'server')} waiting for a place")
    if pool.hours:
        facts.append(f"open {pool.hours}")
    return "; ".join(facts)


def _label(one: FractionOffer) -> str:
    price = f", {one.price}" if one.price else ""
    return f"{format_fraction(one.fraction_milli)} GPU, {format_memory(one.memory_mib)}{price}"
