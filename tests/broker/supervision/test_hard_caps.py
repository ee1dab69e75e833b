"""Which limits control groups get, and what happens if the driver refuses one."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.supervision import hard_caps
from fractional_gpu.broker.supervision.hard_caps import HardCaps
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.checkpoint_trial import LimitTrial
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, MemoryLimit
from fractional_gpu.host.own_group import OwnGroup
from fractional_gpu.host.process import ProcessIdentity

UNIT = "/a.service"
GROUPS: dict[int, OwnGroup | None] = {}


@dataclass
class Driver:
    """The worker's link: keeps the limits by group and device. `error`: what a change raises."""

    limits: dict[tuple[str, str], int | None] = field(default_factory=dict)
    error: GPUError | None = None

    async def set_limit(self, device_id: str, group: str, mib: int | None) -> None:
        if self.error is not None:
            raise self.error
        self.limits[group, device_id] = mib

    async def read_limit(self, device_id: str, group: str) -> MemoryLimit | None:
        mib = self.limits.get((group, device_id))
        return None if mib is None else MemoryLimit(hard_mib=mib, used_mib=0)


class World:
    """A broker's leases, and the limits that follow from them."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.kernels: dict[str, Kernel] = {}
        self.leases: dict[str, Any] = {}
        self.pool = SimpleNamespace(exclusive=False)
        arbiter = SimpleNamespace(lease=self.leases.get, pools=lambda: {"default": self.pool})
        self.broker = SimpleNamespace(
            arbiter=arbiter,
            kernels=self.kernels,
            devices={"gpu0": SimpleNamespace(memory_mib=1000), "gpu1": SimpleNamespace(memory_mib=1000)},
            views=lambda: [(self.kernels[one], view) for one, view in self.leases.items()],
        )
        self.caps = HardCaps(cast("Any", self.broker), cast("Any", self.driver))

    def lease(self, lease_id: str, mib: int, *, owner: str = "ada", group: str = UNIT) -> Kernel:
        pid = len(self.kernels) + 10
        GROUPS[pid] = OwnGroup(group, is_leaf=True)
        spec = SimpleNamespace(lease_id=lease_id, owner=owner, seat="", pool="default")
        self.leases[lease_id] = SimpleNamespace(
            spec=spec, state=LeaseState.RESIDENT, device_ids=("gpu0",), reserved_mib=mib
        )
        self.kernels[lease_id] = Kernel(lease_id=lease_id, uid=1000, token_sha256="")
        self.kernels[lease_id].identity = ProcessIdentity(boot_id="b", pid=pid, start_time=1)
        return self.kernels[lease_id]

    def begin(self, trial: LimitTrial | None = None) -> None:
        if trial is not None:
            self.caps.tried(trial)
        asyncio.run(self.caps.recall())

    def apply(self, kernel: Kernel | None = None) -> str:
        return asyncio.run(self.caps.apply(kernel))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    GROUPS.clear()
    monkeypatch.setattr(hard_caps, "own_group", lambda pid, _uid: GROUPS[pid])
    return World()


def test_a_groups_limit_is_what_its_leases_hold(world: World) -> None:
    first = world.lease("a", 100)
    world.begin(LimitTrial(is_told=True))
    world.lease("b", 50)
    assert world.apply(first) == ""
    assert world.driver.limits == {(UNIT, "gpu0"): 150}
    assert world.caps.allows(first)
    assert world.caps.told_mib(first, "gpu0") == 150
    world.leases["a"].state = LeaseState.SUSPENDED
    world.apply()
    assert world.driver.limits == {(UNIT, "gpu0"): 50}


def test_a_group_of_two_users_has_no_limit(world: World) -> None:
    world.lease("a", 100)
    world.begin(LimitTrial())
    world.apply()
    bobs = world.lease("b", 50, owner="bob")
    assert world.apply(bobs) == ""
    assert world.driver.limits == {(UNIT, "gpu0"): None}
    assert not world.caps.caps(bobs)


def test_an_exclusive_pool_keeps_its_groups_off_other_devices(world: World) -> None:
    world.pool.exclusive = True
    world.lease("a", 100)
    world.begin(LimitTrial())
    world.apply()
    assert world.driver.limits == {(UNIT, "gpu0"): 100, (UNIT, "gpu1"): 0}


def test_a_lease_waits_for_a_limit_that_the_driver_refuses_to_raise(world: World) -> None:
    kernel = world.lease("a", 50)
    world.begin(LimitTrial())
    world.apply()
    world.leases["a"].reserved_mib = 100
    world.driver.error = GPUError(GPUErrorCode.UNKNOWN, "the driver is busy")
    assert world.apply(kernel) == "the driver is busy"
    assert not world.caps.allows(kernel)
    world.driver.error = None
    assert world.apply(kernel) == ""
    assert world.caps.allows(kernel)


def test_a_device_without_limits_and_a_driver_that_sets_none_keep_no_lease_waiting(world: World) -> None:
    kernel = world.lease("a", 100)
    world.begin(LimitTrial())
    world.driver.error = GPUError(GPUErrorCode.UNKNOWN, "the driver is busy")
    assert world.apply(kernel) == ""
    world.driver.error = GPUError(GPUErrorCode.NOT_SUPPORTED, "a MIG instance")
    assert world.apply(kernel) == ""
    world.driver.error = None
    world.apply()
    assert world.driver.limits == {}  # it is not asked again


def test_a_limit_is_not_beyond_the_device(world: World) -> None:
    world.lease("a", 1200)
    world.begin(LimitTrial())
    world.apply()
    assert world.driver.limits == {(UNIT, "gpu0"): 1000}


def test_a_limit_ends_with_its_group(world: World) -> None:
    world.lease("a", 100)
    world.begin(LimitTrial())
    world.apply()
    world.leases.clear()
    world.driver.error = GPUError(GPUErrorCode.OPERATING_SYSTEM, "no such group")
    world.apply()
    world.driver.error = None
    world.apply()
    assert world.driver.limits == {(UNIT, "gpu0"): 100}  # it was not asked again


def test_limits_of_an_earlier_broker_are_taken_over_and_without_any_there_are_none(world: World) -> None:
    kernel = world.lease("a", 100)
    world.begin()
    assert world.apply(kernel) == ""
    assert world.driver.limits == {}
    later = World()
    kernel = later.lease("a", 100)
    other = later.lease("b", 50, group="/b.service")
    later.driver.limits = {(UNIT, "gpu0"): 0, ("/b.service", "gpu0"): 0}
    later.begin()
    assert not later.caps.allows(kernel)
    assert not later.caps.allows(other)
    assert later.apply(kernel) == ""
    assert later.driver.limits == {(UNIT, "gpu0"): 100, ("/b.service", "gpu0"): 50}
