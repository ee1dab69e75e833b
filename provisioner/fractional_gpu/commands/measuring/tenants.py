"""Runs tenants, which are programs that share one device, each under its own lease. During a step, they all run at the same time.

A stub (`commands.run.stub`) holds each program back until all tenants have a place on the same device. The broker chooses each tenant's
device, so a tenant placed on a different device from the others gives up its place. Unless waiting is allowed, tenants use only spare room,
so that they do not jump ahead of waiting leases. To make room, they suspend the same user's idle kernels, each at most once.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.measuring.study import Sample, Tick, overlap, pace, read_ticks, units_between
from fractional_gpu.commands.run.process import (
    TIMEOUT_S,
    HeldCommand,
    RunningCommand,
    attach,
    command_environment,
    wait_for_gpu,
)
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.jupyter.kernel_lease import KernelLease, environment_with, take_lease
from fractional_gpu.protocol.accounts import Cost
from fractional_gpu.protocol.errors import ConflictError, FractionalGPUError
from fractional_gpu.protocol.limits import MAX_LAST_MS
from fractional_gpu.protocol.messages import COMMAND, KERNEL, AcquireRequest, LeaseRequest
from fractional_gpu.protocol.status import DeviceStatus, HostStatus, LeaseStatus
from fractional_gpu_kernel.measure import FILE

PATIENCE_S: Final = 2.0  # how long a program may take to end when asked to
_TAIL: Final = 2000
_MOST_ELSEWHERE: Final = 64
OTHERS_MILLI: Final = 20  # use by others that disturbs a step; less slows tenants by less than an interval's width


class NoSpareRoomError(CommandError):
    """The pool does not currently have enough spare room to run all these programs together."""


class TenantError(CommandError):
    pass


@dataclass(slots=True, eq=False)
class Tenant:
    command: Sequence[str]
    lease: KernelLease
    folder: Path
    granted: Mapping[str, str] = field(default_factory=dict)
    device_id: str = ""  # set once the tenant has its place
    held: HeldCommand | None = None
    running: RunningCommand | None = None
    _kept: ExitStack = field(default_factory=ExitStack)  # its connection, and the hold on its lease

    @property
    def ticks(self) -> Path:
        return self.folder / "ticks"

    def place(self, wait_ms: int, say: Callable[[str], None]) -> None:
        environment = environment_with(self.lease, {**os.environ, "JUPYTER_GPU_KIND": COMMAND})
        self.ticks.touch()
        with (self.folder / "output").open("wb") as output:
            self.held = HeldCommand(self.command, environment, output)
        attach(self.lease, self.held.pid)
        try:
            self.granted = wait_for_gpu(self.lease, wait_ms, say)
        except CommandError as error:
            raise NoSpareRoomError(str(error)) from None
        # The lease is in use from now on, so that it cannot be suspended during a pause.
        client = self._kept.enter_context(BrokerClient(self.lease.socket, token=self.lease.token))
        next(self._kept.enter_context(closing(client.hold(self.lease.lease_id, AcquireRequest()))), None)
        self.device_id = client.lease(self.lease.lease_id).lease.device_id or ""

    def go(self) -> None:
        assert self.held is not None  # noqa: S101 - methods are called in this order only
        environment = {**command_environment(self.lease, self.granted), FILE: os.fspath(self.ticks)}
        held, self.held = self.held, None
        self.running = held.go(environment)

    def cost(self) -> Cost:
        with BrokerClient(self.lease.socket, token=self.lease.token) as client:
            return client.cost(self.lease.lease_id)

    def end(self) -> None:
        if self.held is not None:
            self.held.give_up()
            self.held = None
        if self.running is not None:
            self.running.end(PATIENCE_S)
        self._kept.close()
        with suppress(FractionalGPUError):
            self.lease.release()

    def failure(self) -> TenantError:
        status = self.running.end(PATIENCE_S) if self.running is not None else 0
        printed = (self.folder / "output").read_bytes()[-_TAIL:].decode("utf-8", "replace").strip().splitlines()
        said = f'; its last output: "{printed[-1][:200]}"' if printed else ""
        return TenantError(f"the program ended with exit status {status}{said}")


@dataclass(slots=True)
class Places:
    client: BrokerClient
    pool: str
    memory_mib: int | None
    folder: Path  # for the tenants' files
    say: Callable[[str], None]
    may_wait: bool
    _asked: set[str] = field(default_factory=set)  # leases that were suspended once; a lease that came back is in use
    _patience_s: float = 0.0  # how long ended tenants may take to free their room

    @contextmanager
    def tenants(
        self, commands: Sequence[Sequence[str]], fraction_milli: int, until_s: float
    ) -> Iterator[Sequence[Tenant]]:
        with ExitStack() as stack:
            placed: list[Tenant] = []
            elsewhere: list[Tenant] = []
            while len(placed) < len(commands):
                device_id = placed[0].device_id if placed else ""
                wanted = len(commands) - len(placed)
                tenant = self._tenant(commands[len(placed)], fraction_milli, wanted, device_id, until_s)
                stack.callback(tenant.end)
                wait_ms = round((until_s - time.monotonic()) * 1000) if self.may_wait else 0
                tenant.place(wait_ms, self.say)
                if placed:
                    fits = tenant.device_id == device_id
                elif self.may_wait or wanted == 1:
                    fits = True
                else:  # the device of the first tenant must have room for all others
                    reserve_mib, device_id = tenant.lease.reserve_mib, tenant.device_id
                    fits = not no_spare_room(self.client.status(), self.pool, reserve_mib, wanted - 1, device_id)
                if fits:
                    placed.append(tenant)
                    continue
                elsewhere.append(tenant)  # keeps its place for now, so that the next tenant does not get it
                if len(elsewhere) >= _MOST_ELSEWHERE:
                    raise NoSpareRoomError(
                        f"the broker did not place all {len(commands)} programs on the same device of pool {self.pool}"
                    )
            for tenant in elsewhere:
                tenant.end()
            self._patience_s = PATIENCE_S
            yield placed

    def _tenant(
        self, command: Sequence[str], fraction_milli: int, wanted: int, device_id: str, until_s: float
    ) -> Tenant:
        request = LeaseRequest(
            fraction_milli=fraction_milli,
            pool=self.pool,
            memory_mib=self.memory_mib,
            label=f"measure {Path(command[0]).name}",
            gated=False,
            kind=COMMAND,
        )
        lease = take_lease(request, timeout_s=TIMEOUT_S)
        try:
            if not self.may_wait:
                self._make_room(lease, wanted, device_id, until_s)
            folder = self.folder / lease.lease_id
            folder.mkdir()
        except BaseException:
            with suppress(FractionalGPUError):
                lease.release()
            raise
        return Tenant(command, lease, folder)

    def _make_room(self, lease: KernelLease, wanted: int, device_id: str, until_s: float) -> None:
        """Suspend the user's idle kernels until `wanted` leases fit. Raises NoSpareRoomError.

        The broker measures the devices' memory before each check. If `device_id` is given, the first check is made without measuring:
        programs started earlier in the same step are still waiting on that device, and the broker already knows about their leases.
        """
        limit_s = min(until_s, time.monotonic() + self._patience_s)
        is_fresh = not device_id
        while True:
            status, is_fresh = self.client.status(fresh=is_fresh), True
            why = no_spare_room(status, self.pool, lease.reserve_mib, wanted, device_id)
            if not why:
                return
            leaving = leases_to_suspend(status, lease.lease_id, wanted, device_id, self._asked)
            for one in leaving:
                self._asked.add(one.lease_id)
                self.say(f"{one.spec.label or one.lease_id} is idle: suspending it to make room")
                with suppress(ConflictError):  # the kernel may have started a cell
                    self.client.because_of("`jupyter gpu measure`").suspend(one.lease_id)
            if not leaving:
                if time.monotonic() >= limit_s:
                    raise NoSpareRoomError(why)
                time.sleep(0.1)


def _spare_mib(device: DeviceStatus, without: Sequence[LeaseStatus] = ()) -> int:
    reserved_mib = device.reserved_mib - sum(one.lease.reserved_mib for one in without)
    return device.leasable_mib - max(reserved_mib, device.used_mib - sum(one.lease.used_mib for one in without))


def _devices(status: HostStatus, pool: str, device_id: str) -> list[DeviceStatus]:
    there = [one for one in status.devices if one.pool == pool and device_id in ("", one.device_id)]
    return [one for one in there if not one.lost and not one.draining]


def leases_to_suspend(
    status: HostStatus, lease_id: str, wanted: int, device_id: str = "", but: Collection[str] = ()
) -> Sequence[LeaseStatus]:
    """Return the smallest set of this owner's idle kernel leases to suspend so that `wanted` leases fit on one device.

    Leases in `but` are not considered. The result is empty if suspending leases would not be enough, or if another lease is waiting.
    """
    mine = next(one for one in status.leases if one.lease_id == lease_id)
    own = [
        one
        for one in status.leases
        if one.spec.owner == mine.spec.owner and one.kind == KERNEL and one.lease_id not in but
    ]
    idle = [
        one
        for one in own
        if one.state == "resident" and not (one.busy or one.working or one.pinned_ms or one.lease.unsuspendable_reason)
    ]
    idle.sort(key=lambda one: -one.lease.reserved_mib)
    found = []
    for device in _devices(status, mine.spec.pool, device_id):
        here = [one for one in idle if device.device_id in one.lease.device_ids]
        ways = (here[:number] for number in range(len(here) + 1))
        found += [way for way in ways if _spare_mib(device, way) >= mine.spec.reserve_mib * wanted]
    waits = any(one.spec.pool == mine.spec.pool and one.position is not None for one in status.leases)
    return [] if waits else min(found, key=len, default=[])


def no_spare_room(status: HostStatus, pool: str, reserve_mib: int, wanted: int, device_id: str = "") -> str:
    if waiting := next((one for one in status.leases if one.spec.pool == pool and one.position is not None), None):
        return f"{waiting.spec.label or waiting.lease_id} is waiting for a GPU of pool {pool}"
    spare_mib = max((_spare_mib(one) for one in _devices(status, pool, device_id)), default=0)
    if spare_mib >= reserve_mib * wanted:
        return ""
    return (
        f"no device of pool {pool} has the {reserve_mib * wanted} MiB free that {wanted} more of these shares need; at most "
        f"{max(0, spare_mib)} MiB are free"
    )


def disturbance(status: HostStatus, tenants: Iterable[Tenant], device_id: str, pool: str) -> str:
    ours = {tenant.lease.lease_id for tenant in tenants}
    for lease in status.leases:
        if lease.lease_id in ours:
            if lease.state != "resident":
                return f"a program in this step lost the device (its lease was {lease.state})"
        elif lease.spec.pool == pool and lease.position is not None:
            return f"{lease.spec.label or lease.lease_id} is waiting for a GPU"
    if not any(one.device_id == device_id and not one.lost for one in status.devices):
        return "the device was lost"
    return ""


def others_work(
    status: HostStatus,
    tenants: Collection[Tenant],
    device_id: str,
    used_milli: int | None,
    busy_neighbours: int = 0,
    *,
    bystander: str = "",
) -> str:
    """Return a sentence that says who else was working on the device, or "" if no one was.

    `used_milli` is how much of the device others used, in thousandths, or None if the device does not report this. If it is None, any lease
    that is running a cell counts as working. `busy_neighbours` is the number of working leases of all users, including all tenants except
    one. `bystander` is the lease of the kernel whose cell runs the measurement. That cell runs the whole time, but does not use the device.
    """
    if used_milli is not None and used_milli < OTHERS_MILLI:
        return ""
    ours = {tenant.lease.lease_id for tenant in tenants}
    here = [
        one
        for one in status.leases
        if one.lease_id not in ours
        and device_id in (one.lease.device_id, *one.lease.device_ids)
        and (one.busy or one.working)
    ]
    if named := [one for one in here if one.lease_id != bystander]:
        return f"{named[0].spec.label or named[0].lease_id} worked on the device"
    # If the device does not report its use, only the cells of other users' kernels remain, besides the tenants and the bystander.
    if used_milli is None and busy_neighbours - (len(tenants) - 1) - len(here) <= 0:
        return ""
    return "another user's kernel, or a process without a lease, worked on the device"


def others_mib(status: HostStatus, tenants: Collection[Tenant], device_id: str) -> int:
    ours = {tenant.lease.lease_id for tenant in tenants}
    device = next(one for one in status.devices if one.device_id == device_id)
    return (
        device.reserved_mib
        + device.stranger_mib
        - sum(one.lease.reserved_mib for one in status.leases if one.lease_id in ours)
    )


ENOUGH_UNITS: Final = 12  # number of reports by all measured tenants together
LEAST_UNITS: Final = 4  # number of reports by each measured tenant
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 10.0  # after the tenants worked together for this long, a step needs only one unit per tenant
_LOOK_S: Final = 0.05
_STATUS_S: Final = 0.5
_LEAST_LAST_MS: Final = 1000
_CHANGE_PARTS: Final = 100  # the memory of others may change by this part of the device, because desktops redraw


class DisturbedError(CommandError):
    """Another program used the device or waited for it, so this step's figures are unusable."""


class TooSlowError(CommandError):
    """The step timed out before a unit of work could be measured."""


class SilentError(CommandError):
    """The program succeeded without reporting any units of work. Each run must therefore count as one unit."""


@dataclass(slots=True)
class Step:
    client: BrokerClient
    pool: str
    tenants: Sequence[Tenant]
    measured: int
    limit_s: float  # on the clock of `time.monotonic`
    long_s: float = LONGEST_S
    bystander: str = ""  # the lease of the kernel whose cell runs the measurement
    _looks: list[tuple[int, DeviceStatus]] = field(default_factory=list)
    _memory_mib: int = 0
    _others_mib: int | None = None
    _using_ns: dict[str, int] = field(default_factory=dict)  # when each lease was first seen to use the device
    _looked_s: float = 0.0
    _is_company_unknown: bool = False

    def run(self) -> Sample:
        if why := self._look(fresh=False):  # the places were found with a fresh sample
            raise DisturbedError(why)
        for tenant in self.tenants:
            tenant.go()
        while not (is_over := self._is_over()) and not self._is_enough() and time.monotonic() < self.limit_s:
            if time.monotonic() - self._looked_s >= _STATUS_S:
                self._check_bystanders()
            time.sleep(_LOOK_S)
        if not is_over:
            self._check_bystanders()
        return self._sample(is_over=self._is_over())

    def _is_over(self) -> bool:
        return any(self._has_ended(tenant) for tenant in self.tenants)

    def _has_ended(self, tenant: Tenant) -> bool:
        if tenant.running is None or not tenant.running.has_ended():
            return False
        if tenant.running.end(0):
            raise tenant.failure()
        return True

    def _check_bystanders(self) -> None:
        """Raise DisturbedError if a program that is not a tenant used the device.

        If a tenant has just ended, the status is out of date, so this does nothing.
        """
        if (why := self._look()) and not self._is_over():
            raise DisturbedError(why)

    def _ticks(self) -> list[list[Tick]]:
        return [read_ticks(tenant.ticks) for tenant in self.tenants[: self.measured]]

    def _span(self, ticks: Sequence[Sequence[Tick]]) -> tuple[int, int] | None:
        others = [self._using_ns.get(one.lease.lease_id) for one in self.tenants[self.measured :]]
        begun = [one for one in others if one is not None]
        if not all(ticks) or len(begun) < len(others):
            return None
        since_ns, until_ns = overlap(ticks)
        return max([since_ns, *begun]), until_ns

    def _is_enough(self) -> bool:
        ticks = self._ticks()
        span = self._span(ticks)
        if span is None:
            return False
        seconds = (span[1] - span[0]) / 1e9
        least = 1 if seconds >= self.long_s else max(LEAST_UNITS, -(-ENOUGH_UNITS // self.measured))
        inside = (sum(span[0] <= one.at_ns <= span[1] for one in each) for each in ticks)
        return seconds >= SHORTEST_S and min(inside) > least

    def _look(self, *, fresh: bool = True) -> str:
        status = self.client.status(fresh=fresh)
        seen_ns, device_id = time.monotonic_ns(), self.tenants[0].device_id
        if why := disturbance(status, self.tenants, device_id, self.pool) or self._others_work(status, device_id):
            return why
        mib = others_mib(status, self.tenants, device_id)
        device = next(one for one in status.devices if one.device_id == device_id)
        if self._others_mib is not None and abs(mib - self._others_mib) > device.memory_mib // _CHANGE_PARTS:
            return "memory use by others on the device changed"
        self._others_mib = mib
        self._looks.append((seen_ns, device))
        measured = {one.lease.lease_id for one in self.tenants[: self.measured]}
        for lease in status.leases:
            if lease.lease_id in measured:
                self._memory_mib = max(self._memory_mib, lease.lease.used_mib)
            if lease.lease.used_mib:
                self._using_ns.setdefault(lease.lease_id, seen_ns)
        return ""

    def _others_work(self, status: HostStatus, device_id: str) -> str:
        now_s = time.monotonic()
        last_ms = min(MAX_LAST_MS, max(_LEAST_LAST_MS, round((now_s - self._looked_s) * 1000)))
        self._looked_s = now_s
        lease_id, *beside = (one.lease.lease_id for one in self.tenants)
        used_milli = self.client.others(lease_id, last_ms, beside).used_milli
        busy = 0
        if used_milli is None:  # the device does not count use, so look at the cells of the leases
            busy = sum(one.busy for one in self.client.lease(lease_id).neighbours)
            self._is_company_unknown |= others_mib(status, self.tenants, device_id) > 0
        return others_work(status, self.tenants, device_id, used_milli, busy, bystander=self.bystander)

    def _sample(self, *, is_over: bool) -> Sample:
        ticks = self._ticks()
        if is_over and not all(ticks):
            raise SilentError("the program ended without reporting a unit of work")
        span = self._span(ticks)
        paces = [pace(each, *span) for each in ticks] if span is not None else []
        known = [one for one in paces if one is not None]
        if len(known) < self.measured:
            if self.measured < len(self.tenants) and span is None and all(ticks):
                raise TooSlowError("a neighbour did not use the device during the step")
            what = "ended" if is_over else "reached the end of the step"
            raise TooSlowError(f"a program {what} before it had completed two units of work next to the others")
        cost = self.tenants[0].cost()
        busy = [one.busy_percent for at_ns, one in self._looks if span and at_ns >= span[0]]
        percents = [one for one in busy if one is not None]
        return Sample(
            unit_s=self.measured / sum(1 / one.unit_s for one in known),
            latencies_s=[time_s for one in known for time_s in one.latencies_s],
            measured=self.measured,
            memory_mib=self._memory_mib or None,
            busy_percent=sum(percents) / len(percents) if percents else None,
            unit_mj=self._unit_mj(ticks, span[0] if span else 0),
            hour_milli=cost.now_milli,
            currency=cost.currency,
            is_company_unknown=self._is_company_unknown,
        )

    def _unit_mj(self, ticks: Sequence[Sequence[Tick]], since_ns: int) -> float | None:
        inside = [(at_ns, one.energy_mj) for at_ns, one in self._looks if at_ns >= since_ns]
        if len(inside) < 2:
            return None
        (from_ns, before_mj), (to_ns, after_mj) = inside[0], inside[-1]
        units = sum(units_between(each, from_ns, to_ns) for each in ticks)
        if before_mj is None or after_mj is None or not units:
            return None
        return (after_mj - before_mj) / units
