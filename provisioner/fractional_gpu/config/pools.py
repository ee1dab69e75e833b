"""A pool's policy: the keys of its configuration, and the devices that it gets.

- `ALL_KEYS` defines the keys (the arbiter's here and in `sharing`, the hub's in `hub`): name, parser, meaning, default and example. The
  help, the example configuration and the errors are made from it.
- A device is in one pool. One pool at most says 'all': it gets the devices that the others leave. A pool without devices is an error,
  except on a host without devices.
- A device is named by number (as the broker lists it), UUID, or a beginning of a UUID that fits one device only. `model:A100` names all
  devices with that text in their name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fractional_gpu.config import values
from fractional_gpu.config.hub import HUB_KEYS, HubPool
from fractional_gpu.config.sharing import SHARING_KEYS, whole_instances
from fractional_gpu.config.values import ConfigError, Key, config_error, did_you_mean
from fractional_gpu.core.model import DeviceSpec, PoolSpec

KEYS: Mapping[str, Key] = {
    "devices": Key(
        field="devices",
        parse=values.device_references,
        default="all",
        example=[0, 1],
        help="The devices of the pool, by number, UUID or model ('model:A100'); 'all': the devices that no other pool has.",
    ),
    "fractions": Key(
        field="fractions_milli",
        parse=values.fractions,
        default=["1/8", "1/4", "1/2", "3/4", "1"],
        example=["1/4", "1/2", "1"],
        help="The fractions of a GPU that users may choose; 'any': all of them.",
    ),
    "oversubscription": Key(
        field="oversubscription_milli",
        parse=values.oversubscription,
        default="unlimited",
        example=4,
        help="How many times its capacity the pool may promise in all: with 4, four times the memory of its devices. 'unlimited': only "
        "host memory limits it. Seats of a hub's servers are limited by wait_bound, usually before.",
    ),
    "idle_after": Key(
        field="idle_after_ms",
        parse=values.idle_after,
        default="auto",
        example="5m",
        help="Suspend a kernel that has been idle for this long; 0: at once; 'on-demand': only when another kernel needs the memory; "
        "'auto': also when to hold the memory is expected to cost others more than it costs this kernel to come back, by its habits.",
        also=("idle_auto",),
    ),
    "hold_price": Key(
        field="hold_price_milli",
        parse=values.hourly_price,
        default=0,
        example=2.5,
        help="With idle_after 'auto': what an hour of a whole GPU costs that an idle kernel holds, in any currency, beside what "
        "other cells lose by it. 0: while other cells find room at once, no kernel leaves.",
    ),
    "wait_price": Key(
        field="wait_price_milli",
        parse=values.hourly_price,
        default=40,
        example=60,
        help="With idle_after 'auto': what an hour of a person's waiting costs, in the same currency.",
    ),
    "empty_devices": Key(
        field="empty_devices",
        parse=values.boolean,
        default=False,
        example=True,
        help="With may_move: move idle kernels together on fewer devices, so that whole ones become empty (c.GPUBroker.on_empty is told).",
    ),
    "foresight": Key(
        field="foresight",
        parse=values.foresight,
        default="free",
        example="displace",
        help="What is done for a suspended kernel whose next cell is expected, because a person types in its notebook, or by its habits: "
        "'free': it comes back where there is room; 'displace': idle kernels that are expected later make room for it; 'off': nothing.",
    ),
    "foresight_swap": Key(
        field="foresight_swap_ms",
        parse=values.duration(),
        default="2s",
        example="500ms",
        help="With foresight: no kernel is brought back early that is expected to take longer than this.",
    ),
    "foresight_vain": Key(
        field="foresight_vain_mib",
        parse=values.memory,
        default="256GiB",
        example="64GiB",
        help="With foresight: how much may be moved to and from one device within an hour for cells that do not come.",
    ),
    "min_residency": Key(
        field="min_residency_ms",
        parse=values.duration(),
        default="10s",
        example="30s",
        help="How long a busy kernel stays on its device at least before another kernel may take its place.",
    ),
    "unattached_ttl": Key(
        field="unattached_ttl_ms",
        parse=values.duration(least_ms=1000),
        default="2m",
        example="5m",
        help="A lease without a running kernel ends after this time.",
    ),
    "revoked_ttl": Key(
        field="revoked_ttl_ms",
        parse=values.duration(least_ms=1000),
        default="24h",
        example="2h",
        help="A kernel whose hub server has ended is suspended and waits this long for the server's next start; then the broker ends it.",
    ),
    "unattached_hold": Key(
        field="unattached_hold_ms",
        parse=values.duration(),
        default="15s",
        example="1m",
        help="How long memory is reserved for a kernel without our extension that is about to start; then a waiting kernel may get it.",
    ),
    "max_unused_hold": Key(
        field="max_unused_hold_ms",
        parse=values.duration(word="off"),
        default="off",
        example="10m",
        help="How long a cell may hold memory without using the GPU; then its kernel counts as idle until it uses the GPU, "
        "which it does without a reservation at first. 'off': until the cell ends.",
    ),
    "unattached_leases": Key(
        field="unattached_leases",
        parse=values.whole_number(1, 512),
        default=64,
        example=128,
        help="How many leases without a running kernel a user may have: for kernels that are starting or have ended.",
    ),
    "unattached_share": Key(
        field="unattached_share_milli",
        parse=values.share,
        default="50%",
        example="100%",
        help="The share of the pool that a user's leases without a running kernel may hold, or be promised, together. One such lease is "
        "always allowed.",
    ),
    "retry_refused": Key(
        field="retry_refused_ms",
        parse=values.duration(),
        default="30s",
        example="1m",
        help="How long the broker waits before it tries again to suspend a kernel that could not be suspended.",
    ),
    "max_passed_over": Key(
        field="max_passed_over",
        parse=values.whole_number(0, 1000),
        default=8,
        example=4,
        help="How many kernels may pass a waiting one that needs more memory, before the broker keeps free memory for it.",
    ),
    "may_move": Key(
        field="may_move",
        parse=values.boolean,
        default=True,
        example=False,
        help="Resume kernels on any device of the same model, where the driver can (580 or newer). False: on their own device only.",
    ),
    "move_busy": Key(
        field="move_busy",
        parse=values.boolean,
        default=False,
        example=True,
        help="With may_move: also move kernels that run a cell, if that makes room for a waiting one.",
    ),
    "reserve": Key(
        field="reserve_by",
        parse=values.reserve_by,
        default="cap",
        example="use",
        help="What a kernel on a device reserves: 'cap': all memory that it may use; 'use': the memory that it uses, plus headroom.",
    ),
    "compute": Key(
        field="compute",
        parse=values.compute,
        default="spread",
        example="pack",
        help="Which device a kernel goes to, where several have the memory: 'spread': one whose busy kernels leave enough compute; 'pack': "
        "memory alone decides, as it does between equals: the kernel goes where it spoils least for what others ask for. No kernel waits "
        "because of compute.",
    ),
    "slowdown_bound": Key(
        field="slowdown_bound_milli",
        parse=values.times(1000),
        default=1,
        example=1.5,
        help="With compute 'spread': how many devices' worth of compute the busy kernels of one device may need together. Beyond that, "
        "another kernel goes elsewhere if it can, even if its saved memory came from there.",
    ),
    "headroom": Key(
        field="headroom_mib",
        parse=values.memory,
        default="512MiB",
        example="1GiB",
        help="With reserve 'use': the memory that is reserved for a kernel beyond its use.",
    ),
    "min_residency_swaps": Key(
        field="min_residency_swaps_milli",
        parse=values.times(1000),
        default=30,
        example=9,
        help="A busy kernel stays on its device at least this many times as long as its suspend and resume are expected to take. With 9, "
        "two kernels that are always busy spend at most a tenth of their time on swaps; with 30, at most 3%.",
    ),
    "preempt": Key(
        field="preempt_equals",
        parse=values.preempt,
        default="fair",
        example="priorities",
        help="Whether kernels may be suspended in the middle of a cell: 'never'; 'priorities': for kernels of a higher priority; 'fair': "
        "also for kernels of the same priority, so that all get their share of the time. At the end of a cell a kernel always makes "
        "room for kernels that waited longer.",
        also=("preempt_priorities",),
    ),
    "overlap_resume": Key(
        field="overlap_resume",
        parse=values.boolean,
        default=False,
        example=True,
        help="Start a cell while its kernel's GPU memory is still being restored. The cell's first GPU call blocks until that is done, and "
        "cannot be interrupted.",
    ),
    "max_pin": Key(
        field="max_pin_ms",
        parse=values.duration(),
        default="4h",
        example="30m",
        help="How long a user may pin a kernel to its device at a time; 0: pinning is not allowed.",
    ),
    "pin_budget": Key(
        field="pin_budget_ms",
        parse=values.duration(word="unlimited"),
        default="8h",
        example="2h",
        help="The pinned time that each user has per day, for all kernels together; it refills evenly. 'unlimited': no budget.",
    ),
    "warn_before": Key(
        field="warn_before_ms",
        parse=values.duration(),
        default=0,
        example="1m",
        help="How long before an idle kernel is suspended its notebook shows a notice; 0: no notice.",
    ),
    "max_devices": Key(
        field="max_devices",
        parse=values.whole_number(1, 8),
        default=8,
        example=2,
        help="How many whole devices one kernel may request.",
    ),
    "max_priority": Key(
        field="max_priority",
        parse=values.whole_number(-1000, 1000),
        default=0,
        example=10,
        help="The highest priority that users may request. Administrators and a hub's seats are not limited.",
    ),
    "user_limits": Key(
        field="user_limits",
        parse=values.limits,
        default={},
        example={"leases": 4, "fraction": 2, "resident": 1},
        help="The limits of each user: 'leases': number of kernels; 'fraction': GPUs of all kernels together; 'resident': GPUs held at a "
        "time (further kernels wait). A limit that is left out is unlimited.",
    ),
    "group_limits": Key(
        field="group_limits",
        parse=values.group_limits,
        default={},
        example={"students": {"leases": 60, "resident": 2}},
        help="The same limits for the members of a group together.",
    ),
    **SHARING_KEYS,
}

_MODEL = "model:"
ALL_KEYS: Mapping[str, Key] = {**KEYS, **HUB_KEYS}
# What administrators change most, in the order in which a form shows it.
COMMON_KEYS = (
    "idle_after", "fractions", "oversubscription", "preempt", "max_pin", "user_limits", "kernels_per_seat", "wait_target",
    "wait_bound", "when_full", "hours", "price",
)  # fmt: skip


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
    hub = HubPool(**_parsed(where, raw, HUB_KEYS))
    if hub.price_bands and hub.price is None:
        raise config_error(
            f"{where}['price_hours']",
            raw["price_hours"],
            "prices at some times need 'price', with the currency, for the others",
        )
    whole_instances(where, raw, parsed)
    return PoolSettings(
        name=name,
        where=where,
        devices=parsed.pop("devices"),
        fractions_milli=parsed.pop("fractions_milli"),
        policy=parsed,
        hub=hub,
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
    """Return the device that the reference names. Raises ConfigError if it fits no device or several."""
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
    """Return the devices that the reference names: one, or all of a model. Raises ConfigError if there is none."""
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
