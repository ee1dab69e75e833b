"""The broker sees which process uses which device, reports only changes, and asks for kernels that cannot ask themselves."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import ProcessInspector, ProcessScans
from fractional_gpu.broker.monitoring import sampler as watch_module
from fractional_gpu.broker.monitoring.sampler import Sampler
from fractional_gpu.broker.supervision.enforcement import Enforcement
from fractional_gpu.broker.supervision.survivors import OomKills, Survivors
from fractional_gpu.core.events import DeviceLost, DeviceSeen, Event, HostMemorySeen, LeasesMeasured, Measurement
from fractional_gpu.core.model import HOLDING, DeviceSpec, LeaseSpec, LeaseState, LeaseView, PoolSpec, ReserveBy
from fractional_gpu.gpu.interface import DeviceSensors, DeviceUse, GPUError, GPUErrorCode, ProcessState, ProcessUse
from fractional_gpu.host.process import ProcessIdentity, identify
from fractional_gpu.ledger.records import Launch
from tests.broker.driver import DEVICE, Driver

STRANGER = 1  # a process of no lease
LEASE = "lease"


class World:
    """Replaces the broker and its arbiter: one lease, whose kernel is this process."""

    def __init__(self, state: LeaseState = LeaseState.RESIDENT, *, reserve_mib: int = 500) -> None:
        self.monitor = Driver()
        self.scans = ProcessScans()
        self.arbiter = self
        self.host_saved_mib = 0
        self.changes = 0
        self.sensors: dict[str, DeviceSensors] = {}
        self.enforcement = Enforcement(cast("Broker", self))
        self.records = self
        self.survivors = Survivors(cast("Broker", self), cast("ProcessInspector", SimpleNamespace()))
        self.oom_kills = OomKills()
        self.metering = self
        self.habits = self
        self.used_mib: dict[str, int] = {}
        self.returned = 0
        self.events: list[Event] = []
        self.saved: list[frozenset[ProcessIdentity]] = []
        self.wanted: list[str] = []
        self.stopped: list[bool] = []
        self.busy: list[bool] = []
        self.stranger_mib = 0
        self.view = view_of(state, reserve_mib)
        self.kernel = Kernel(lease_id=LEASE, uid=0, token_sha256="", identity=identify(os.getpid()))
        self.kernels = {LEASE: self.kernel}
        self.pool = PoolSpec(name="default", devices=(DEVICE,))
        self.operations = self
        self.budget_mib = 4096
        device = DeviceSpec(device_id=DEVICE, name="G", memory_mib=1000)
        self.sampler = Sampler(cast("Broker", self), {DEVICE: device}, lambda _saved: self.budget_mib)

    def read_energy(self, sensors: dict[str, DeviceSensors], utilisation: dict[str, int]) -> None:
        """Nothing: no test here needs energy."""

    def sampled(self, utilisation: dict[str, int]) -> None:
        """Nothing: no test here needs habits."""

    def lease(self, lease_id: str) -> LeaseView | None:
        return self.view if lease_id in self.kernels or lease_id == LEASE else None

    def views(self) -> list[tuple[Kernel, LeaseView]]:
        return [(self.kernel, self.view)]

    def roots(self) -> list[Any]:
        return [] if self.kernel.identity is None else [self.kernel.identity]

    def sync_busy_state(self, kernel: Kernel) -> None:
        self.busy.append(kernel.busy)

    def devices(self) -> list[Any]:
        return [SimpleNamespace(device_id=DEVICE, stranger_mib=self.stranger_mib)]

    def pools(self) -> dict[str, PoolSpec]:
        return {"default": self.pool}

    def reserves_by_use(self, pool: str) -> bool:
        return self.pools()[pool].reserve_by is ReserveBy.USE

    def save(self, kernel: Kernel) -> None:
        self.saved.append(kernel.members)

    def device_returned(self) -> None:
        self.returned += 1

    def request_on_behalf(self, kernel: Kernel) -> None:
        self.wanted.append(kernel.lease_id)

    def set_stopped(self, kernel: Kernel, *, stopped: bool) -> None:
        if stopped != bool(kernel.stopped):
            kernel.stopped = "stopped" * stopped
            self.stopped.append(stopped)

    def dispatch(self, event: Event) -> None:
        self.events.append(event)
        self.stranger_mib = event.stranger_mib if isinstance(event, DeviceSeen) else self.stranger_mib
        for one in measurements([event]):
            self.view = replace(self.view, used_mib=one.used_mib, is_measured=True)

    async def told(self) -> list[Event]:
        """Return what one look reports."""
        self.events = []
        await self.sampler.sample()
        return self.events


def view_of(state: LeaseState, reserve_mib: int = 500) -> LeaseView:
    spec = LeaseSpec(lease_id=LEASE, pool="default", owner="me", fraction_milli=500, reserve_mib=reserve_mib)
    return LeaseView(
        reserved_mib=reserve_mib if state in HOLDING else 0,
        spec=spec, state=state, generation=1, device_id=DEVICE, device_ids=(DEVICE,), saved_mib=0, used_mib=0, busy=False, since_ms=0,
        last_active_ms=0, operation_id=None, reason="", sentence="",
    )  # fmt: skip


def measurements(events: list[Event]) -> list[Measurement]:
    return [one for event in events if isinstance(event, LeasesMeasured) for one in event.measurements]


def measured_mib(events: list[Event]) -> list[int]:
    return [one.used_mib for one in measurements(events)]


def strangers(events: list[Event]) -> list[int]:
    return [event.stranger_mib for event in events if isinstance(event, DeviceSeen)]


async def test_what_is_seen_is_told_once_until_it_changes() -> None:
    world = World()
    world.monitor.has_context(os.getpid(), ProcessState.RUNNING, 300)
    world.monitor.has_context(STRANGER, ProcessState.RUNNING, 100)
    first = await world.told()
    assert measured_mib(first) == [300]
    assert strangers(first) == [100]
    assert [event.budget_mib for event in first if isinstance(event, HostMemorySeen)] == [4096]
    assert world.used_mib == {DEVICE: 400}
    assert await world.told() == []
    world.monitor.mib[STRANGER] = 150
    assert strangers(await world.told()) == [150]


@pytest.mark.parametrize(("reserve_by", "again"), [(ReserveBy.USE, [300]), (ReserveBy.CAP, [])])
async def test_where_use_is_reserved_the_end_of_growth_is_told(reserve_by: ReserveBy, again: list[int]) -> None:
    world = World()
    world.pool = replace(world.pool, reserve_by=reserve_by)
    world.monitor.has_context(os.getpid(), ProcessState.RUNNING, 300)
    for expected in ([300], again, []):
        assert measured_mib(await world.told()) == expected


async def test_what_a_running_cell_uses_of_its_device_is_told_each_time() -> None:
    world = World()
    world.monitor.has_context(os.getpid(), ProcessState.RUNNING, 300)
    world.monitor.used_milli = {os.getpid(): 450}

    async def measured() -> list[tuple[int, int | None]]:
        world.sampler._meter._until_us.clear()  # as if the last period had been long ago
        return [(one.used_mib, one.util_milli) for one in measurements(await world.told())]

    assert await measured() == [(300, None)]
    world.view = replace(world.view, busy=True)
    world.kernel.cell.executing_since_s = time.monotonic() - 60
    assert await measured() == [(300, 450)]
    assert await measured() == [(300, 450)]
    world.kernel.cell.executing_since_s = None
    assert await measured() == []


async def test_readers_who_ask_together_share_a_sample_that_was_begun_after_they_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    use = world.monitor.use
    looks: list[str] = []

    def counted(device_id: str) -> DeviceUse:
        looks.append(device_id)
        return use(device_id)

    monkeypatch.setattr(world.monitor, "use", counted)
    world.monitor.has_context(os.getpid(), ProcessState.RUNNING, 300)
    await asyncio.gather(*(world.sampler.refresh() for _ in range(20)))
    assert measured_mib(world.events) == [300]
    assert len(looks) == 1
    world.monitor.mib[os.getpid()] = 350
    await world.sampler.refresh()
    assert world.view.used_mib == 350
    assert len(looks) == 2


async def test_memory_beyond_a_reservation_is_covered_by_no_other_lease() -> None:
    world = World(reserve_mib=500)
    world.monitor.has_context(os.getpid(), ProcessState.RUNNING, 700)
    assert strangers(await world.told()) == [200]


@pytest.mark.parametrize("code", [GPUErrorCode.DEVICE_LOST, GPUErrorCode.UNKNOWN])
async def test_a_device_that_cannot_be_read_is_lost_until_it_is_seen_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: GPUErrorCode
) -> None:
    def fail(_device_id: str) -> None:
        raise GPUError(code, "it fell off the bus")

    world = World()
    with monkeypatch.context() as patch:
        patch.setattr(world.monitor, "use", fail)
        assert [
            type(event) for event in await world.told() if not isinstance(event, HostMemorySeen | LeasesMeasured)
        ] == [DeviceLost]
        assert await world.told() == []
    assert [one.message for one in caplog.records] == [f"device {DEVICE} is lost: it fell off the bus"]
    assert strangers(await world.told()) == [0]
    assert caplog.records[-1].message == f"device {DEVICE} is back"
    assert world.returned == 1, "its worker is replaced"


async def test_a_look_that_a_change_overtook_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    real, looks = world.monitor.use, 0

    def overtaken(device_id: str) -> object:
        nonlocal looks
        looks += 1
        world.changes += looks == 1
        world.monitor.others_mib = looks
        return real(device_id)

    monkeypatch.setattr(world.monitor, "use", overtaken)
    await world.told()
    assert (looks, world.used_mib) == (2, {DEVICE: 2})


@pytest.mark.parametrize("its_own", [False, True], ids=["another's", "its own"])
async def test_endless_changes_hide_only_the_lease_that_changes(monkeypatch: pytest.MonkeyPatch, its_own: bool) -> None:
    world = World()
    world.monitor.has_context(os.getpid(), ProcessState.RUNNING, 300)
    world.monitor.has_context(STRANGER, ProcessState.RUNNING, 0)
    real = world.monitor.use

    def overtaken(device_id: str) -> object:
        world.changes += 1
        world.kernel.changes += its_own
        world.monitor.mib[STRANGER] += 10
        return real(device_id)

    monkeypatch.setattr(world.monitor, "use", overtaken)
    for looks in (3, 6):
        events = await world.told()
        assert strangers(events) == [10 * looks]
    assert world.changes == 6
    measured = measured_mib(events)
    assert (world.view.used_mib, measured) == (0 if its_own else 300, [])


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_stopped_kernel_is_reported_while_another_waits_and_when_it_continues(*, waited_for: bool) -> None:
    world = World()
    with subprocess.Popen([sys.executable, "-S", "-c", "open(0).read()"], stdin=subprocess.PIPE) as process:
        world.kernel.identity = identify(process.pid)
        world.kernel.requests.waiters = int(waited_for)
        world.sampler.check_stopped()
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        world.sampler.check_stopped()
        world.kernel.requests.waiters = 0
        process.send_signal(signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        world.sampler.check_stopped()
        process.kill()
    assert world.stopped == ([True, False] if waited_for else [])


@pytest.mark.promise("race-stuck")
@pytest.mark.parametrize(
    ("state", "linked", "silent_s", "busy_s", "exempt", "wanted"),
    [
        (LeaseState.SUSPENDED, False, 0, 0, False, False),  # idle
        (LeaseState.SUSPENDED, False, 0, 0.5, False, False),  # one moment of a completion
        (LeaseState.SUSPENDED, False, 0, 5, False, True),  # blocked in a CUDA call, so its extension cannot ask for it
        (LeaseState.SUSPENDED, True, 0, 0, False, False),
        (LeaseState.SUSPENDED, True, 0, 5, False, True),  # an inspection that touched a tensor
        (LeaseState.SUSPENDED, True, 0, 5, True, False),  # a cell that said that it needs no GPU
        (LeaseState.SUSPENDED, True, 60, 0, False, True),  # Python does not run: a thread blocks with the GIL held
        (LeaseState.SUSPENDED, True, 60, 0, True, True),
        (LeaseState.NO_CONTEXT, False, 0, 5, False, True),  # its extension never connected
        (LeaseState.NO_CONTEXT, True, 60, 5, False, False),
        (LeaseState.NO_CONTEXT, True, 0, 15, False, True),  # its extension cannot reach the broker to ask
        (LeaseState.NO_CONTEXT, True, 0, 15, True, False),
        (LeaseState.RESIDENT, False, 0, 5, False, False),
        (LeaseState.RESUMING, True, 60, 5, False, False),
        (LeaseState.QUARANTINED, False, 0, 5, False, False),
    ],
)
def test_a_kernel_that_needs_the_gpu_and_cannot_say_so_gets_a_ticket(  # noqa: PLR0917 - a table
    monkeypatch: pytest.MonkeyPatch,
    state: LeaseState,
    linked: bool,
    silent_s: float,
    busy_s: float,
    exempt: bool,
    wanted: bool,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("fractional_gpu.broker.monitoring.sampler.time.monotonic", lambda: now_s)
    world = World(state)
    if linked:
        world.kernel.link = GateLink(now_s - silent_s)
        world.kernel.link.exempt = exempt
    world.kernel.cell.executing_since_s = now_s - busy_s if busy_s else None
    world.sampler.request_for_silent()
    assert world.wanted == [LEASE] * wanted
    world.kernel.requests.waiters = 1
    world.sampler.request_for_silent()
    assert world.wanted == [LEASE] * wanted, "its own ticket is enough"


class Reader:
    """Replaces the stream to an extension that reads everything, or nothing."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads

    def keep_alive(self) -> bool:
        return True

    def is_read(self) -> bool | None:
        return self.reads


@pytest.mark.promise("race-stuck")
@pytest.mark.parametrize("between_s", [2.0, 20.0, 60.0, 600.0])
@pytest.mark.parametrize("reads", [True, False])
def test_only_time_in_which_the_broker_looked_counts_as_silence(
    monkeypatch: pytest.MonkeyPatch, between_s: float, *, reads: bool
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    world = World(LeaseState.SUSPENDED)
    link = world.kernel.link = GateLink(now_s)
    link.stream = Reader(reads=reads)
    for _ in range(30):  # as often as a slow driver or a machine that paused allows
        now_s += between_s
        world.sampler.check_gates()
        world.sampler.request_for_silent()
    assert bool(world.wanted) is not reads


@pytest.mark.promise("race-stuck")
@pytest.mark.parametrize("goes_on", [False, True])
def test_who_is_held_up_is_not_stuck_and_has_time_to_read_when_he_goes_on(
    monkeypatch: pytest.MonkeyPatch, *, goes_on: bool
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    world, reader = World(LeaseState.SUSPENDED), Reader(reads=False)
    link = world.kernel.link = GateLink(now_s)
    link.stream = reader
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)

    def looks() -> None:
        nonlocal now_s
        for _ in range(63):
            now_s += 2.0
            world.sampler.check_gates()
            world.sampler.request_for_silent()

    try:
        world.kernel.identity = identify(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        looks()
        assert world.wanted == []
        process.send_signal(signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        reader.reads = goes_on
        looks()
        assert bool(world.wanted) is not goes_on
    finally:
        process.kill()
        process.communicate()


# -- claims ------------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("claims")
@pytest.mark.parametrize(
    ("uid", "seat", "counts"), [(os.getuid(), "", True), (60_001, "", False), (os.getuid(), "s", False)]
)
def test_a_program_counts_for_its_user_s_claim_and_for_no_other_s(uid: int, seat: str, *, counts: bool) -> None:
    world = World()
    world.kernel = Kernel(lease_id=LEASE, uid=uid, token_sha256="", launch=Launch(claim=True, group="/pod"))
    world.kernels = {LEASE: world.kernel}
    world.view = replace(world.view, spec=replace(world.view.spec, claim_ms=1000, seat=seat))
    world.monitor.has_context(os.getpid(), ProcessState.RUNNING, 700)
    events = asyncio.run(world.told())
    assert measured_mib(events) == [700 if counts else 0]
    assert strangers(events) == [200 if counts else 700], "what exceeds the claim is a stranger's"
    assert [one.used_mib for one in world.enforcement.strangers[DEVICE]] == ([] if counts else [700])
    assert world.busy == [counts], "a claim in use is busy"


@pytest.mark.promise("claims")
def test_a_claim_of_two_devices_has_its_room_on_each() -> None:
    world = World()
    world.kernel = Kernel(lease_id=LEASE, uid=os.getuid(), token_sha256="", launch=Launch(claim=True))
    world.kernels = {LEASE: world.kernel}
    world.view = replace(world.view, device_ids=(DEVICE, "other"))
    users = [ProcessIdentity("", pid, 1) for pid in (1001, 1002, 1003)]
    held = {DEVICE: [(1001, 500)], "other": [(1002, 400), (1003, 200)]}
    uses = {
        device_id: SimpleNamespace(processes=[ProcessUse(pid=pid, used_mib=mib) for pid, mib in there])
        for device_id, there in held.items()
    }
    owners: dict[int, Any] = {}
    world.sampler._add_claimed(owners, cast("Any", SimpleNamespace(started=lambda *_: users)), cast("Any", uses))
    assert list(owners) == [1001, 1002, 1003], "the last one in part"


@pytest.mark.promise("claims")
async def test_what_the_arbiter_thinks_of_strangers_is_corrected() -> None:
    world = World()
    await world.told()
    world.stranger_mib = 300  # a claim has ended, and its program meanwhile as well
    assert strangers(await world.told()) == [0]
    assert strangers(await world.told()) == []
