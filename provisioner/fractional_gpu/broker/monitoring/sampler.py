"""Periodically samples device use and host memory, and checks for unresponsive kernels.

A sample is read in a thread. It is evaluated on the loop only if no lease has changed state in the meantime. Otherwise, memory would be
charged to leases that have left their devices or have only just arrived.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms, within
from fractional_gpu.broker.kernels.connection import OPEN_LINE_S
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import members_of
from fractional_gpu.broker.monitoring.host_memory import HostMemoryPressure
from fractional_gpu.broker.monitoring.utilisation import Reading, UtilisationMeter
from fractional_gpu.broker.supervision.enforcement import Owner
from fractional_gpu.core.events import (
    DeviceLost,
    DeviceSeen,
    HostMemorySeen,
    HostPressureSeen,
    LeasesMeasured,
    Measurement,
)
from fractional_gpu.core.model import HOLDING, DeviceSpec, LeaseState, LeaseView
from fractional_gpu.gpu.interface import DeviceSensors, DeviceUse, GPUError, ProcessKind
from fractional_gpu.host.own_group import own_path
from fractional_gpu.host.process import ProcessIdentity, Snapshot, read_stat
from fractional_gpu.protocol.limits import PULSE_S

log = logging.getLogger(__name__)

_BUSY_INTERVAL_S = 2.0
_QUIET_INTERVAL_S = 10.0
_STEP_S = 0.5
_REFRESH_PAUSE_S = 0.25  # between two samples that readers request
_ATTEMPTS = 3  # per sample, if state changes make readings stale
_MOMENT_S = 1.0  # a suspended kernel that is busy with any message for longer gets a ticket
_LONG_MOMENT_S = 10.0  # the same without a context, if the extension is connected: it usually requests the GPU
_SILENCE_S = 2.5 * PULSE_S  # an extension that has been silent for longer is not running Python
_LOOK_S = 5.0  # between two checks of the gates; any longer time (a slow driver) does not count as their silence
_HOST_STEP_MIB = 256  # smaller changes of the host budget are not worth an event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    uses: dict[str, DeviceUse | None]  # by device; None if it is lost
    lost: dict[str, str]  # by device: why it is lost
    snapshot: Snapshot | None
    pressed: set[str]  # leases under memory pressure
    sensors: dict[str, DeviceSensors]
    utilisation: Reading


class Sampler:
    """Samples one broker's devices and kernels.

    `host_budget(saved_mib)` returns the MiB of host memory that all saved state may use.
    """

    def __init__(self, broker: Broker, devices: dict[str, DeviceSpec], host_budget: Callable[[int], int]) -> None:
        self._broker = broker
        self._devices = devices
        self._host_budget = host_budget
        self._strangers: dict[str, int | None] = {}
        self._pressure = HostMemoryPressure()
        self._meter = UtilisationMeter(broker)
        self._pressed: set[str] = set()
        self._budget_mib: int | None = None
        self._looked_s = time.monotonic()  # when the gates were last checked
        self._sampling = asyncio.Lock()
        self._begun_s = -math.inf  # when the last sample began

    async def run(self) -> None:
        sampled_s = -math.inf
        while True:
            anything_changed = self._broker.anything_changed
            interval_s = _BUSY_INTERVAL_S if self._broker.kernels else _QUIET_INTERVAL_S
            if time.monotonic() - sampled_s >= interval_s:
                async with self._sampling:
                    await self._sample_if_possible()
                sampled_s = time.monotonic()
            self.check_gates()
            self.request_for_silent()
            self.check_stopped()
            await self._pause(anything_changed)

    async def _pause(self, anything_changed: asyncio.Event) -> None:
        """Wait until the next check. The wait is short while kernels are active, because one of them may need a ticket soon."""
        cell_runs = any(kernel.cell.executing_since_s is not None for kernel in self._broker.kernels.values())
        if not cell_runs and not await within(_BUSY_INTERVAL_S, anything_changed):
            return
        await asyncio.sleep(_STEP_S)

    async def refresh(self) -> None:
        """Take a new sample for a caller that needs current figures.

        Concurrent callers share a sample, and there is a pause between samples, so that callers cannot keep the broker busy.
        """
        asked_s = time.monotonic()
        async with self._sampling:
            if self._begun_s < asked_s:
                await asyncio.sleep(max(0.0, self._begun_s + _REFRESH_PAUSE_S - time.monotonic()))
                await self._sample_if_possible()

    async def _sample_if_possible(self) -> None:
        """Sample once. If file descriptors or memory run short, or /proc is unreadable, just log the error."""
        self._begun_s = time.monotonic()
        try:
            await self.sample()
        except (OSError, ValueError) as error:
            log.error("cannot sample the devices and the machine: %s", error)  # noqa: TRY400 - the sentence says it

    async def sample(self) -> None:
        """Read the devices, and report changes to the arbiter. A reading during which a lease changed state is repeated, but at most twice.

        Without that limit, a user who keeps changing a lease could prevent the broker from ever using a reading. The third reading is used,
        except for leases that changed during it. Memory freed by these leases counts as still in use until the next sample, so that no
        lease is admitted too early.
        """
        self._report_host_budget()
        for left in reversed(range(_ATTEMPTS)):
            before = self._broker.changes
            seen = {kernel: kernel.changes for kernel in self._broker.kernels.values()}
            known = {identity.pid for _, identity in self._live()}
            sample = await asyncio.to_thread(self._read, known, self._saved(), self._meter.begin())
            if self._broker.changes == before or not left:
                self._evaluate(sample, {kernel for kernel, changes in seen.items() if kernel.changes == changes})
                return

    def _live(self) -> list[tuple[Kernel, ProcessIdentity]]:
        return [(kernel, kernel.identity) for kernel in self._broker.kernels.values() if kernel.identity is not None]

    def _saved(self) -> dict[str, int]:
        views = self._broker.views()
        return {
            kernel.lease_id: kernel.identity.pid
            for kernel, view in views
            if view.state is LeaseState.SUSPENDED and kernel.identity is not None
        }

    def _read(self, known: set[int], saved: dict[str, int], utilisation: Reading) -> _Sample:
        """Read every device. Also scan /proc if a device is used by any process other than the kernels themselves. Blocks."""
        uses: dict[str, DeviceUse | None] = {}
        lost: dict[str, str] = {}
        for device_id in self._devices:
            try:
                uses[device_id] = self._broker.monitor.use(device_id)
            except GPUError as error:
                lost[device_id] = str(error)
                uses[device_id] = None
        self._meter.read(self._broker.monitor, utilisation)
        others = any(process.pid not in known for use in uses.values() if use for process in use.processes)
        return _Sample(
            uses=uses,
            lost=lost,
            snapshot=self._broker.scans.take() if others else None,
            pressed=self._pressure(saved, time.monotonic()),
            sensors={device_id: self._sensors(device_id) for device_id, use in uses.items() if use is not None},
            utilisation=utilisation,
        )

    def _sensors(self, device_id: str) -> DeviceSensors:
        try:
            return self._broker.monitor.sensors(device_id)
        except GPUError as error:  # the memory reading detects a lost device
            log.debug("cannot read the sensors of device %s: %s", device_id, error)
            return DeviceSensors()

    def _evaluate(self, sample: _Sample, unchanged: set[Kernel]) -> None:
        broker = self._broker
        owners = self._owners(sample)
        broker.enforcement.see(sample.uses, owners, sample.snapshot)
        used_mib = {device_id: use.used_mib for device_id, use in sample.uses.items() if use is not None}
        broker.used_mib.update(used_mib)
        broker.sensors = dict(sample.sensors)
        broker.oom_kills.look({identity.pid for _, identity in self._live()}, time.monotonic())
        # MiB by lease and device. The empty lease id stands for processes without a lease.
        on_device: dict[tuple[str, str], int] = {}
        for device_id, use in sample.uses.items():
            if use is None:
                self._report_lost(device_id, sample.lost[device_id])
                continue
            for process in use.processes:
                owner = owners.get(process.pid)
                key = ("" if owner is None else owner[0], device_id)
                on_device[key] = on_device.get(key, 0) + process.used_mib
        used: dict[str, dict[str, int]] = {}
        for (lease_id, device_id), mib in on_device.items():
            used.setdefault(lease_id, {})[device_id] = mib
        utilisation = self._meter.evaluate(sample.utilisation, sample.uses, owners)
        broker.metering.read_energy(sample.sensors, utilisation)
        self._report_leases([one for one in broker.kernels.values() if one in unchanged], used, utilisation)
        broker.habits.sampled(utilisation)
        self._note_processes(sample.uses, owners)
        # This follows the report of the leases' own use, because their reservations now cover its growth, which is therefore no stranger's.
        for device_id, use in sample.uses.items():
            if use is not None:
                charged = sum(process.used_mib for process in use.processes)
                charged += broker.survivors.unfreed_mib(device_id, use)
                self._report_stranger(device_id, charged - self._covered(device_id, on_device))
        broker.survivors.was_sampled()
        self._report_pressure(sample.pressed)

    def _owners(self, sample: _Sample) -> dict[int, Owner]:
        snapshot = sample.snapshot
        owners: dict[int, Owner] = {}
        roots = frozenset(self._broker.roots())
        for kernel, identity in self._live():
            if snapshot is not None:
                for member in members_of(kernel, identity, snapshot, roots):
                    owners[member.pid] = kernel.lease_id, member
            owners[identity.pid] = kernel.lease_id, identity
        if snapshot is not None:
            self._add_claimed(owners, snapshot, sample.uses)
        return owners

    def _add_claimed(self, owners: dict[int, Owner], snapshot: Snapshot, uses: Mapping[str, DeviceUse | None]) -> None:
        """Charge memory used by processes without a lease to their user's claims on the same device, up to the claimed amount."""
        claims = [(kernel, view) for kernel, view in self._broker.views() if kernel.launch.claim]
        left = {(kernel, device_id): view.reserved_mib for kernel, view in claims for device_id in view.device_ids}
        for must_fit, (kernel, view) in product((True, False), claims):
            users = {one.pid: one for one in snapshot.started(kernel.uid, 0)}
            there = [(at, one) for at in view.device_ids if (use := uses.get(at)) for one in use.processes]
            for at, process in there:
                known = process.pid in owners or process.pid in self._broker.enforcement.exempt_pids
                if known or process.pid not in users or process.kind is ProcessKind.GRAPHICS:
                    continue
                # The containers of several users may share a uid.
                foreign = view.spec.seat and kernel.launch.group != own_path(process.pid, kernel.uid)
                if not foreign and left[kernel, at] >= (process.used_mib if must_fit else 1):
                    left[kernel, at] -= process.used_mib
                    owners[process.pid] = kernel.lease_id, users[process.pid]

    def _note_processes(self, uses: Mapping[str, DeviceUse | None], owners: Mapping[int, Owner]) -> None:
        used_mib: dict[str, dict[int, int]] = {}
        for use in uses.values():
            for process in use.processes if use is not None else ():
                if process.pid in owners:
                    mine = used_mib.setdefault(owners[process.pid][0], {})
                    mine[process.pid] = mine.get(process.pid, 0) + process.used_mib
        for kernel in list(self._broker.kernels.values()):
            mine = used_mib.get(kernel.lease_id, {})
            users = frozenset(one for one in kernel.members if one.pid in mine)
            if not users <= kernel.measurement.users_on_disk:
                kernel.measurement.users_on_disk = users
                self._broker.records.save(kernel)
            if kernel.ending.survivors:
                self._broker.survivors.refresh(kernel, mine)

    def _covered(self, device_id: str, on_device: dict[tuple[str, str], int]) -> int:
        """Return how many MiB leases use on the device within their reservations. Anything beyond that counts as use without a lease."""
        covered = 0
        for (lease_id, device), mib in on_device.items():
            view = self._broker.arbiter.lease(lease_id) if device == device_id and lease_id else None
            if view is not None and view.state in HOLDING and device_id in view.device_ids:
                covered += min(mib, view.reserved_mib)
        return covered

    def _hold_unused(self, kernel: Kernel, view: LeaseView, *, uses: bool) -> None:
        """Treat a cell as idle if it has not used the GPU for the pool's `max_unused_hold`, until it uses the GPU again.

        If another kernel has been given its memory in the meantime, the cell's use counts as use without a lease until its ticket is
        served.
        """
        cell, pool = kernel.cell, self._broker.arbiter.pools().get(view.spec.pool)
        if kernel.iopub is None or kernel.link is None or pool is None:
            return
        counted, cell.unused = cell.unused, cell.unused & kernel.iopub.handled
        if uses and counted:
            cell.unused = frozenset()
            self._broker.sync_busy_state(kernel)
            self._broker.request_on_behalf(kernel)
        elif not uses and pool.max_unused_hold_ms is not None and view.state is LeaseState.RESIDENT:
            since_s, most_s = cell.executing_since_s, pool.max_unused_hold_ms / 1000
            if since_s is not None and time.monotonic() - max(since_s, cell.granted_s) >= most_s:
                cell.unused = kernel.iopub.handled
                self._broker.sync_busy_state(kernel)

    def _report_leases(
        self, kernels: list[Kernel], used: dict[str, dict[str, int]], utilisation: dict[str, int]
    ) -> None:
        """Report all leases' changes in one event, so that the arbiter serves the queue once per sample."""
        measurements, measured = [], []
        for kernel in kernels:
            known, lease_id = kernel.measurement, kernel.lease_id
            mib_by_device, util_milli = used.get(lease_id, {}), utilisation.get(lease_id)
            known.seen_on = frozenset(mib_by_device)
            if kernel.launch.claim or (mib_by_device and kernel.launch.command and not known.has_used):
                known.has_used = True
                self._broker.sync_busy_state(kernel)
            view = self._broker.arbiter.lease(lease_id)
            if view is None or view.state not in (LeaseState.RESIDENT, LeaseState.NO_CONTEXT):
                known.is_fresh = known.grew = False
                continue
            used_mib = sum(mib_by_device.values())
            measured.append((kernel, view, used_mib))
            changed = not (known.is_fresh and view.is_measured) or view.used_mib != used_mib
            known.is_fresh = True
            # If reservations follow use, the arbiter expects more growth until a measurement shows none.
            if changed or known.grew or util_milli is not None:
                known.grew = used_mib > view.used_mib and self._broker.reserves_by_use(view.spec.pool)
                measurements.append(Measurement(lease_id=lease_id, used_mib=used_mib, util_milli=util_milli))
        if measurements:
            self._broker.dispatch(LeasesMeasured(at_ms=now_ms(), measurements=tuple(measurements)))
        for kernel, view, used_mib in measured:
            self._hold_unused(kernel, view, uses=used_mib > 0)

    def _report_pressure(self, pressed: set[str]) -> None:
        for lease_id in sorted(pressed ^ self._pressed):
            now = lease_id in pressed
            self._broker.dispatch(HostPressureSeen(at_ms=now_ms(), lease_id=lease_id, pressed=now))
        self._pressed = pressed

    def _report_lost(self, device_id: str, why: str) -> None:
        if self._strangers.get(device_id, 0) is None:
            return
        self._strangers[device_id] = None
        log.error("device %s is lost: %s", device_id, why)
        self._broker.dispatch(DeviceLost(at_ms=now_ms(), device_id=device_id))

    def _report_stranger(self, device_id: str, stranger_mib: int) -> None:
        before = self._strangers.get(device_id, 0)
        # The arbiter changes its figure when a claim ends, or when a lease that used the device gets a reservation.
        known = {one.device_id: one.stranger_mib for one in self._broker.arbiter.devices()}.get(device_id)
        if device_id in self._strangers and before == stranger_mib == known:
            return
        self._strangers[device_id] = stranger_mib
        if before is None:
            log.warning("device %s is back", device_id)
            self._broker.operations.device_returned()
        self._broker.dispatch(DeviceSeen(at_ms=now_ms(), device=self._devices[device_id], stranger_mib=stranger_mib))

    def _report_host_budget(self) -> None:
        budget_mib = max(0, self._host_budget(self._broker.arbiter.host_saved_mib))
        if self._budget_mib is None or abs(budget_mib - self._budget_mib) >= _HOST_STEP_MIB:
            self._budget_mib = budget_mib
            self._broker.dispatch(HostMemorySeen(at_ms=now_ms(), budget_mib=budget_mib))

    def check_gates(self) -> None:
        now_s = time.monotonic()
        unseen_s = now_s - self._looked_s - _LOOK_S
        self._looked_s = now_s
        for kernel in self._broker.kernels.values():
            if kernel.link is not None:
                if unseen_s > 0:
                    kernel.link.forgive(unseen_s, now_s)
                view = self._broker.arbiter.lease(kernel.lease_id)
                is_open = view is not None and view.state is LeaseState.RESIDENT
                kernel.link.look(now_s, OPEN_LINE_S if is_open else PULSE_S)

    def check_stopped(self) -> None:
        """While kernels are waiting for a device, look for stopped kernels, which cannot make room until they continue."""
        waited_for = any(
            kernel.requests.waiters or kernel.cell.ticket_by_broker for kernel in self._broker.kernels.values()
        )
        for kernel, view in self._broker.views():
            if kernel.stopped or (waited_for and view.state is LeaseState.RESIDENT):
                self._broker.set_stopped(kernel, stopped=_is_held_up(kernel))

    def request_for_silent(self) -> None:
        """File a ticket for each kernel that needs the GPU but cannot request it.

        Without a ticket, the kernel would stay blocked forever, or keep running without a reservation.
        """
        now_s = time.monotonic()
        for kernel in list(self._broker.kernels.values()):
            link, since_s = kernel.link, kernel.cell.executing_since_s
            silent = link is not None and now_s - link.last_pulse_s > _SILENCE_S
            if kernel.requests.waiters or (since_s is None and not silent):
                continue  # the usual case
            view = self._broker.arbiter.lease(kernel.lease_id)
            if view is None:
                continue
            if silent and link is not None and view.state is LeaseState.SUSPENDED and _is_held_up(kernel):
                link.forgive(now_s - link.last_pulse_s, now_s)
                silent = False
            busy_s = 0.0 if since_s is None else now_s - since_s
            if self._needs_ticket(kernel, view, busy_s, silent=silent):
                self._broker.request_on_behalf(kernel)

    @staticmethod
    def _needs_ticket(kernel: Kernel, view: LeaseView, busy_s: float, *, silent: bool) -> bool:
        link = kernel.link
        if view.state is LeaseState.NO_CONTEXT:
            # The extension should have requested the GPU, but failed to load or cannot reach the broker.
            if link is None or link.mute:
                return busy_s > _MOMENT_S
            return busy_s > _LONG_MOMENT_S and not link.exempt
        if view.state is not LeaseState.SUSPENDED:
            return False
        if link is None:
            return busy_s > _MOMENT_S
        return silent or (busy_s > _MOMENT_S and not link.exempt)


def _is_held_up(kernel: Kernel) -> bool:
    """Return whether the process is stopped or being debugged. Such a process is not hung, and needs no GPU until it continues."""
    try:
        return kernel.identity is not None and read_stat(kernel.identity.pid).stopped_or_traced
    except OSError:  # the process ended, or is unreadable
        return False
