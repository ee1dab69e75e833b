"""A pool's policy: the keys that one may have, and which devices it gets.

- `ALL_KEYS` is the truth (the arbiter's here, a hub's in `hub`): what a key is called, how it is read, what it means, its
  default and an example. The help, the example configuration and the refusals are made from it.
- A device is in one pool. At most one pool says 'all': it gets what the others left. A pool without devices is an error,
  except on a host that has none at all.
- Devices are named by number (as listed by the broker), UUID, or the beginning of a UUID that fits one device only; or all of a
  model at once (`model:A100`: those with that in their name).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fractional_gpu.config import values
from fractional_gpu.config.hub import HUB_KEYS, HubPool
from fractional_gpu.config.keys import ConfigError, Key, config_error, did_you_mean
from fractional_gpu.config.sharing import SHARING_KEYS, whole_instances
from fractional_gpu.core.model import DeviceSpec, PoolSpec

__all__ = ["ALL_KEYS", "KEYS", "PoolSettings", "assign", "find_device", "find_devices", "parse_pool"]


KEYS: Mapping[str, Key] = {
    "devices": Key(
        field="devices",
        parse=values.device_references,
        default="all",
        example=[0, 1],
        help="The devices of the pool, by number, UUID or model ('model:A100'); 'all': those that no other pool has.",
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
        help="A busy kernel stays on its device for at least so long before another one may take its place: its turn.",
    ),
    "unattached_ttl": Key(
        field="unattached_ttl_ms",
        parse=values.duration(least_ms=1000),
        default="2m",
        example="5m",
        help="A lease without a running kernel ends after so long.",
    ),
    "revoked_ttl": Key(
        field="revoked_ttl_ms",
        parse=values.duration(least_ms=1000),
        default="24h",
        example="2h",
        help="A kernel whose hub server has ended is suspended and waits so long for that server's next start; then it is ended.",
    ),
    "unattached_hold": Key(
        field="unattached_hold_ms",
        parse=values.duration(),
        default="15s",
        example="1m",
        help="Room is kept for so long for a kernel without our extension that is about to start; then a kernel that waits may have it.",
    ),
    "unattached_leases": Key(
        field="unattached_leases",
        parse=values.whole_number(1, 512),
        default=64,
        example=128,
        help="How many leases without a running kernel a user may have: kernels that are starting, or that have ended.",
    ),
    "unattached_share": Key(
        field="unattached_share_milli",
        parse=values.share,
        default="50%",
        example="100%",
        help="How much of the pool a user's leases without a running kernel may hold, or be promised, together; one lease may always.",
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
    "move_busy": Key(
        field="move_busy",
        parse=values.boolean,
        default=False,
        example=True,
        help="With may_move: move kernels that are running a cell, too, where that lets a waiting one in.",
    ),
    "reserve": Key(
        field="reserve_by",
        parse=values.reserve_by,
        default="cap",
        example="use",
        help="What a kernel on a device holds: 'cap': all that it may use; 'use': what it uses and some headroom.",
    ),
    "headroom": Key(
        field="headroom_mib",
        parse=values.memory,
        default="512MiB",
        example="1GiB",
        help="With reserve 'use': how much is kept for a kernel beyond what it uses.",
    ),
    "min_residency_swaps": Key(
        field="min_residency_swaps_milli",
        parse=values.times(1000),
        default=9,
        example=19,
        help="A busy kernel stays at least so many times as long as suspending and resuming it is expected to take: with 9, a tenth of the "
        "time of two always-busy kernels goes to swaps at most.",
    ),
    "preempt": Key(
        field="preempt_equals",
        parse=values.preempt,
        default="fair",
        example="priorities",
        help="Suspend kernels in the middle of a cell: 'never'; 'priorities': for kernels of a higher priority; 'fair': also "
        "for equals, so that all get their share of the time. At the end of a cell a kernel makes room for those that waited "
        "longer in any case.",
        also=("preempt_priorities",),
    ),
    "overlap_resume": Key(
        field="overlap_resume",
        parse=values.boolean,
        default=False,
        example=True,
        help="Let a cell run on the processor while its kernel's memory is on the way back; its first call of the GPU blocks until then, "
        "and cannot be interrupted.",
    ),
    "max_pin": Key(
        field="max_pin_ms",
        parse=values.duration(),
        default="4h",
        example="30m",
        help="How long a kernel may be pinned to its device at a time; 0: nobody may pin.",
    ),
    "pin_budget": Key(
        field="pin_budget_ms",
        parse=values.duration(word="unlimited"),
        default="8h",
        example="2h",
        help="Pinned time per user and day, all kernels together; it comes back evenly. 'unlimited': no budget.",
    ),
    "warn_before": Key(
        field="warn_before_ms",
        parse=values.duration(),
        default=0,
        example="1m",
        help="Tell a notebook so long before its kernel is suspended for being idle; 0: not at all.",
    ),
    "max_devices": Key(
        field="max_devices",
        parse=values.whole_number(1, 8),
        default=8,
        example=2,
        help="How many whole devices one kernel may ask for.",
    ),
    "max_priority": Key(
        field="max_priority",
        parse=values.whole_number(-1000, 1000),
        default=0,
        example=10,
        help="The highest priority that a user may ask for; administrators, and a hub's seats, may have any.",
    ),
    "user_limits": Key(
        field="user_limits",
        parse=values.limits,
        default={},
        example={"leases": 4, "fraction": 2, "resident": 1},
        help="What each user may have: 'leases': kernels; 'fraction': GPUs, all kernels together; 'resident': GPUs held at a "
        "time (more wait). What is not named is unlimited.",
    ),
    "group_limits": Key(
        field="group_limits",
        parse=values.group_limits,
        default={},
        example={"students": {"leases": 60, "resident": 2}},
        help="The same for the members of a group together.",
    ),
    **SHARING_KEYS,
}

_MODEL = "model:"
ALL_KEYS: Mapping[str, Key] = {**KEYS, **HUB_KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """A pool as configured. `devices` are references (None: all that are left); `policy` has PoolSpec's other fields."""

    name: str
    where: str  # its key in the configuration, for errors that only the devices can show
    devices: tuple[str, ...] | None
    fractions_milli: tuple[int, ...]
    policy: Mapping[str, Any]
    hub: HubPool = field(default_factory=HubPool)  # what a hub's users are offered
    raw: Mapping[str, Any] = field(default_factory=dict)  # as it was written

    def spec(self, devices: tuple[str, ...]) -> PoolSpec:
        """Return the pool as the arbiter knows it, with the devices it got."""
        return PoolSpec(name=self.name, devices=devices, fractions_milli=self.fractions_milli, **self.policy)


def parse_pool(where: str, name: str, raw: object) -> PoolSettings:
    """Return the checked pool. Raises ConfigError that names the key."""
    where = f"{where}[{name!r}]"
    if not isinstance(raw, Mapping):
        raise config_error(
            where, raw, "a pool is a dictionary such as {'fractions': ['1/4', '1/2', '1'], 'idle_after': '5m'}"
        )
    for key in raw:
        if key not in ALL_KEYS:
            raise config_error(f"{where}[{key!r}]", raw[key], f"unknown key; {did_you_mean(str(key), ALL_KEYS)}")
    parsed = _parsed(where, raw, KEYS)
    whole_instances(where, raw, parsed)
    return PoolSettings(
        name=name,
        where=where,
        devices=parsed.pop("devices"),
        fractions_milli=parsed.pop("fractions_milli"),
        policy=parsed,
        hub=HubPool(**_parsed(where, raw, HUB_KEYS)),
        raw=dict(raw),
    )


def _parsed(where: str, raw: Mapping[Any, object], keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the fields that the keys stand for. Raises ConfigError."""
    parsed: dict[str, Any] = {}
    for key, rule in keys.items():
        value = raw.get(key, rule.default)
        try:
            found = rule.parse(value)
        except ValueError as error:
            raise config_error(f"{where}[{key!r}]", value, str(error)) from None
        parsed |= zip((rule.field, *rule.also), found if rule.also else (found,), strict=True)
    return parsed


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
    raise config_error(where, reference, f"{problem}; this host has: {there}")


def find_devices(where: str, reference: str, devices: Sequence[DeviceSpec]) -> list[DeviceSpec]:
    """Return the devices that are meant: one, or all of a model. Raises ConfigError if there is none."""
    if not reference.startswith(_MODEL):
        return [find_device(where, reference, devices)]
    model = reference.removeprefix(_MODEL).strip().lower()
    fitting = [device for device in devices if model and model in device.name.lower()]
    if not fitting:
        there = ", ".join(sorted({device.name for device in devices})) or "none at all"
        raise config_error(where, reference, f"there is no device of that model; this host has: {there}")
    return fitting


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
            for device_id in (device.device_id for device in find_devices(where, reference, devices)):
                if device_id not in usable:
                    raise config_error(
                        where, reference, f"{device_id} is not among the devices that c.GPUBroker.devices allows"
                    )
                if device_id in owner:
                    raise config_error(
                        where,
                        reference,
                        f"{device_id} is in pool {owner[device_id]!r} already; a device is in one pool",
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
