"""Whatever samples a driver gives and whenever the clock is set, no kernel counts as busy longer than documented.

The documented limit: until the counters show that it is quiet, which takes 1.25 s after a cell's end, and two seconds after the last
plausible sample.
"""

import asyncio
import os
from dataclasses import dataclass
from typing import cast
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.supervision import enforcement
from fractional_gpu.broker.supervision.enforcement import QUIET_S, GpuActivity
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from fractional_gpu.host.clock import WallClock
from tests.broker.driver import DEVICE
from tests.broker.supervision.test_gpu_activity import World
from tests.gpu_nvidia.fake_nvml import FakeGPU, FakeNVML

pytestmark = pytest.mark.promise("samples")

SECOND = 1_000_000
BEGAN_US = 1_700_000_000 * SECOND
ME = os.getpid()
SETTLED_US = 1_250_000
QUIET_US = int(QUIET_S * SECOND)
AHEAD_US = SECOND


@dataclass
class Clock:
    """The machine's wall clock and its time since boot, in microseconds."""

    wall_us: int = BEGAN_US
    steady_us: int = 5_000 * SECOND

    def passes(self, us: int) -> None:
        self.wall_us += us
        self.steady_us += us

    def stepped(self) -> WallClock:
        return WallClock(lambda: self.wall_us * 1000, lambda: self.steady_us * 1000)


class RealMonitor(World):
    """One kernel that is idle according to its messages; the real monitor reads its device."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.gpu = FakeGPU(uuid=DEVICE)
        self.real = NvidiaMonitor(nvml=FakeNVML(self.gpu), bindings=lambda: "", clock=clock.stepped())
        self.monitor = cast("World", self.real)  # the other worlds are monitors themselves
        self.gpu_activity = GpuActivity(cast("Broker", self))


def is_sane(stamp_us: int, percent: int, now_us: int) -> bool:
    return 0 < percent <= 100 and stamp_us <= now_us + AHEAD_US


STAMPS = st.one_of(st.integers(-20 * SECOND, 20 * SECOND).map(lambda off: BEGAN_US + off), st.integers(0, 2**63 - 1))
PERCENT = st.one_of(st.integers(0, 100), st.integers(0, 2**32 - 1))
SAMPLES = st.lists(st.tuples(st.sampled_from([ME, 1]), STAMPS, PERCENT), max_size=8)
LOOKS = st.lists(st.integers(1000, 3 * SECOND), min_size=1, max_size=12)  # microseconds between them


@given(samples=SAMPLES, looks=LOOKS)
@example(samples=[(ME, BEGAN_US + 3600 * SECOND, 50)], looks=[2 * SECOND] * 3)
@example(samples=[(ME, BEGAN_US + SECOND, 37_100)], looks=[2 * SECOND, 100_000])
def test_no_samples_keep_a_kernel_busy_for_longer_than_documented(
    samples: list[tuple[int, int, int]], looks: list[int]
) -> None:
    clock = Clock()

    async def run() -> None:
        world = RealMonitor(clock)
        world.cell_ends()
        world.gpu.samples = samples
        true_us = 0  # the last stamp that was plausible when it was read
        for us in looks:
            clock.passes(us)
            await world.look()
            sane = [at for pid, at, percent in samples if pid == ME and is_sane(at, percent, clock.wall_us)]
            true_us = max([true_us, *sane])
            due_us = max(BEGAN_US + SETTLED_US, true_us + QUIET_US)
            assert clock.wall_us < due_us or not world.busy

    with patch.object(enforcement, "since_boot_us", lambda: clock.steady_us):
        asyncio.run(run())


@given(step_s=st.integers(-7200, 7200), looks=LOOKS)
@example(step_s=-3600, looks=[2 * SECOND, 2 * SECOND])
@example(step_s=3600, looks=[2 * SECOND, 2 * SECOND])
def test_setting_a_clock_keeps_no_kernel_busy_and_hides_no_work(step_s: int, looks: list[int]) -> None:
    """Samples from before the clock was set no longer count, and the kernel stays busy exactly as long as without the change."""
    clock = Clock()

    async def run() -> None:
        world = RealMonitor(clock)
        world.cell_ends()
        clock.passes(100_000)
        worked_us = clock.wall_us
        world.gpu.samples = [(ME, worked_us, 50)]
        await world.look()
        due_us = clock.steady_us - 100_000 + max(SETTLED_US, 100_000 + QUIET_US)
        clock.wall_us += step_s * SECOND
        for us in looks:
            clock.passes(us)
            await world.look()
            assert clock.steady_us < due_us or not world.busy
        clock.passes(max(0, due_us - clock.steady_us) + 1)
        await world.look()
        assert not world.busy
        clock.passes(max(0, worked_us - clock.wall_us) + 1)  # the same time comes again
        await world.look()
        assert not world.busy
        clock.passes(SECOND)
        world.gpu.samples = [(ME, clock.wall_us, 50)]
        await world.look()
        assert world.busy, "it works again"

    with patch.object(enforcement, "since_boot_us", lambda: clock.steady_us):
        asyncio.run(run())


def test_a_clock_that_is_set_is_noticed_once() -> None:
    clock = Clock()
    watch = clock.stepped()
    clock.passes(10 * SECOND)
    assert watch.stepped_us() == 0
    clock.wall_us -= 3600 * SECOND
    assert watch.stepped_us() == -3600 * SECOND
    assert watch.stepped_us() == 0
    clock.wall_us += 60_000
    assert watch.stepped_us() == 0
    clock.wall_us += 60_000
    assert watch.stepped_us() == 120_000, "it was slewed"
