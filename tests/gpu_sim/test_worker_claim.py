"""One worker at a time, also when the broker of the first one was killed."""

import asyncio
import errno
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.worker_link import WorkerClaim, WorkerLink
from fractional_gpu.host import claims
from fractional_gpu.host.process import ProcessIdentity, identify
from tests.gpu_sim.kernels import Kernel, answer, ask, eventually, worker_process
from tests.support import faults


@pytest.fixture
async def links(simulated: host.SimulatedHost, tmp_path: Path) -> AsyncIterator[list[WorkerLink]]:
    """Two brokers' links, each with a separate claim on the same file."""
    claims = [WorkerClaim(tmp_path / "worker.lock") for _ in range(2)]
    links = [WorkerLink(f"simulated:{simulated.directory}", claim=claim) for claim in claims]
    yield links
    faults.clear(simulated.directory)
    for link in links:
        await link.close()
    for claim in claims:
        claim.close()


@pytest.fixture
def target(kernel: Kernel) -> ProcessIdentity:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'ab')")
    return identify(kernel.pid)


async def checkpoint_that_hangs(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> asyncio.Task[int]:
    """Begin a checkpoint that ends when the faults are cleared."""
    await link.lock(target, 1000)
    faults.inject(simulated.directory, "checkpoint", "hang")
    operation = asyncio.create_task(link.checkpoint(target, 60))
    await asyncio.to_thread(
        eventually, lambda: faults.listed(simulated.directory)[0].taken == 1, "the checkpoint begins"
    )
    return operation


async def test_an_orphan_finishes_alone_before_the_next_worker_starts(
    links: list[WorkerLink], simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    dying, heir = links
    operation = await checkpoint_that_hangs(dying, simulated, target)
    assert dying._claim is not None
    dying._claim.close()  # the broker's part of the claim goes with the broker; the worker's stays
    with pytest.raises(GPUError, match=r"still running: nothing can be suspended or resumed") as caught:
        await heir.start()
    assert caught.value.code is GPUErrorCode.WORKER_BUSY
    assert heir.pid is None
    alone = asyncio.create_task(heir.wait_for_previous_worker())
    faults.clear(simulated.directory)
    assert await operation > 0
    assert not alone.done(), "the worker is idle, but lives"
    await dying.close()
    await asyncio.wait_for(alone, 30)
    assert await heir.state(target) is ProcessState.CHECKPOINTED


async def test_an_orphan_is_alone_though_the_file_of_its_claim_was_deleted(
    links: list[WorkerLink], simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    dying, _ = links
    operation = await checkpoint_that_hangs(dying, simulated, target)
    assert dying._claim is not None
    dying._claim.path.unlink()
    dying._claim.close()
    claim = WorkerClaim(dying._claim.path)
    heir = WorkerLink(f"simulated:{simulated.directory}", claim=claim)
    try:
        with pytest.raises(GPUError, match=r"of an earlier broker is still running"):
            await heir.start()
        faults.clear(simulated.directory)
        assert await operation > 0
        await dying.close()
        await asyncio.wait_for(heir.wait_for_previous_worker(), 30)
        assert await heir.state(target) is ProcessState.CHECKPOINTED
    finally:
        await heir.close()
        claim.close()


def test_a_name_that_another_user_took_does_not_prevent_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (WorkerClaim(tmp_path / "worker.lock") for _ in range(2))
    assert theirs.take()
    fcntl.flock(theirs.descriptors()[0], fcntl.LOCK_UN)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(claims, "holder", lambda _address: (1, 54321))
    assert ours.take()
    for claim in (ours, theirs):
        claim.close()


async def test_a_replaced_worker_of_the_same_broker_needs_no_new_claim(
    links: list[WorkerLink], simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    first, second = links
    await first.lock(target, 1000)
    hung = first.pid
    faults.inject(simulated.directory, "checkpoint", "hang", times=1)
    with pytest.raises(GPUError) as caught:
        await first.checkpoint(target, 0.2)
    assert caught.value.code is GPUErrorCode.WORKER_HUNG
    assert await first.state(target) is ProcessState.LOCKED
    assert first.pid not in (None, hung)
    with pytest.raises(GPUError, match="still running"):
        await second.state(target)


def test_a_full_disk_does_not_prevent_the_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    ours, others = (WorkerClaim(tmp_path / "worker.lock") for _ in range(2))
    assert [ours.take(), ours.take(), others.take()] == [True, True, False]
    assert others.holder() == "an earlier broker"
    ours.close()
    assert others.take()
    others.close()


def test_a_worker_without_a_broker_ends_itself_at_the_deadline(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'ab')")
    faults.inject(simulated.directory, "lock", "hang")
    with worker_process(simulated) as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=1000, deadline_s=0.2)
        assert worker.process.wait(30) == -signal.SIGALRM
    assert kernel.run("x.read(2).decode()") == "ab"


def test_a_deadline_that_is_over_strikes_no_later_request(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'ab')")
    with worker_process(simulated) as worker:
        ask(worker, "state", kernel.pid, deadline_s=2)
        faults.inject(simulated.directory, "lock", "slow:2500")
        ask(worker, "lock", kernel.pid, timeout_ms=1000, deadline_s=60)
        ask(worker, "unlock", kernel.pid, deadline_s="soon")
        ask(worker, "unlock", kernel.pid)
        replies = [answer(worker) for _ in range(4)]
    assert ["error" in reply for reply in replies] == [False, False, True, False]
    assert "could not convert string to float: 'soon'" in replies[2]["error"]["message"]
