"""The room of an ended kernel is free when the device no longer counts its memory, not when its processes are gone."""

import asyncio
import os
from collections.abc import Iterable
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import HostSnapshot, ProcessInspector
from fractional_gpu.broker.supervision import survivors as survivors_module
from fractional_gpu.broker.supervision.survivors import Survivors
from fractional_gpu.core.events import Event, LeaseReleased, ProcessExited
from fractional_gpu.core.model import LeaseSpec, LeaseState, LeaseView
from fractional_gpu.gpu.interface import DeviceUse, GPUError, GPUErrorCode, ProcessUse
from fractional_gpu.host.process import ProcessIdentity, Snapshot, boot_id
from tests.broker.driver import DEVICE
from tests.broker.live import DEADLINE_S

pytestmark = pytest.mark.promise("left-behind")

LEASE = "lease"
AT_REST_MIB = 40
ROOT = ProcessIdentity(boot_id(), os.getpid(), 1)  # an earlier process with this pid, which has ended


def use(beyond_mib: int, *processes: ProcessUse) -> DeviceUse:
    charged = sum(one.used_mib for one in processes)
    return DeviceUse(device_id=DEVICE, memory_mib=1000, used_mib=charged + beyond_mib, processes=processes)


class World:
    """Replaces the broker and its arbiter: the kernel has no process left, and each look at the device gives the next of these answers."""

    def __init__(self, looks: Iterable[DeviceUse | GPUError]) -> None:
        self.looks = list(looks)
        self.arbiter = self
        self.events: list[tuple[Event, int]] = []  # how many looks remained
        self.kernel = Kernel(lease_id=LEASE, uid=0, token_sha256="")
        self.kernels = {LEASE: self.kernel}
        self.survivors = Survivors(cast("Broker", self), cast("ProcessInspector", self))
        self.survivors.unfreed_mib(DEVICE, use(AT_REST_MIB))
        self.view: LeaseView | None = LeaseView(
            spec=LeaseSpec(lease_id=LEASE, pool="p", owner="ann", fraction_milli=500, reserve_mib=500),
            state=LeaseState.RESIDENT,
            generation=1,
            device_id=DEVICE,
            saved_mib=0,
            used_mib=300,
            busy=False,
            since_ms=0,
            last_active_ms=0,
            operation_id=None,
            reason="",
            sentence="",
            reserved_mib=500,
        )

    def lease(self, _lease_id: str) -> LeaseView | None:
        return self.view

    async def take(self, _device_ids: object) -> HostSnapshot:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, GPUError):
            raise look
        return HostSnapshot(processes=Snapshot(ROOT.boot_id, []), uses={DEVICE: look})

    async def with_memory(self, *_: object, **__: object) -> list[ProcessIdentity]:
        return []

    def exited(self, kernel: Kernel) -> None:
        self.dispatch(ProcessExited(at_ms=0, lease_id=kernel.lease_id))

    def dispatch(self, event: Event) -> None:
        self.events.append((event, len(self.looks)))
        self.view = None

    def kinds(self) -> list[tuple[type[Event], int]]:
        return [(type(event), left) for event, left in self.events]


FAILED = GPUError(GPUErrorCode.UNKNOWN, "no answer")
STILL_LISTED = use(AT_REST_MIB, ProcessUse(pid=ROOT.pid, used_mib=300))


@pytest.mark.parametrize(
    "before",
    [(use(AT_REST_MIB + 300),), (STILL_LISTED,), (FAILED,), (STILL_LISTED, use(AT_REST_MIB + 300), FAILED), ()],
    ids=["charged to none", "still listed", "no answer", "one after another", "freed at once"],
)
async def test_the_room_is_free_when_the_device_says_so(before: tuple[DeviceUse | GPUError, ...]) -> None:
    world = World([*before, use(AT_REST_MIB)])
    world.survivors.kernel_ended(world.kernel, ROOT)
    async with asyncio.timeout(DEADLINE_S):
        await world.survivors.settled(world.kernel)
    assert world.kinds() == [(ProcessExited, 1)], "every look was taken before the room was free"


async def test_a_released_lease_ends_when_the_device_says_so() -> None:
    world = World([use(AT_REST_MIB + 300), use(AT_REST_MIB)])
    world.kernel.ending.root = world.kernel.identity = ROOT
    async with asyncio.timeout(DEADLINE_S):
        await world.survivors.release(world.kernel)
    assert world.kinds() == [(LeaseReleased, 1)]


async def test_what_a_device_never_frees_is_a_strangers_before_the_room_is_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(survivors_module, "FREED_S", 0.0)
    world, noted = World([use(AT_REST_MIB + 300)]), asyncio.Event()

    class Unfreed(dict[str, int]):
        def setdefault(self, key: str, default: int = 0) -> int:
            noted.set()
            return super().setdefault(key, default)

    world.survivors.unfreed = Unfreed()
    world.survivors.kernel_ended(world.kernel, ROOT)
    async with asyncio.timeout(DEADLINE_S):
        await noted.wait()
        assert world.events == []
        assert world.survivors.unfreed_mib(DEVICE, use(AT_REST_MIB + 300)) == 300
        world.survivors.was_sampled()
        await world.survivors.settled(world.kernel)
    assert world.kinds() == [(ProcessExited, 1)]
    assert world.survivors.unfreed_mib(DEVICE, use(AT_REST_MIB + 300)) == 300
    assert world.survivors.unfreed_mib(DEVICE, use(AT_REST_MIB)) == 0
    assert world.survivors.unfreed == {}


async def test_the_room_is_not_free_while_nothing_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors_module, "FREED_S", 0.0)
    monkeypatch.setattr(survivors_module, "_SAMPLED_S", 0.0)
    world = World([FAILED, FAILED, FAILED, use(AT_REST_MIB)])
    world.survivors.kernel_ended(world.kernel, ROOT)
    async with asyncio.timeout(DEADLINE_S):
        await world.survivors.settled(world.kernel)
    assert world.kinds() == [(ProcessExited, 1)], "unknown is not free, however long it lasts"
    assert world.survivors.unfreed == {}
