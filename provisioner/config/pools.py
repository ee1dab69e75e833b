"""A pool's policy: the keys that one may have, and which devices it gets.

- `KEYS` is the truth: what a key is called, how it is read, what it means, its default and an example. The help, the
  example configuration and the refusals are made from it.
- A device is in one pool. At most one pool says 'all': it gets what the others left. A pool without devices is an error,
  except on a host that has none at all.
- Devices are named by number (as listed by the broker), UUID, or the beginning of a UUID that fits one device only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from provisioner.config import values
from provisioner.config.errors import ConfigError, did_you_mean, refuse
from provisioner.core.model import DeviceSpec, PoolSpec

__all__ = ["KEYS", "Key", "PoolSettings", "assign", "find_device", "parse_pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a pool. `field` is PoolSpec's."""

    field: str
    parse: Callable[[object], Any]
    default: object
    example: object
    help: str


KEYS: Mapping[str, Key] = {
    "devices": Key(
        field="devices",
        parse=values.device_references,
        default="all",
        example=[0, 1],
        help="The devices of the pool, by number or UUID; 'all': those that no other pool has.",
    ),
    "fractions": Key(
        field="fractions_milli",
        parse=values.fractions,
        default=["1/8", "1/4", "1/2", "3/4", "1"],
        example=["1/4", "1/2", "1"],
        help="The fractions on offer; 'any': whatever is asked for.",
    ),
    "oversubscription": Key(
        field="oversubscription_milli",
        parse=values.oversubscription,
        default="unlimited",
        example=4,
        help="How many times the pool's capacity may be promised in all; 'unlimited' leaves it to host memory.",
    ),
    "idle_after": Key(
        field="idle_after_ms",
        parse=values.duration(word="on-demand"),
        default="5m",
        example="on-demand",
        help="Suspend a kernel that was idle for so long; 0: at once; 'on-demand': only when another one needs the room.",
    ),
    "min_residency": Key(
        field="min_residency_ms",
        parse=values.duration(),
        default="10s",
        example="30s",
        help="A kernel stays on its device for at least so long before another one may take its place.",
    ),
    "unattached_ttl": Key(
        field="unattached_ttl_ms",
        parse=values.duration(least_ms=1000),
        default="2m",
        example="5m",
        help="A lease without a running kernel ends after so long.",
    ),
    "retry_refused": Key(
        field="retry_refused_ms",
        parse=values.duration(),
        default="30s",
        example="1m",
        help="A kernel that could not be suspended is left alone for so long.",
    ),
    "max_passed_over": Key(
        field="max_passed_over",
        parse=values.whole_number(0, 1000),
        default=8,
        example=4,
        help="How often smaller kernels may pass one that waits before room is kept for it.",
    ),
    "may_move": Key(
        field="may_move",
        parse=values.boolean,
        default=False,
        example=True,
        help="Resume kernels on any device of the same kind; needs a driver that can move them (580 or newer).",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """A pool as configured. `devices` are references (None: all that are left); `policy` has PoolSpec's other fields."""

    name: str
    where: str  # its key in the configuration, for errors that only the devices can show
    devices: tuple[str, ...] | None
    fractions_milli: tuple[int, ...]
    policy: Mapping[str, Any]

    def spec(self, devices: tuple[str, ...]) -> PoolSpec:
        """Return the pool as the arbiter knows it, with the devices it got."""
        return PoolSpec(name=self.name, devices=devices, fractions_milli=self.fractions_milli, **self.policy)


def parse_pool(where: str, name: str, raw: object) -> PoolSettings:
    """Return the checked pool. Raises ConfigError that names the key."""
    where = f"{where}[{name!r}]"
    if not isinstance(raw, Mapping):
        raise refuse(
            where, raw, "a pool is a dictionary such as {'fractions': ['1/4', '1/2', '1'], 'idle_after': '5m'}"
        )
    for key in raw:
        if key not in KEYS:
            raise refuse(f"{where}[{key!r}]", raw[key], f"unknown key; {did_you_mean(str(key), KEYS)}")
    parsed: dict[str, Any] = {}
    for key, rule in KEYS.items():
        value = raw.get(key, rule.default)
        try:
            parsed[rule.field] = rule.parse(value)
        except ValueError as error:
            raise refuse(f"{where}[{key!r}]", value, str(error)) from None
    return PoolSettings(
        name=name,
        where=where,
        devices=parsed.pop("devices"),
        fractions_milli=parsed.pop("fractions_milli"),
        policy=parsed,
    )


def find_device(where: str, reference: str, devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """Return the device that is meant. Raises ConfigError if there is none or more than one."""
    if reference.isdecimal():
        fitting = [devices[int(reference)]] if int(reference) < len(devices) else []
    else:
        exact = [device for device in devices if device.device_id == reference]
        fitting = exact or [device for device in devices if device.device_id.startswith(reference)]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(f"{number} {device.device_id}" for number, device in enumerate(devices)) or "none at all"
    problem = "fits more than one device" if fitting else "there is no such device"
    raise refuse(where, reference, f"{problem}; this host has: {there}")


def assign(
    pools: Sequence[PoolSettings], devices: Sequence[DeviceSpec], managed: Sequence[DeviceSpec]
) -> tuple[PoolSpec, ...]:
    """Give the pools their devices, in the order of the devices. `managed` are those of `devices` that may be used.

    Raises ConfigError for a device that is unknown, not managed or in two pools, and for a pool that gets none.
    """
    usable = {device.device_id for device in managed}
    owner: dict[str, str] = {}
    for pool in pools:
        where = f"{pool.where}['devices']"
        for reference in pool.devices or ():
            device_id = find_device(where, reference, devices).device_id
            if device_id not in usable:
                raise refuse(where, reference, f"{device_id} is not among the devices that c.GPUBroker.devices allows")
            if device_id in owner:
                raise refuse(
                    where, reference, f"{device_id} is in pool {owner[device_id]!r} already; a device is in one pool"
                )
            owner[device_id] = pool.name
    return tuple(_with_devices(pool, managed, owner) for pool in pools)


def _with_devices(pool: PoolSettings, managed: Sequence[DeviceSpec], owner: Mapping[str, str]) -> PoolSpec:
    wanted = pool.name if pool.devices is not None else None
    mine = tuple(device.device_id for device in managed if owner.get(device.device_id) == wanted)
    if managed and not mine:
        raise ConfigError(
            f"{pool.where}: the pool has no devices: other pools have all {len(managed)}; give it some with 'devices', or "
            "remove it"
        )
    return pool.spec(mine)
