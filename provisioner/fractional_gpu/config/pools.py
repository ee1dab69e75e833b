"""Defines a pool, the settings that are its configuration keys, and how devices are assigned to it.

- A device can be in only one pool. At most one pool may set its devices to 'all', which means all devices that no other pool lists. It is
  an error for a pool to have no devices, unless the host has none.
- A device is identified by its number in the broker's list, its UUID, or a unique prefix of its UUID. `model:A100` selects all devices with
  that text in their name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from traitlets import HasTraits

from fractional_gpu.config import budgets, hub, values
from fractional_gpu.config.hub import GroupTerms
from fractional_gpu.config.values import ConfigError, PartError, Setting, config_error, did_you_mean, settings_of
from fractional_gpu.core.metering.tariffs import Basis, Tariff
from fractional_gpu.core.model import (
    AfterKernel,
    Breach,
    Compute,
    DeviceSpec,
    Foresight,
    PoolSpec,
    ReserveBy,
    Sharing,
    Strangers,
)

_MODEL = "model:"
_WHOLE = 1000  # milli-GPU
# A pool's name is part of a kernelspec's name, which Jupyter reads in lower case.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
# The keys that administrators change most, in the order of a form.
COMMON_KEYS = (
    "idle_after", "fractions", "oversubscription", "preempt", "max_pin", "user_limits", "kernels_per_seat", "wait_target",
    "wait_bound", "when_full", "hours", "price",
)  # fmt: skip


class Pool(HasTraits):
    """A configured pool. Durations are in ms, memory in MiB, and fractions, prices and shares in thousandths.

    Each configuration key is a `Setting`, whose `to` names the fields of the arbiter's `PoolSpec` that it sets.
    """

    # fmt: off
    devices = Setting(
        values.device_references, "all", [0, 1], to="devices",
        help="The devices in the pool, by number, UUID or model ('model:A100'), or 'all' for all devices that no other pool lists.",
    )
    fractions = Setting(
        values.fractions, ["1/8", "1/4", "1/2", "3/4", "1"], ["1/4", "1/2", "1"], to="fractions_milli",
        help="The fractions of a GPU that users may choose from. If 'any', they may choose any fraction.",
    )
    oversubscription = Setting(
        values.or_word("unlimited", values.number(1, 1000)), "unlimited", 4, to="oversubscription_milli",
        help="The most that the pool may promise in total, as a multiple of its capacity: 4 means four times the memory of its devices. If "
        "'unlimited', only host memory limits it. A hub's seats are also limited by wait_bound, which usually takes effect first.",
    )
    idle_after = Setting(
        values.idle_after, "auto", "5m", to="idle_after_ms idle_auto",
        help="How long a kernel must be idle before it is suspended; 0: suspend it at once; 'on-demand': only when another kernel needs "
        "the memory; 'auto': also when, judging by past use, keeping it would probably cost others more than restoring it would cost this "
        "kernel.",
    )
    hold_price = Setting(
        values.hourly_price, 0, 2.5, to="hold_price_milli",
        help="With idle_after 'auto': what it costs per hour if an idle kernel holds a whole GPU, in any currency, in addition to the "
             "waiting this causes. If 0, idle kernels stay as long as no other cell has to wait.",
    )
    wait_price = Setting(
        values.hourly_price, 40, 60, to="wait_price_milli",
        help="With idle_after 'auto': what an hour of a person's waiting costs, in the currency of hold_price.",
    )
    empty_devices = Setting(
        values.boolean, False, True, to="empty_devices",
        help="With may_move: pack idle kernels onto fewer devices, so that whole devices become free.",
    )
    foresight = Setting(
        values.choice(Foresight), "free", "displace", to="foresight",
        help="Whether to resume a suspended kernel before its next cell, when someone types in its notebook or past use suggests that a "
        "cell will run soon. 'free': if there is room; 'displace': also by suspending idle kernels expected to run one later; 'off': "
        "never.",
    )
    foresight_swap = Setting(
        values.duration(), "2s", "500ms", to="foresight_swap_ms",
        help="With foresight: resume a kernel early only if that is expected to take no longer than this.",
    )
    foresight_vain = Setting(
        values.memory, "256GiB", "64GiB", to="foresight_vain_mib",
        help="With foresight: how much data per hour may be moved to and from each device for cells that then never run.",
    )
    min_residency = Setting(
        values.duration(), "10s", "30s", to="min_residency_ms",
        help="The minimum time a busy kernel stays on its device before another kernel can take its place.",
    )
    unattached_ttl = Setting(
        values.duration(least_ms=1000), "2m", "5m", to="unattached_ttl_ms",
        help="How long a lease without a running kernel lasts before it ends.",
    )
    revoked_ttl = Setting(
        values.duration(least_ms=1000), "24h", "2h", to="revoked_ttl_ms",
        help="How long a kernel whose hub server has ended stays suspended, waiting for the server to start again, before the broker ends "
        "it.",
    )
    unattached_hold = Setting(
        values.duration(), "15s", "1m", to="unattached_hold_ms",
        help="How long memory stays reserved for a kernel without our extension that is about to start. After that, a waiting kernel may "
        "take it.",
    )
    max_unused_hold = Setting(
        values.or_word("off", values.duration()), "off", "10m", to="max_unused_hold_ms",
        help="How long a cell may hold memory without using the GPU. After that, its kernel counts as idle until it uses the GPU "
        "again, at first without a reservation. If 'off', there is no limit.",
    )
    unattached_leases = Setting(
        values.whole_number(1, 512), 64, 128, to="unattached_leases",
        help="How many leases without a running kernel each user may have. Such leases belong to kernels that are starting or have ended.",
    )
    unattached_share = Setting(
        values.share, "50%", "100%", to="unattached_share_milli",
        help="The largest share of the pool that a user's leases without a running kernel may together hold or be promised. One such lease "
        "is always allowed.",
    )
    retry_refused = Setting(
        values.duration(), "30s", "1m", to="retry_refused_ms",
        help="How long the broker waits before it makes another attempt to suspend a kernel that could not be suspended.",
    )
    max_passed_over = Setting(
        values.whole_number(0, 1000), 8, 4, to="max_passed_over",
        help="How many kernels may overtake a waiting kernel that needs more memory before the broker sets free memory aside for it.",
    )
    may_move = Setting(
        values.boolean, True, False, to="may_move",
        help="Resume kernels on any device of the same model, if the driver supports this (580 or newer). If False, kernels only resume on "
        "the device that they were suspended from.",
    )
    move_busy = Setting(
        values.boolean, False, True, to="move_busy",
        help="With may_move: also move kernels that are running a cell, if that makes room for a waiting kernel.",
    )
    reserve = Setting(
        values.choice(ReserveBy), "cap", "use", to="reserve_by",
        help="How much memory a kernel on a device reserves: 'cap': as much as it may use; 'use': as much as it is using, plus headroom.",
    )
    compute = Setting(
        values.choice(Compute), "spread", "pack", to="compute",
        help="Which device a kernel goes to if several have enough memory: 'spread': one whose busy kernels leave it enough compute, "
        "chosen as with 'pack' if there are several; 'pack': the one where it fragments free memory the least. Kernels never wait for "
        "compute.",
    )
    slowdown_bound = Setting(
        values.number(0, 1000), 1, 1.5, to="slowdown_bound_milli",
        help="With compute 'spread': how much compute the busy kernels on a device may need together, as a multiple of what it has. Beyond "
        "that, further kernels go to another device if possible, even if they were suspended from this one.",
    )
    headroom = Setting(
        values.memory, "512MiB", "1GiB", to="headroom_mib",
        help="With reserve 'use': how much memory to reserve for a kernel in addition to what it uses.",
    )
    min_residency_swaps = Setting(
        values.number(0, 1000), 30, 9, to="min_residency_swaps_milli",
        help="A busy kernel stays on its device for at least this many times as long as its suspend and resume are expected to take. With "
        "9, two kernels that are always busy spend at most a tenth of their time on swaps; with 30, about 3%.",
    )
    preempt = Setting(
        values.choice({"never": (False, False), "priorities": (False, True), "fair": (True, True)}),
        "fair", "priorities", to="preempt_equals preempt_priorities",
        help="When a kernel may be suspended in the middle of a cell: 'never'; 'priorities': to make room for kernels of a higher "
        "priority; 'fair': for kernels of the same priority, too, so that all get their share of the time. After each cell, a kernel "
        "always makes room for kernels that have waited longer.",
    )
    overlap_resume = Setting(
        values.boolean, False, True, to="overlap_resume",
        help="Start a cell while its kernel's GPU memory is still being restored. The cell's first GPU call blocks until the restore "
        "is done, and cannot be interrupted.",
    )
    max_pin = Setting(
        values.duration(), "4h", "30m", to="max_pin_ms",
        help="How long a user may pin a kernel to its device at a time. If 0, pinning is not allowed.",
    )
    pin_budget = Setting(
        values.or_word("unlimited", values.duration()), "8h", "2h", to="pin_budget_ms",
        help="The total time per day for which each user may pin kernels. The budget refills evenly. If 'unlimited', there is no budget.",
    )
    longest_claim = Setting(
        values.duration(), "1h", "10m", to="longest_claim_ms",
        help="How long a claim may last before it must be renewed. A claim (`jupyter gpu lease`) reserves memory for a program that the "
        "broker does not know about. It cannot be suspended, and its time counts against pin_budget. If 0, claims are not allowed.",
    )
    warn_before = Setting(
        values.duration(), 0, "1m", to="warn_before_ms",
        help="How long before suspending an idle kernel to show a notice in its notebook. If 0, no notice is shown.",
    )
    max_devices = Setting(
        values.whole_number(1, 8), 8, 2, to="max_devices",
        help="How many whole devices one kernel may request.",
    )
    max_priority = Setting(
        values.whole_number(-1000, 1000), 0, 10, to="max_priority",
        help="The highest priority that users may request. Administrators and a hub's seats are exempt.",
    )
    user_limits = Setting(
        values.limits, {}, {"leases": 4, "fraction": 2, "resident": 1}, to="user_limits",
        help="The limits for each user: 'leases': the number of kernels; 'fraction': the GPUs of all their kernels together; 'resident': "
        "the GPUs held at the same time (further kernels wait). A limit that is left out does not apply.",
    )
    group_limits = Setting(
        values.group_limits, {}, {"students": {"leases": 60, "resident": 2}}, to="group_limits",
        help="The same limits, but for all members of a group together.",
    )
    sharing = Setting(
        values.choice(Sharing), "time-slice", "mps", to="sharing",
        help="How kernels share a device: 'time-slice': they take turns, and idle ones are suspended; 'mps': through NVIDIA's MPS server, "
        "which limits compute and memory; 'mig': each kernel has a whole MIG instance. With 'mps' and 'mig', kernels are never suspended.",
    )
    breach = Setting(
        values.choice(Breach), "warn", "suspend", to="breach",
        help="What happens to a kernel that uses more device memory than its cap: 'warn': its user gets a notice; 'suspend': it is "
        "suspended when idle, and resumes on a device where all its memory fits; 'kill': its processes on the device are killed.",
    )
    strangers = Setting(
        values.choice(Strangers), "yield", "refuse", to="strangers",
        help="What happens when programs that do not belong to any of the broker's kernels use a device in the pool: 'yield': idle kernels "
        "are suspended if these programs need the room; 'yield-busy': busy kernels too, if that is not enough; 'ignore': nothing; "
        "'refuse': the broker ends these programs (SIGTERM, then SIGKILL) if its user is permitted to.",
    )
    after_kernel = Setting(
        values.choice(AfterKernel), "keep", "end", to="after_kernel",
        help="What happens to processes that were started by a kernel, have outlived it and still hold device memory: 'keep': they keep "
        "running and keep the kernel's reservation; 'end': the broker ends them (SIGTERM, then SIGKILL) if its user is permitted to.",
    )
    checkpoint_children = Setting(
        values.boolean, False, True, to="checkpoint_children",
        help="With NVIDIA driver 580.159 or newer, also suspend kernels that have forked children (such as DataLoader workers) since they "
        "began to use CUDA. The pool's kernels are started in checkpoint jobs.",
    )
    exclusive = Setting(
        values.boolean, False, True, to="exclusive",
        help="If the driver enforces memory limits, the pool's kernels and all other processes in their cgroups cannot use "
             "devices on which these kernels hold nothing. If False, other programs of the same user or unit can still use those devices.",
    )
    suspend_unseen = Setting(
        values.boolean, True, False, to="suspend_unseen",
        help="Suspend kernels without our extension (other languages). The broker cannot detect whether they use managed memory, "
        "which the driver cannot save. If False, such kernels stay on their device.",
    )
    hami_library = Setting(
        values.library, "", "/usr/local/vgpu/libvgpu.so", to="hami_library",
        help="The path of the HAMi-core library to preload into the pool's kernels. Allocations beyond the cap then fail, and compute "
        "is limited to the fraction.",
    )
    groups = Setting(
        hub.groups, "everybody", {"students": {}, "staff": {"weight": 200, "priority": 10}},
        help="Hub: the groups whose members may use the pool, each with its weight (100 by default; 200 gets twice the share of "
        "100) and its priority. If 'everybody', all users may use it on equal terms.",
    )
    hours = Setting(
        hub.hours, "always", "Mon-Fri 08:00-18:00, Sat 10:00-14:00",
        help="Hub: when servers may be started, in the machine's local time, or 'always'. Servers running at closing time are not stopped.",
    )
    price = Setting(
        hub.price, None, "0.80 EUR",
        help="The hourly price of a whole GPU, with its currency. Users see the price of their fraction before they start a server from a "
        "hub.",
    )
    price_hours = Setting(
        hub.price_bands, {}, {"Mon-Fri 08:00-18:00": 1.20},
        help="Prices for certain times of the week, in the currency of `price`. Times are local, and the first match applies.",
    )
    charge = Setting(
        values.choice(Basis), "held", "reserved",
        help="What is charged: 'held': the time a kernel has memory on a GPU; 'busy': the time it runs cells there; 'reserved': the "
        "time the kernel exists, less suspended_credit. Each is multiplied by the kernel's fraction.",
    )
    suspended_credit = Setting(
        values.share, "100%", "80%",
        help="With charge 'reserved': the discount on the price while the kernel is suspended.",
    )
    over_budget = Setting(
        budgets.over_budget, "lower-priority", "when-free, no-new-seats",
        help="What happens to a user or group whose budget (c.GPUBroker.budgets) is used up: 'lower-priority': others go first; "
        "'when-free': their kernels get a GPU only while no other user waits; 'no-new-seats': they cannot start servers with a "
        "GPU, nor GPU kernels outside one; 'nothing': no effect. Running kernels are never ended, and no state is lost.",
    )
    wait_target = Setting(
        values.duration(), "30s", "2m",
        help="Hub: the longest time that a cell should wait for the GPU; see wait_bound.",
    )
    wait_bound = Setting(
        values.share, "5%", "1%",
        help="Hub: the share of cells that may wait longer than wait_target. The pool counts as full if one more server would push the "
        "share above this.",
    )
    expected_use = Setting(
        values.share, "25.7%", "10%",
        help="Hub: the share of the time that a user's kernels are assumed to use the GPU, until enough is known about that user.",
    )
    when_full = Setting(
        values.one_of("wait", "refuse"), "wait", "refuse",
        help="Hub: what happens to a server that is started while the pool is full: 'wait': it waits in the queue; 'refuse': it does not "
        "start, and its user sees the reason.",
    )
    kernels_per_seat = Setting(
        values.whole_number(1, 512), 4, 8,
        help="Hub: how many GPU kernels one server may have; together they share the server's fraction.",
    )

    # fmt: on

    def __init__(self, name: str = "", raw: Mapping[str, object] | None = None) -> None:
        """Parse the pool's configuration keys. Raises ValueError with the name of the invalid key."""
        super().__init__()
        self.name, self.raw = name, dict(raw or {})
        for key, value in self.raw.items():
            if key not in POOL_KEYS:
                raise PartError(f"[{key!r}]", value, f"unknown key; {did_you_mean(str(key), POOL_KEYS)}")
            try:
                setattr(self, key, value)
            except ValueError as error:
                raise PartError(f"[{key!r}]", value, error) from None
        if self.price_hours and self.price is None:
            problem = "price_hours needs 'price', which sets the currency and the price at other times"
            raise PartError("['price_hours']", self.raw["price_hours"], problem)
        if self.sharing is Sharing.MIG:
            if "fractions" in self.raw and self.fractions != (_WHOLE,):
                problem = "with sharing 'mig', a kernel gets a whole instance; leave fractions out, or set it to ['1']"
                raise PartError("['fractions']", self.raw["fractions"], problem)
            self.fractions = [1]

    def spec(self, devices: tuple[str, ...]) -> PoolSpec:
        """Return the arbiter's description of the pool with these devices."""
        fields: dict[str, Any] = {}
        for key, setting in POOL_KEYS.items():
            value = getattr(self, key)
            fields |= zip(setting.to, value if len(setting.to) > 1 else (value,), strict=False)
        return PoolSpec(**{**fields, "name": self.name, "devices": devices})

    @property
    def tariff(self) -> Tariff:
        """The pool's tariff. If no price is set, only device time is counted."""
        return Tariff(
            currency=self.price.unit if self.price is not None else "",
            price_milli=self.price.milli if self.price is not None else 0,
            bands=self.price_hours,
            basis=self.charge,
            credit_milli=self.suspended_credit,
        )

    def terms(self, groups: Iterable[str]) -> tuple[str, GroupTerms] | None:
        """Return the name and terms of whichever group has the best terms. Return None if none of the groups may use the pool."""
        if self.groups is None:
            return "", GroupTerms()
        mine = [(name, self.groups[name]) for name in groups if name in self.groups]
        return max(mine, key=lambda each: (each[1].priority, each[1].weight, each[0]), default=None)


POOL_KEYS = settings_of(Pool)


def parse_pools(value: object) -> tuple[Pool, ...]:
    """Parse and check the configured pools. Raises ValueError."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError("expected at least one pool, such as {'default': {}}")
    found = []
    for name, raw in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problem = "a pool name must be 1 to 63 lowercase letters, digits, '-', '_' and '.', and start and end with a letter or digit"
            raise PartError(f"[{name!r}]", raw, problem)
        if not isinstance(raw, Mapping):
            example = "{'fractions': ['1/4', '1/2', '1'], 'idle_after': '5m'}"
            raise PartError(f"[{name!r}]", raw, f"a pool must be a dictionary such as {example}")
        try:
            found.append(Pool(name, raw))
        except ValueError as error:
            raise PartError(f"[{name!r}]", raw, error) from None
    if len(greedy := [pool.name for pool in found if pool.devices is None]) > 1:
        problem = (
            f"pool {greedy[0]!r} already has 'all' (the default), and only one pool can; list the devices of the others"
        )
        raise PartError(f"[{greedy[1]!r}]['devices']", "all", problem)
    return tuple(found)


def find_devices(where: str, reference: str, devices: Sequence[DeviceSpec]) -> list[DeviceSpec]:
    """Return the devices the reference selects: a single device, or all devices of a model.

    Raises ConfigError if no device matches or if several UUIDs match.
    """
    if reference.startswith(_MODEL):
        model = reference.removeprefix(_MODEL).strip().lower()
        if fitting := [device for device in devices if model and model in device.name.lower()]:
            return fitting
        there = ", ".join(sorted({device.name for device in devices})) or "no devices"
        raise config_error(where, reference, f"no device matches that model; this host has: {there}")
    if reference.isdecimal():
        fitting = [devices[int(reference)]] if int(reference) < len(devices) else []
    else:
        exact = [device for device in devices if device.device_id == reference]
        fitting = exact or [device for device in devices if device.device_id.startswith(reference)]
    if len(fitting) == 1:
        return fitting
    there = ", ".join(f"{number} {device.device_id}" for number, device in enumerate(devices)) or "no devices"
    problem = "matches more than one device" if fitting else "there is no such device"
    raise config_error(where, reference, f"{problem}; this host has: {there}")


def assign(
    pools: Sequence[Pool], where: str, devices: Sequence[DeviceSpec], managed: Sequence[DeviceSpec]
) -> tuple[PoolSpec, ...]:
    """Assign devices to pools, in the order of `pools`. `managed` lists the devices the broker may use. Raises ConfigError."""
    usable = {device.device_id for device in managed}
    owner: dict[str, str] = {}
    for pool in pools:
        key = f"{where}[{pool.name!r}]['devices']"
        for reference in pool.devices or ():
            for device_id in (device.device_id for device in find_devices(key, reference, devices)):
                if device_id not in usable:
                    raise config_error(
                        key, reference, f"{device_id} is not among the devices that c.GPUBroker.devices allows"
                    )
                if device_id in owner:
                    raise config_error(
                        key,
                        reference,
                        f"{device_id} is already in pool {owner[device_id]!r}; a device can only be in one pool",
                    )
                owner[device_id] = pool.name
    specs = []
    for pool in pools:
        wanted = pool.name if pool.devices is not None else None
        mine = tuple(device.device_id for device in managed if owner.get(device.device_id) == wanted)
        if managed and not mine:
            raise ConfigError(
                f"{where}[{pool.name!r}]: the pool has no devices, because other pools have all {len(managed)}; give it some with "
                "'devices', or remove it"
            )
        specs.append(pool.spec(mine))
    return tuple(specs)
