"""What a Kubernetes pod says to have a share of a GPU, and what the node's agent writes. Names of the domain `fractional-gpu.jupyter.org`.

A pod asks for a share by an extended resource in requests and limits: `fractional-gpu.jupyter.org/POOL: "250"` is a quarter of a GPU of
that pool, in thousandths. The scheduler counts it, and quotas may limit it. So the resource decides; annotations only explain:

- `.../pool`, `.../fraction`: pool and share, for people. Where they are given, they must agree with the resource.
- `.../owner`, `.../server`: the hub's user and server, believed in the namespaces that the agent is given as a hub's.
- `.../seat`, `.../usage`: written by the agent, if it may: whether the pod has its seat, and what it used.
- `.../summary`, of nodes: what the node has, has given and could still give (`protocol.nodes`).
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

DOMAIN: Final = "fractional-gpu.jupyter.org"
POOL: Final = f"{DOMAIN}/pool"
FRACTION: Final = f"{DOMAIN}/fraction"
OWNER: Final = f"{DOMAIN}/owner"
SERVER: Final = f"{DOMAIN}/server"
SEAT: Final = f"{DOMAIN}/seat"
USAGE: Final = f"{DOMAIN}/usage"
SUMMARY: Final = f"{DOMAIN}/summary"

_QUANTITY = re.compile(r"([+-]?)(\d{1,30})(?:\.(\d{0,30}))?(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?", re.ASCII)
_SUFFIXES: Final = {
    **{name: Fraction(1, 1000**power) for power, name in enumerate(("", "m", "u", "n"))},
    **{name: Fraction(1000**power) for power, name in enumerate(("", "k", "M", "G", "T", "P", "E")) if name},
    **{name: Fraction(1024**power) for power, name in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")) if name},
}


def resource_of(pool: str) -> str:
    """Return the extended resource that counts a pool's thousandths."""
    return f"{DOMAIN}/{pool}"


def pool_of(resource: str) -> str | None:
    """Return the pool whose thousandths the resource counts; None for another resource."""
    domain, _, pool = resource.partition("/")
    return pool if domain == DOMAIN and pool else None


def whole_quantity(text: object) -> int:
    """Return a quantity of an extended resource, which is whole: the API server writes 2000 as `2k`. Raises ValueError."""
    if type(text) is int:
        return text
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"{str(text)[:40]!r} is not a quantity; allowed: a whole number such as '250' or '1k'")
    sign, whole, decimals, suffix, exponent = found.groups()
    decimals = decimals or ""
    value = (
        Fraction(int(whole + decimals), 10 ** len(decimals))
        * _SUFFIXES[suffix or ""]
        * Fraction(10) ** int(exponent or 0)
    )
    if value.denominator != 1 or (sign == "-" and value):
        raise ValueError(f"{str(text)[:40]!r} is not a whole number of thousandths")
    return int(value)


def shares_of(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the thousandths that a pod's spec asks for, by pool, as the scheduler counts them. Raises ValueError.

    The containers run together, with the init containers that stay beside them; the other init containers run before, one at a time.
    """
    together: dict[str, int] = {}
    before: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        asked = dict(_asked(container))
        if container.get("restartPolicy") == "Always":
            _add(together, asked)
        else:  # it runs beside those that were started before it and stay
            for pool, milli in asked.items():
                before[pool] = max(before.get(pool, 0), milli + together.get(pool, 0))
    for container in spec.get("containers") or ():
        _add(together, dict(_asked(container)))
    pools = together.keys() | before.keys()
    return {pool: most for pool in sorted(pools) if (most := max(together.get(pool, 0), before.get(pool, 0))) > 0}


def _asked(container: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    resources = container.get("resources") or {}
    # Requests default to limits, and for extended resources both are equal.
    for name, quantity in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
        pool = pool_of(name)
        if pool is not None:
            yield pool, whole_quantity(quantity)


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for pool, milli in more.items():
        total[pool] = total.get(pool, 0) + milli
