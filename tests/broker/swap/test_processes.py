"""A suspend and a resume know the kernel's processes, which of them have CUDA state, and read no other device."""

import os

import pytest

from fractional_gpu.broker.kernels import process_inspector
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap.swap import Truth
from fractional_gpu.core.events import ResumeOutcome, SuspendOutcome
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import DeviceUse, GPUError, GPUErrorCode
from fractional_gpu.host.process import identify
from fractional_gpu.host.process import scan as real_scan
from tests.broker.driver import DEVICE, Driver, journal, kernel_of, suspend_of, swaps_of
from tests.broker.swap.kernels import CLOSES, S, resume_of, running
from tests.support.stopping import stop


@pytest.mark.promise("race-processes")
async def test_a_cuda_process_that_no_device_counts_is_saved_at_the_most_it_can_have() -> None:
    """It only initialised the driver, or the device does not list it: it may have all memory that is charged to no process."""
    driver = Driver()
    driver.others_mib = 120
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids[:1])
        driver.has_context(pids[1], S.RUNNING, 0)
        outcome, saved_mib, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 300 + 120), sentence
    assert set(driver.states.values()) == {S.CHECKPOINTED}


async def test_once_devices_are_known_to_count_processes_one_without_memory_is_saved_alone() -> None:
    driver = Driver()
    swaps = swaps_of(driver)
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        driver.has_context(pids[0], S.RUNNING, 0)
        assert (await swaps.suspend(kernel, suspend_of(kernel), journal([])))[0] is SuspendOutcome.REFUSED
        swaps.inspector.counts_processes = True
        outcome, saved_mib, _ = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, process_inspector.NOMINAL_MIB)


FORKS = """
import os
if os.fork() == 0:
    open(0).read()
    os._exit(0)
"""


def forked_by(kernel: Kernel) -> int:
    """Return the pid of the process that the kernel forked."""
    assert kernel.identity is not None
    (child,) = [one for one in real_scan().tree(kernel.identity) if one != kernel.identity]
    return child.pid


@pytest.mark.promise("race-processes")
@pytest.mark.parametrize("says", ["an error", "running"])
async def test_a_forked_child_that_inherited_a_context_keeps_the_kernel_and_is_named(says: str) -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, pids):
        running(driver, pids)
        child = forked_by(kernel)
        if says == "running":
            driver.has_context(child, S.RUNNING, 0)
        else:
            driver.failures["state", child] = GPUErrorCode.OPERATING_SYSTEM
        swaps = swaps_of(driver)
        swaps.inspector.counts_processes = True
        outcome, _, sentence = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
        truth = await swaps.truth(kernel, DEVICE, 0)
    assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])
    assert f"process {child} was forked by the kernel" in sentence
    assert truth == Truth(state=LeaseState.RESIDENT, device_id=DEVICE), "what it says decides nothing about the kernel"


async def test_a_forked_child_unknown_to_the_driver_does_not_matter() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.SAVED, sentence


async def test_a_forked_child_on_which_the_driver_fails_is_none_of_what_a_saved_kernel_leaves_behind() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, pids):
        running(driver, pids)
        swaps = swaps_of(driver)
        assert (await swaps.suspend(kernel, suspend_of(kernel), journal([])))[0] is SuspendOutcome.SAVED
        host = await swaps.inspector.take()
        child = forked_by(kernel)
        driver.failures["state", child] = GPUErrorCode.OPERATING_SYSTEM
        assert await swaps.inspector.with_memory(kernel, kernel.identity, host, saved=True) == [kernel.identity]
        kernel.checkpoint.sizes = {}  # another broker saved it: how much it saved is unknown
        with pytest.raises(GPUError):
            await swaps.inspector.with_memory(kernel, kernel.identity, host, saved=True)


async def test_a_forked_child_with_memory_of_its_own_is_saved_like_any_other() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, _pids):
        running(driver, [forked_by(kernel)])  # the kernel itself does not use CUDA
        outcome, saved_mib, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, saved_mib) == (SuspendOutcome.SAVED, 300)


async def test_a_forked_child_that_was_saved_is_brought_back() -> None:
    driver = Driver()
    async with kernel_of(1, CLOSES, first=FORKS) as (kernel, _, pids):
        child = forked_by(kernel)
        running(driver, [*pids, child])
        outcome, _, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert outcome is SuspendOutcome.SAVED
        result, _ = await swaps_of(driver).resume(kernel, resume_of(kernel), 600)
    assert result is ResumeOutcome.RESTORED
    assert set(driver.states.values()) == {S.RUNNING}, "it uses no device while it is saved, and is still no heir"


async def test_an_error_about_a_program_of_its_own_is_an_error_about_the_kernel() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        driver.failures["state", pids[1]] = GPUErrorCode.OPERATING_SYSTEM
        outcome, _, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])


@pytest.mark.promise("race-processes")
@pytest.mark.parametrize("which", [0, 1], ids=["the-kernel", "a-child"])
async def test_a_stopped_process_is_named_at_once_and_not_asked(which: int) -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        pid = pids[which]
        stop(pid)
        driver.failures["state", pid] = GPUErrorCode.WORKER_HUNG
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert (outcome, driver.calls) == (SuspendOutcome.REFUSED, [])
        assert f"process {pid} is stopped" in sentence
        kernel.checkpoint.sizes = {identify(pid): 300}
        for one in pids:
            driver.has_context(one, S.CHECKPOINTED, 300)
        result, sentence = await swaps_of(driver).resume(kernel, resume_of(kernel), 600)
        assert (result, driver.calls) == (ResumeOutcome.NOT_STARTED, [])
        assert f"kill -CONT {pid}" in sentence


async def test_a_stopped_process_without_device_memory_does_not_matter() -> None:
    driver = Driver()
    async with kernel_of(2, CLOSES) as (kernel, _, pids):
        running(driver, pids[:1])
        stop(pids[1])
        outcome, _, sentence = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.SAVED, sentence


class ReadDriver(Driver):
    """Records which devices are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def use(self, device_id: str) -> DeviceUse:
        self.read.append(device_id)
        return super().use(device_id)


async def test_only_the_devices_concerned_are_read() -> None:
    driver = ReadDriver()
    async with kernel_of(1, CLOSES) as (kernel, _, pids):
        running(driver, pids)
        outcome, _, _ = await swaps_of(driver).suspend(kernel, suspend_of(kernel), journal([]))
        assert outcome is SuspendOutcome.SAVED
        assert driver.read == [DEVICE] * 2, "before the lock, and after it"
        driver.read.clear()
        await swaps_of(driver).resume(kernel, resume_of(kernel), 300)
    assert driver.read == [DEVICE], "before the restore"


async def test_the_broker_is_no_part_of_the_kernel_that_started_it() -> None:
    driver = Driver()
    kernel = Kernel(lease_id="lease-of-tests", uid=os.getuid(), token_sha256="")
    kernel.identity = identify(os.getppid())
    host = process_inspector.HostSnapshot(processes=real_scan(process_inspector.LEASE_VARIABLE), uses={})
    tree = swaps_of(driver).inspector.tree(kernel, host)
    assert kernel.identity in tree
    assert os.getpid() not in {one.pid for one in tree}
