"""A resume takes every step in order, and begins only if the room is free."""

import asyncio
import os
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from fractional_gpu.broker.kernels import process_inspector
from fractional_gpu.broker.swap import swap as swap_module
from fractional_gpu.core.events import ResumeOutcome
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import DeviceUse, GPUErrorCode, ProcessState
from fractional_gpu.host.process import Snapshot
from fractional_gpu.host.process import scan as real_scan
from tests.broker.driver import DEVICE, OTHERS, Driver, kernel_of, swaps_of
from tests.broker.swap.kernels import SHORT, S, fails_to_look, resume_of, saved

pytestmark = pytest.mark.promise("driver-answers")


async def test_a_resume_brings_every_process_back() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600)
    assert outcome is ResumeOutcome.RESTORED
    assert set(driver.states.values()) == {S.RUNNING}


async def test_a_restore_is_never_tried_to_find_out_whether_there_is_room() -> None:
    driver = Driver()
    driver.others_mib = 500
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 600)
    assert outcome is ResumeOutcome.NOT_STARTED
    assert re.findall(r"\d+ MiB", sentence) == ["500 MiB", "600 MiB"], "what is free, and what is needed"
    assert driver.calls == []


async def test_saved_state_of_unknown_size_needs_its_whole_reservation() -> None:
    """Another program saved all its processes."""
    driver = Driver()
    driver.others_mib = 500
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 0)
    assert outcome is ResumeOutcome.NOT_STARTED
    assert re.findall(r"\d+ MiB", sentence) == ["500 MiB", "600 MiB"], "what is free, and what is needed"
    assert driver.calls == []


async def test_a_resume_whose_kernel_ends_meanwhile_is_not_called_done() -> None:
    """Its children's state is still saved, so the lease must not count as resident."""

    class EndsMeanwhile(Driver):
        def use(self, device_id: str) -> DeviceUse:
            if kernel.identity is not None:
                loop.call_soon_threadsafe(kernel.forget_process)
                while kernel.identity is not None:
                    time.sleep(0.001)
            return super().use(device_id)

    driver, loop = EndsMeanwhile(), asyncio.get_running_loop()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600)
    assert (outcome, driver.calls) == (ResumeOutcome.NOT_STARTED, [])


async def test_each_of_several_devices_goes_to_its_counterpart() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        kernel.checkpoint.homes = (DEVICE, OTHERS[0])
        effect = replace(
            resume_of(kernel),
            device_ids=(OTHERS[1], OTHERS[2]),
            from_device_ids=kernel.checkpoint.homes,
        )
        outcome, sentence = await swaps_of(driver).resume(kernel, effect, 600)
    assert outcome is ResumeOutcome.RESTORED, sentence
    assert driver.moves == [(pid, {DEVICE: OTHERS[1], OTHERS[0]: OTHERS[2]}) for pid in sorted(pids)]


async def test_every_one_of_several_devices_must_have_the_room() -> None:
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        kernel.checkpoint.homes = (OTHERS[0], DEVICE)
        driver.others_mib = 500
        effect = replace(
            resume_of(kernel),
            device_ids=kernel.checkpoint.homes,
            from_device_ids=kernel.checkpoint.homes,
        )
        outcome, sentence = await swaps_of(driver).resume(kernel, effect, 600)
    assert outcome is ResumeOutcome.NOT_STARTED
    assert re.findall(r"\d+ MiB", sentence) == ["500 MiB", "600 MiB"], "what is free, and what is needed"
    assert driver.calls == []


@pytest.mark.parametrize(
    ("left", "outcome"),
    [(None, ResumeOutcome.NOT_STARTED), (S.FAILED, ResumeOutcome.UNKNOWN), (S.RESTORING, ResumeOutcome.UNKNOWN)],
)
async def test_a_restore_that_fails_is_tried_again_only_if_all_is_still_saved(
    left: ProcessState | None, outcome: ResumeOutcome
) -> None:
    driver = Driver()
    async with kernel_of() as (kernel, _, pids):
        saved(driver, pids)
        driver.failures["restore", pids[0]] = GPUErrorCode.OPERATING_SYSTEM
        if left is not None:
            driver.leaves["restore", pids[0]] = left
        result, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 300)
    assert result is outcome
    assert "restore failed as told" in sentence


async def test_a_resume_does_not_begin_when_the_machine_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_to_look(monkeypatch, SHORT, {1})
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        outcome, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600)
        found = await swaps_of(driver).truth(kernel, DEVICE, 600)
    assert outcome is ResumeOutcome.NOT_STARTED
    assert found is not None
    assert found.state is LeaseState.SUSPENDED


@pytest.mark.parametrize("can_look", [True, False])
async def test_a_resume_that_cannot_be_verified_is_unknown_until_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, can_look: bool
) -> None:
    if not can_look:
        fails_to_look(monkeypatch, SHORT, {2})
    driver = Driver()
    async with kernel_of(2) as (kernel, _, pids):
        saved(driver, pids)
        fail = {("state", pids[1]): GPUErrorCode.WORKER_HUNG}
        restore = driver.restore

        async def restore_and_fail(*arguments: Any) -> int:  # noqa: ANN401 - as the driver's
            driver.failures.update(fail)
            return await restore(*arguments)

        monkeypatch.setattr(driver, "restore", restore_and_fail)
        outcome, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600)
        assert outcome is ResumeOutcome.UNKNOWN
        assert set(driver.states.values()) == {S.RUNNING}, "the kernel's calls continue before that"
        driver.failures.clear()
        found = await swaps_of(driver).truth(kernel, DEVICE, 600)
    assert found is not None
    assert found.state is LeaseState.RESIDENT


@pytest.mark.promise("race-size")
@pytest.mark.parametrize(("others_mib", "outcome"), [(399, ResumeOutcome.RESTORED), (400, ResumeOutcome.NOT_STARTED)])
async def test_a_restore_leaves_a_margin_free(others_mib: int, outcome: ResumeOutcome) -> None:
    driver = Driver()
    async with kernel_of(1) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        driver.has_context(os.getpid(), S.RUNNING, others_mib)  # of 1000
        result = await swaps_of(driver, overhead_mib=301).resume(kernel, resume_of(kernel), 345)
        assert result[0] is outcome, result[1]  # 345 and 256
        if outcome is ResumeOutcome.NOT_STARTED:
            assert "a margin of 256 MiB" in result[1]
            assert driver.calls == []
        swaps = swaps_of(driver, overhead_mib=10)
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        assert (await swaps.resume(kernel, resume_of(kernel), 345))[0] is ResumeOutcome.RESTORED, "no more"


@pytest.mark.parametrize(("fresh_s", "looks"), [(3600.0, 1), (0.0, 2)], ids=["fresh", "stale"])
async def test_a_resume_goes_by_what_was_seen_a_moment_ago_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, fresh_s: float, looks: int
) -> None:
    counted = 0

    def scan(name: str, *_: object) -> Snapshot:
        nonlocal counted
        counted += 1
        return real_scan(name)

    monkeypatch.setattr(process_inspector, "scan", scan)
    monkeypatch.setattr(swap_module, "FRESH_S", fresh_s)
    driver = Driver()
    swaps = swaps_of(driver)
    async with kernel_of(1) as (kernel, _, pids):
        saved(driver, pids)
        await swaps.glance()
        result = await swaps.resume(kernel, resume_of(kernel), 300)
    assert (result[0], counted) == (ResumeOutcome.RESTORED, looks)


async def test_a_glance_that_fails_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_to_look(monkeypatch, SHORT, {1})
    await swaps_of(Driver()).glance()


async def test_a_device_of_its_own_needs_no_margin() -> None:
    driver = Driver()
    async with kernel_of(1) as (kernel, _, pids):
        driver.has_context(pids[0], S.CHECKPOINTED, 300)
        swaps = swaps_of(driver, overhead_mib=500)
        assert (await swaps.resume(kernel, resume_of(kernel), 1000))[0] is ResumeOutcome.RESTORED
