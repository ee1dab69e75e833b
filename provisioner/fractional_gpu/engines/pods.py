"""Defines the fields we read from Kubernetes pods and nodes, and our own resources and annotations (`fractional-gpu.jupyter.org/...`).

The extended resource defines the share: `fractional-gpu.jupyter.org/POOL: "250"` is a quarter of a GPU in that pool. Annotations can't
change that: `.../pool` and `.../fraction` must agree with the resource. `.../owner` and `.../server` are trusted only in a hub's
namespaces. If permitted, the agent writes `.../seat` and `.../usage` on pods and `.../summary` on nodes (`protocol.nodes`).
"""

import re
from collections import Counter
from datetime import datetime
from fractions import Fraction
from typing import Final

from msgspec import Struct, field

DOMAIN: Final = "fractional-gpu.jupyter.org"
POOL: Final = f"{DOMAIN}/pool"
FRACTION: Final = f"{DOMAIN}/fraction"
OWNER: Final = f"{DOMAIN}/owner"
SERVER: Final = f"{DOMAIN}/server"
SEAT: Final = f"{DOMAIN}/seat"
USAGE: Final = f"{DOMAIN}/usage"
SUMMARY: Final = f"{DOMAIN}/summary"

_QUANTITY = re.compile(r"([+-]?\d{1,30}(?:\.\d{0,30})?)(?:([numkMGTPE]|[KMGTPE]i)|([eE][+-]?\d{1,2}))?", re.ASCII)
_SUFFIXES: Final = {
    **{name: Fraction(1, 1000**power) for power, name in enumerate(("", "m", "u", "n"))},
    **{name: Fraction(1000**power) for power, name in enumerate(("", "k", "M", "G", "T", "P", "E")) if name},
    **{name: Fraction(1024**power) for power, name in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")) if name},
}


def resource_of(pool: str) -> str:
    return f"{DOMAIN}/{pool}"


def pool_of(resource: str) -> str | None:
    domain, _, pool = resource.partition("/")
    return pool if domain == DOMAIN and pool else None


def whole_quantity(text: object) -> int:
    """Parse an extended resource's quantity, a whole number that the API server may abbreviate, as in `2k`. Raises ValueError."""
    if type(text) is int:
        return text
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"{str(text)[:40]!r} is not a valid quantity; expected a whole number such as '250' or '1k'")
    digits, suffix, exponent = found.groups("")
    value = Fraction(digits + exponent) * _SUFFIXES[suffix]
    if value.denominator != 1 or value < 0:
        raise ValueError(f"{str(text)[:40]!r} is not a whole number of thousandths")
    return int(value)


class Metadata(Struct, rename="camel", kw_only=True):
    name: str
    uid: str
    namespace: str = ""  # nodes have no namespace
    annotations: dict[str, str] | None = None
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class Resources(Struct):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class Container(Struct, rename="camel"):
    resources: Resources | None = None
    restart_policy: str | None = None


class PodSpec(Struct, rename="camel"):
    node_name: str | None = None
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None


class PodStatus(Struct, rename="camel"):
    phase: str | None = None
    start_time: datetime | None = None


class Pod(Struct):
    """A pod. Fields that we do not use, such as the environment, are dropped."""

    metadata: Metadata
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def annotations(self) -> dict[str, str]:
        return self.metadata.annotations or {}

    @property
    def ended(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")


class Condition(Struct):
    type: str
    status: str


class NodeSpec(Struct):
    unschedulable: bool | None = None


class NodeStatus(Struct):
    conditions: list[Condition] | None = None
    capacity: dict[str, str | int] | None = None


class Node(Struct):
    metadata: Metadata
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: NodeStatus = field(default_factory=NodeStatus)

    @property
    def summary(self) -> str | None:
        return (self.metadata.annotations or {}).get(SUMMARY)

    @property
    def why_not(self) -> str:
        if self.spec.unschedulable:
            return "cordoned"
        ready = next((one.status for one in self.status.conditions or () if one.type == "Ready"), "True")
        return "" if ready == "True" else "not ready"


def shares_of(spec: PodSpec) -> dict[str, int]:
    """Return the milli-GPU that a pod's spec requests from each pool, as the scheduler counts them. Raises ValueError.

    This is the most needed at any one time, either by all containers and sidecars (init containers that keep running) together, or by an
    init container and the sidecars started before it.
    """
    together, before = Counter[str](), Counter[str]()
    for container in spec.init_containers or ():
        if container.restart_policy == "Always":
            together += _asked(container)
        else:  # this container runs at the same time as the sidecars before it
            before |= together + _asked(container)
    for container in spec.containers or ():
        together += _asked(container)
    return dict(sorted((together | before).items()))


def _asked(container: Container) -> Counter[str]:
    resources = container.resources or Resources()
    # Requests default to the limits, and for extended resources both must be equal.
    amounts = {**(resources.limits or {}), **(resources.requests or {})}
    return Counter({pool: whole_quantity(amounts[name]) for name in amounts if (pool := pool_of(name)) is not None})
