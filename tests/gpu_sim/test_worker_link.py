"""The broker's end: deadlines, replacement, order and cancellation."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.gpu import worker_link, worker_process
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.worker_link import WorkerClaim, WorkerLink
from fractional_gpu.host.process import ProcessIdentity, identify
from tests.gpu_sim.kernels import Kernel
from tests.support import faults

C, S = GPUErrorCode, ProcessState


@pytest.fixture
async def link(simulated: host.SimulatedHost) -> AsyncIterator[WorkerLink]:
    link = WorkerLink(f"simulated:{simulated.directory}")
    yield link
    faults.clear(simulated.directory)
    await link.close()


@pytest.fixture
def target(kernel: Kernel) -> ProcessIdentity:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'ab')")
    return identify(kernel.pid)


def lives(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until_taken(simulated: host.SimulatedHost, times: int = 1) -> None:
    """Wait until a fault struck so often; nothing signals it."""
    async with asyncio.timeout(30):
        while sum(fault.taken for fault in faults.listed(simulated.directory)) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_lease_goes_out_and_comes_back(link: WorkerLink, kernel: Kernel, target: ProcessIdentity) -> None:
    await link.start()
    worker = link.pid
    assert await link.state(target) is S.RUNNING
    assert await link.lock(target, 1000) >= 0
    assert await link.checkpoint(target, 10) > 0
    assert await link.state(target) is S.CHECKPOINTED
    assert await link.restore(target, None, 10) > 0
    await link.unlock(target)
    assert await link.state(target) is S.RUNNING
    assert link.pid == worker
    assert kernel.run("x.read(2).decode()") == "ab"


async def test_errors_arrive_with_their_code(link: WorkerLink, target: ProcessIdentity, kernel: Kernel) -> None:
    with pytest.raises(GPUError) as caught:
        await link.unlock(target)
    assert caught.value.code is C.ILLEGAL_STATE
    other = ProcessIdentity(target.boot_id, target.pid, target.start_time + 1)
    with pytest.raises(GPUError) as caught:
        await link.lock(other, 10)
    assert caught.value.code is C.WRONG_IDENTITY
    kernel.kill()
    assert await link.state(target) is S.GONE
    with pytest.raises(GPUError) as caught:
        await link.lock(target, 10)
    assert caught.value.code is C.NO_SUCH_PROCESS


async def test_a_hung_worker_is_killed_and_replaced(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    await link.lock(target, 1000)
    hung = link.pid
    assert hung is not None
    faults.inject(simulated.directory, "checkpoint", "hang")
    with pytest.raises(GPUError, match=r"checkpoint of process \d+ within 0.1 s") as caught:
        await link.checkpoint(target, 0.1)
    assert caught.value.code is C.WORKER_HUNG
    assert not lives(hung)
    assert await link.state(target) is S.LOCKED
    assert link.pid not in (None, hung)
    await link.checkpoint(target, 10)


async def test_a_driver_at_work_may_take_longer_to_tell_a_state_than_for_a_quick_operation(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "_ANSWER_S", 0.2)
    faults.inject(simulated.directory, "state", "slow:600")
    assert await link.state(target) is S.RUNNING


async def test_a_worker_that_fails_on_two_targets_for_no_known_reason_is_replaced(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    other = identify(os.getpid())

    async def fail(whom: ProcessIdentity) -> None:
        faults.inject(simulated.directory, "state", f"fail:{C.UNKNOWN.value}")
        with pytest.raises(GPUError):
            await link.state(whom)

    await link.start()
    first = link.pid
    for whom in (target, target):  # it may be the target's fault
        await fail(whom)
    await link.state(target)
    await fail(other)
    assert link.pid == first, "a success came between"
    await fail(target)
    assert await link.state(target) is S.RUNNING
    second = link.pid
    assert second not in (None, first)
    link.renew()
    await link.start()
    assert link.pid not in (None, second)


async def test_an_operation_that_was_done_but_answered_late_is_seen_by_looking(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    await link.lock(target, 1000)
    faults.inject(simulated.directory, "checkpoint", "late")
    with pytest.raises(GPUError) as caught:
        await link.checkpoint(target, 3)
    assert caught.value.code is C.WORKER_HUNG
    assert await link.state(target) is S.CHECKPOINTED


async def test_a_dead_worker_is_noticed_and_replaced(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    faults.inject(simulated.directory, "lock", "hang")
    call = asyncio.create_task(link.lock(target, 1000))
    behind = asyncio.create_task(link.state(target))
    await until_taken(simulated)
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)
    with pytest.raises(GPUError, match="status -9") as caught:
        await call
    assert caught.value.code is C.WORKER_DIED
    assert await behind is S.RUNNING


async def test_a_worker_that_died_idle_is_replaced_unnoticed(link: WorkerLink, target: ProcessIdentity) -> None:
    await link.start()
    dead = link.pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    async with asyncio.timeout(30):
        while link.pid is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert await link.state(target) is S.RUNNING
    assert link.pid not in (None, dead)


async def test_a_worker_that_cannot_start_says_why_each_time(tmp_path: Path) -> None:
    link = WorkerLink(f"simulated:{tmp_path}")
    for _ in range(2):
        with pytest.raises(GPUError, match="no simulated GPU host") as caught:
            await link.start()
        assert caught.value.code is C.NOT_INITIALIZED
    host.create(tmp_path, "1GiB")
    await link.start()
    await link.close()


async def test_a_missing_interpreter_is_an_error(link: WorkerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(GPUError, match="could not start") as caught:
        await link.start()
    assert caught.value.code is C.WORKER_DIED


def fails_once(error: Exception, then: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, but for its first call, which fails."""
    errors = [error]

    def function(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it takes and gives
        if errors:
            raise errors.pop()
        return then(*args, **kwargs)

    return function


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), TypeError("unexpected")], ids=str)
async def test_a_claim_that_cannot_be_taken_fails_one_call_and_not_the_next(
    simulated: host.SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    claim = WorkerClaim(tmp_path / "worker.lock")
    monkeypatch.setattr(claim, "take", fails_once(error, claim.take))
    link = WorkerLink(f"simulated:{simulated.directory}", claim=claim)
    async with asyncio.timeout(30):
        with pytest.raises(GPUError, match="could not request") as caught:
            await link.start()
        assert caught.value.code is C.WORKER_DIED
        await link.start()
    await link.close()
    claim.close()


async def test_a_worker_is_replaced_when_its_link_fails_in_the_middle(
    link: WorkerLink, target: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    await link.start()
    before = link.pid
    monkeypatch.setattr(worker_link, "parse", fails_once(TypeError("unexpected"), worker_process.parse))
    async with asyncio.timeout(30):
        with pytest.raises(GPUError, match="unexpected") as caught:
            await link.lock(target, 1000)
        assert caught.value.code is C.WORKER_DIED
        assert not lives(before)
        assert await link.state(target) is S.LOCKED


async def test_something_else_than_a_worker_is_an_error(
    simulated: host.SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impostor = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(impostor))
    for says in ("hello", '{"protocol": 99}', "[]"):
        impostor.write_text(f"#!/bin/sh\nprintf '{says}' >&0\nexec cat >/dev/null\n")
        impostor.chmod(0o700)
        link = WorkerLink(f"simulated:{simulated.directory}")
        with pytest.raises(GPUError) as caught:
            await link.start()
        assert caught.value.code is C.WORKER_DIED
        await link.close()


async def test_calls_are_served_in_order(link: WorkerLink, target: ProcessIdentity) -> None:
    done: list[str] = []

    async def note(name: str, call: asyncio.Task[int]) -> None:
        await call
        done.append(name)

    calls = [
        ("lock", asyncio.create_task(link.lock(target, 1000))),
        ("checkpoint", asyncio.create_task(link.checkpoint(target, 10))),
        ("restore", asyncio.create_task(link.restore(target, {}, 10))),
        ("unlock", asyncio.create_task(link.unlock(target))),
    ]
    await asyncio.gather(*(note(name, call) for name, call in calls))
    assert done == ["lock", "checkpoint", "restore", "unlock"]


async def test_a_cancelled_call_leaves_the_next_answers_right(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    fault = faults.inject(simulated.directory, "lock", "hang")
    begun = asyncio.create_task(link.lock(target, 1000))
    await until_taken(simulated)
    withdrawn = asyncio.create_task(link.unlock(target))
    following = asyncio.create_task(link.state(target))
    await asyncio.sleep(0)
    for task in (begun, withdrawn):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not following.done()
    faults.remove(simulated.directory, fault)
    # The begun lock was done, the withdrawn unlock was not, and no call got another's reply.
    assert await following is S.LOCKED
    assert await link.state(target) is S.LOCKED


async def test_a_cancelled_call_still_has_its_deadline(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    await link.lock(target, 1000)
    faults.inject(simulated.directory, "checkpoint", "hang")
    begun = asyncio.create_task(link.checkpoint(target, 0.3))
    await until_taken(simulated)
    begun.cancel()
    assert await link.state(target) is S.LOCKED


async def test_closing_finishes_what_is_in_hand_and_refuses_the_rest(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    fault = faults.inject(simulated.directory, "lock", "hang")
    begun = asyncio.create_task(link.lock(target, 1000))
    await until_taken(simulated)
    waiting = asyncio.create_task(link.state(target))
    await asyncio.sleep(0)
    worker = link.pid
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    faults.remove(simulated.directory, fault)
    await begun
    with pytest.raises(GPUError) as caught:
        await waiting
    assert caught.value.code is C.WORKER_DIED
    await closing
    assert not lives(worker)
    await link.close()
    with pytest.raises(GPUError, match="closed"):
        await link.state(target)


async def test_a_cancelled_close_kills_at_once(
    link: WorkerLink, simulated: host.SimulatedHost, target: ProcessIdentity
) -> None:
    faults.inject(simulated.directory, "lock", "hang")
    begun = asyncio.create_task(link.lock(target, 100_000))
    await until_taken(simulated)
    worker = link.pid
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(GPUError) as caught:
        await begun
    assert caught.value.code is C.WORKER_DIED
    assert not lives(worker)


async def test_an_interrupt_at_the_terminal_does_not_reach_the_worker(link: WorkerLink) -> None:
    await link.start()
    assert link.pid is not None
    assert os.getpgid(link.pid) != os.getpgid(0)
