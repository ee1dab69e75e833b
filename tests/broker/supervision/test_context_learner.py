"""A context's size is learnt only from one moment in which both the framework's and the device's figures are known."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.context_sizes import ContextSizes
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.kernels.kernel import CheckpointState, Kernel
from fractional_gpu.broker.supervision import enforcement
from fractional_gpu.broker.supervision.enforcement import ContextLearner
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import DeviceUse, ProcessUse
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.messages import GateAnswer, GateVerb

DEVICE, OTHER = "GPU-0", "GPU-1"
PROCESS, CHILD = (ProcessIdentity("b", pid, 1) for pid in (7, 8))
CAP_MIB = 20_000


class Watch:
    """A kernel's message connection."""

    busy = executing = runs_cell = False


class World:
    """The parts of a broker that learning needs, with one idle kernel."""

    def __init__(self, used_mib: int = 10_900) -> None:
        self.state = LeaseState.RESIDENT
        self.homes: tuple[str, ...] = (DEVICE,)
        self.use = {PROCESS.pid: used_mib, CHILD.pid: 3000}
        self.kernel = Kernel(
            lease_id="lease", uid=1000, token_sha256="", identity=PROCESS, checkpoint=CheckpointState(homes=self.homes)
        )
        self.kernel.iopub = cast("IOPubWatch", Watch())
        self.kernel.link = GateLink(0.0)
        self.kernels = {"lease": self.kernel}
        self.devices = {one: SimpleNamespace(name="H100") for one in (DEVICE, OTHER)}
        self.arbiter = SimpleNamespace(lease=lambda _: self._view())
        self.monitor = SimpleNamespace(use=self._use)
        self.records = self
        self.learner = ContextLearner(cast("Broker", self), ContextSizes())

    def _view(self) -> SimpleNamespace:
        return SimpleNamespace(state=self.state, spec=SimpleNamespace(reserve_mib=CAP_MIB))

    def _use(self, device_id: str) -> DeviceUse:
        processes = tuple(ProcessUse(pid=pid, used_mib=mib) for pid, mib in self.use.items())
        return DeviceUse(memory_mib=80_000, device_id=device_id, used_mib=sum(self.use.values()), processes=processes)

    def may_use(self, _: Kernel) -> tuple[str, ...]:
        return self.homes if self.state is LeaseState.RESIDENT else ()

    def environment(self, lease_id: str, device_ids: tuple[str, ...]) -> dict[str, str]:
        return {"JUPYTER_GPU_CONTEXT_MIB": str(self.learner.context_mib(lease_id, device_ids))}

    @property
    def context_mib(self) -> int:
        return self.learner.context_mib("lease", [DEVICE])

    @property
    def link(self) -> GateLink:
        assert self.kernel.link is not None
        return self.kernel.link

    async def answer(self, word: str = "done", detail: str = "gc, torch, reserved_mib=10000") -> None:
        """Answer the next command as an extension does."""
        command = await self.link.next()
        assert command is not None
        assert command.verb == GateVerb.SHRINK
        self.link.take(GateAnswer(number=command.number, word=word, detail=detail), 1.0)

    async def suspended(self, detail: str = "gc, torch, reserved_mib=10000") -> None:
        """A suspend as `Swaps` does it: caches are given back, then the memory of the locked process is counted."""
        asked = asyncio.create_task(self.link.ask(GateVerb.SHRINK, 30))
        await self.answer(detail=detail)
        await asked
        self.kernel.checkpoint.sizes = {PROCESS: self.use[PROCESS.pid], CHILD: self.use[CHILD.pid]}
        self.kernel.checkpoint.homes, self.state = self.homes, LeaseState.SUSPENDED
        self.learner.suspended(self.kernel)


async def test_a_suspend_teaches_what_the_kernel_s_own_process_has_beside_its_framework() -> None:
    world = World()
    assert world.context_mib == 512
    await world.suspended()
    assert world.context_mib == 928


async def test_a_kernel_on_several_devices_teaches_nothing_and_gets_the_largest() -> None:
    world = World()
    world.homes = (DEVICE, OTHER)
    await world.suspended()
    assert world.context_mib == 512
    world.devices[OTHER] = SimpleNamespace(name="B200")
    world.homes = (OTHER,)
    await world.suspended()
    assert (world.context_mib, world.learner.context_mib("lease", [DEVICE, OTHER])) == (512, 928)


async def told(world: World) -> dict[str, str]:
    """Return the next message to the extension."""
    command = await world.link.next()
    assert command is not None
    assert command.verb == GateVerb.LIMIT
    return command.environment


async def test_a_kernel_over_its_cap_is_asked_when_it_is_idle_and_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enforcement, "_AGAIN_S", 0)
    world = World()
    Watch.busy = True
    try:
        world.learner.breached(world.kernel)
        world.learner.breached(world.kernel)
        await asyncio.sleep(0)
        assert world.link._queue.empty(), "a cell runs"
    finally:
        Watch.busy = False
    world.kernel.notify()
    await world.answer("busy", "a cell runs")
    await world.answer()
    assert await told(world) == {"JUPYTER_GPU_CONTEXT_MIB": "928"}
    assert world.context_mib == 928
    await world.learner.close()


async def test_what_other_users_kernels_taught_gives_way_to_more_of_them_but_the_own_figure_counts() -> None:
    world = World()
    await world.suspended()
    for number in range(4):
        other = Kernel(
            lease_id=f"lease {number}",
            uid=2000,
            token_sha256="",
            identity=PROCESS,
            checkpoint=CheckpointState(homes=(DEVICE,)),
        )
        other.checkpoint.sizes, other.link = {PROCESS: 10_600}, world.link
        world.kernels[other.lease_id] = other
        world.learner.suspended(other)
    assert world.learner.context_mib("lease 0", [DEVICE]) == 608
    assert world.context_mib == 928
