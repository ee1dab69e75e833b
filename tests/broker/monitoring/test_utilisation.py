"""A lease's utilisation is measured while it alone runs a cell, or if the devices report it per process."""

import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.monitoring.utilisation import UtilisationMeter
from fractional_gpu.core.model import LeaseState, LeaseView
from fractional_gpu.gpu.interface import (
    DeviceUse,
    DeviceUtilisation,
    GPUError,
    GPUErrorCode,
    Monitor,
    ProcessKind,
    ProcessUse,
)
from fractional_gpu.host.clock import since_boot_us
from fractional_gpu.host.process import ProcessIdentity
from tests.broker.driver import DEVICE, OTHERS
from tests.broker.monitoring.test_sampler import view_of

pytestmark = pytest.mark.promise("contention")

SECOND = 1_000_000
LONG_AGO_S = 60.0
A, B, CHILD, STRANGER = 11, 12, 13, 14


class World:
    """Replaces the broker and its devices: leases with a process each, and what the devices report about them."""

    def __init__(self) -> None:
        self.leases: list[tuple[Kernel, LeaseView]] = []
        self.processes: dict[str, list[ProcessUse]] = {}
        self.owners: dict[int, tuple[str, ProcessIdentity]] = {}
        self.by_pid: dict[str, Mapping[int, int] | None] = {}
        self.device_milli: int | None = None
        self.fails = False
        self.asked: list[tuple[str, int]] = []
        self.meter = UtilisationMeter(cast("Broker", self))

    def views(self) -> list[tuple[Kernel, LeaseView]]:
        return self.leases

    def lease(self, name: str, pid: int, *devices: str, busy_s: float | None = LONG_AGO_S) -> Kernel:
        """A lease on these devices; `busy_s`: how long its cell has been running."""
        on = devices or (DEVICE,)
        kernel = Kernel(lease_id=name, uid=0, token_sha256="")
        kernel.cell.executing_since_s = None if busy_s is None else time.monotonic() - busy_s
        view = view_of(LeaseState.RESIDENT)
        view = replace(
            view,
            spec=replace(view.spec, lease_id=name, devices=len(on)),
            device_id=on[0],
            device_ids=on,
            busy=busy_s is not None,
            since_ms=now_ms() - 3_600_000,
        )
        self.leases.append((kernel, view))
        self.runs(name, pid, *on)
        return kernel

    def runs(self, name: str, pid: int, *devices: str, kind: ProcessKind = ProcessKind.COMPUTE) -> None:
        """A process of the lease (with an empty name: of no lease) runs on these devices."""
        if name:
            self.owners[pid] = name, cast("ProcessIdentity", SimpleNamespace(pid=pid))
        for device_id in devices or (DEVICE,):
            self.processes.setdefault(device_id, []).append(ProcessUse(pid=pid, used_mib=1, kind=kind))

    def change(self, name: str, **changes: object) -> None:
        self.leases = [
            (kernel, replace(view, **changes) if kernel.lease_id == name else view)  # type: ignore[arg-type]
            for kernel, view in self.leases
        ]

    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation | None:
        self.asked.append((device_id, since_us))
        if self.fails:
            raise GPUError(GPUErrorCode.UNKNOWN, "it cannot be read")
        by_pid = self.by_pid.get(device_id)
        if by_pid is None and self.device_milli is None:
            return None
        return DeviceUtilisation(
            since_us=since_us,
            until_us=since_boot_us(),
            settle_us=SECOND,
            by_pid=by_pid,
            device_milli=self.device_milli,
        )

    def measured(self) -> dict[str, int]:
        reading = self.meter.begin()
        self.meter.read(cast("Monitor", self), reading)
        uses = {
            device_id: DeviceUse(device_id=device_id, memory_mib=1000, used_mib=1, processes=tuple(processes))
            for device_id, processes in self.processes.items()
        }
        return self.meter.evaluate(reading, uses, self.owners)


@pytest.fixture
def world() -> World:
    return World()


def test_a_lease_used_what_its_processes_used(world: World) -> None:
    world.lease("a", A)
    world.lease("b", B)
    world.runs("a", CHILD)
    world.runs("", STRANGER)
    world.by_pid[DEVICE] = {A: 200, CHILD: 150, B: 400, STRANGER: 100}
    assert world.measured() == {"a": 350, "b": 400}


def test_a_process_that_the_device_does_not_list_has_no_figure(world: World) -> None:
    world.lease("a", A)
    world.processes[DEVICE] = []
    world.by_pid[DEVICE] = {999: 500}
    assert world.measured() == {}


# -- the period -------------------------------------------------------------------------------------------------------------


def test_a_kernel_that_runs_no_cell_has_no_figure_and_no_device_is_read_for_it(world: World) -> None:
    world.lease("a", A, busy_s=None)
    world.by_pid[DEVICE] = {A: 500}
    assert world.measured() == {}
    assert world.asked == []


@pytest.mark.parametrize(("busy_s", "figure"), [(0.5, {}), (1.9, {}), (2.1, {"a": 500})])
def test_a_cell_is_measured_from_the_time_on_that_figures_leave_out_what_was_before(
    world: World, busy_s: float, figure: dict[str, int]
) -> None:
    world.lease("a", A, busy_s=busy_s)
    world.by_pid[DEVICE] = {A: 500}
    assert world.measured() == figure
    for _, since_us in world.asked:
        assert since_us == pytest.approx(since_boot_us() - (busy_s - 1) * SECOND, abs=SECOND // 4)


def test_a_cell_that_waited_for_the_gpu_runs_since_its_grant(world: World) -> None:
    kernel = world.lease("a", A)
    world.by_pid[DEVICE] = {A: 500}
    kernel.cell.granted_s = time.monotonic() - 1.5
    assert world.measured() == {}
    kernel.cell.granted_s = time.monotonic() - 3
    assert world.measured() == {"a": 500}


@pytest.mark.parametrize(
    "state", [LeaseState.SUSPENDED, LeaseState.SUSPENDING, LeaseState.RESUMING, LeaseState.NO_CONTEXT]
)
def test_a_cell_that_is_not_on_a_device_has_no_figure(world: World, state: LeaseState) -> None:
    world.lease("a", A)
    world.by_pid[DEVICE] = {A: 500}
    world.change("a", state=state)
    assert world.measured() == {}


@pytest.mark.parametrize("then", [None, 0.0], ids=["it ended", "another one began"])
def test_a_period_in_which_a_cell_ended_has_no_figure(world: World, then: float | None) -> None:
    kernel = world.lease("a", A)
    world.lease("b", B)
    world.by_pid[DEVICE] = {A: 500, B: 300}
    told = world.utilisation

    def ends_meanwhile(device_id: str, since_us: int) -> DeviceUtilisation | None:
        kernel.cell.executing_since_s = None if then is None else time.monotonic()
        return told(device_id, since_us)

    world.utilisation = ends_meanwhile  # type: ignore[method-assign]
    assert world.measured() == {"b": 300}


# -- what the device does not tell ---------------------------------------------------------------------------------------------


def test_the_devices_own_figure_counts_for_the_only_busy_lease(world: World) -> None:
    world.lease("a", A)
    world.lease("b", B, busy_s=None)
    world.lease("c", 15, OTHERS[0])
    world.device_milli = 700
    assert world.measured() == {"a": 700, "c": 700}


@pytest.mark.parametrize(("kind", "figure"), [(ProcessKind.COMPUTE, {}), (ProcessKind.GRAPHICS, {"a": 700})])
def test_beside_a_stranger_that_computes_the_devices_own_figure_is_nobodys(
    world: World, kind: ProcessKind, figure: dict[str, int]
) -> None:
    world.lease("a", A)
    world.runs("", STRANGER, kind=kind)
    world.device_milli = 700
    assert world.measured() == figure


# -- several devices -----------------------------------------------------------------------------------------------------------


def test_on_several_devices_the_figure_is_their_mean(world: World) -> None:
    world.lease("a", A, DEVICE, OTHERS[0])
    world.by_pid = {DEVICE: {A: 900}, OTHERS[0]: {A: 300}}
    assert world.measured() == {"a": 600}
