"""A refusal answers only the request it belongs to, whatever else is pending for the same lease."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.services import residency
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import SuspendOutcome, SuspendRequested
from fractional_gpu.core.model import LeaseState
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import AcquireRequest, LeaseReply, Progress, ProgressKind
from tests.broker.driver import Quiet
from tests.broker.live import DEADLINE_S, Answer, LiveBroker, live_broker, started_for
from tests.support.world import until


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker() as broker:
        yield broker


@contextmanager
def acquiring(live: LiveBroker, lease: LeaseReply) -> Iterator[list[Progress]]:
    """A cell that waits for the lease; yields the broker's messages once the first has arrived."""
    told: list[Progress] = []
    heard = threading.Event()

    def acquire() -> None:
        with BrokerClient(live.socket, token=lease.token) as client:
            for progress in client.acquire(lease.lease_id, AcquireRequest(wait_ms=60_000)):
                told.append(progress)
                heard.set()

    asking = threading.Thread(target=acquire)
    asking.start()
    try:
        assert heard.wait(DEADLINE_S)
        yield told
    finally:
        asking.join(DEADLINE_S)
        assert not asking.is_alive()


def test_a_refused_suspend_is_no_answer_for_a_cell_that_waits(live: LiveBroker) -> None:
    lease = live.lease()
    live.call("POST", "/v1/devices/0/drain", {"evict_busy": False})

    async def ask_to_suspend() -> list[Effect]:
        return live.broker.dispatch(SuspendRequested(at_ms=now_ms(), lease_id=lease.lease_id))

    with started_for(lease.lease_id) as process:
        live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
        with acquiring(live, lease) as told:
            assert told[-1].reason == "wait.device-draining"
            assert "Declined" in [type(effect).__name__ for effect in live.on_loop(ask_to_suspend)]
            live.call("POST", "/v1/devices/0/undrain", {})
        assert [one.kind for one in told if one.kind != ProgressKind.WAITING] == [ProgressKind.GRANTED]


def resident(live: LiveBroker, stack: ExitStack) -> LeaseReply:
    """An idle kernel on the device."""
    lease = live.lease()
    process = stack.enter_context(started_for(lease.lease_id))
    live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
    with acquiring(live, lease) as told:
        pass
    assert told[-1].kind == ProgressKind.GRANTED

    async def be_idle() -> None:
        kernel = live.broker.kernels[lease.lease_id]
        assert kernel.iopub is not None
        kernel.iopub.close()
        kernel.iopub = cast("IOPubWatch", Quiet())
        live.broker.sync_busy_state(kernel)

    live.on_loop(be_idle)
    return lease


def test_a_refusal_reaches_all_who_requested_the_suspend_and_lets_the_cell_in(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def slow(*_: object) -> tuple[SuspendOutcome, int, str]:
        await go_on.wait()
        return SuspendOutcome.NOTHING_TO_SAVE, 0, "nothing"

    monkeypatch.setattr(live.broker.operations._swaps, "suspend", slow)
    answers: list[Answer] = []

    def suspend(lease: LeaseReply) -> threading.Thread:
        def ask() -> None:
            answers.append(live.call("POST", f"/v1/leases/{lease.lease_id}/suspend", {}))

        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    def view(lease: LeaseReply) -> Any:  # noqa: ANN401 - a view, which the loop's thread replaces
        return live.broker.arbiter.lease(lease.lease_id)

    with ExitStack() as stack:
        other, lease = resident(live, stack), resident(live, stack)
        slow_one = suspend(other)
        until(lambda: view(other).state is LeaseState.SUSPENDING, "the swap channel is in use")
        asking = [suspend(lease), suspend(lease)]
        kernel = live.broker.kernels[lease.lease_id]
        until(
            lambda: view(lease).suspend_requested and kernel.requests.suspend_waiters == 2,
            "both requests wait for the channel",
        )
        with acquiring(live, lease) as told:
            pass
        for thread in asking:
            thread.join(DEADLINE_S)
        assert [(one.status, one.error["reason"]) for one in answers] == [(409, "busy")] * 2
        assert told[-1].kind == ProgressKind.GRANTED
        live.loop.call_soon_threadsafe(go_on.set)
        slow_one.join(DEADLINE_S)
        assert answers[-1].status == 200
        for one in (other, lease):
            live.call("DELETE", f"/v1/leases/{one.lease_id}")


def test_who_hangs_up_while_the_kernel_is_busy_has_not_asked_for_its_suspend(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_IDLE_PATIENCE_S", 10 * DEADLINE_S)
    with ExitStack() as stack:
        lease = resident(live, stack)
        kernel = live.broker.kernels[lease.lease_id]
        watch = Quiet()
        watch.busy = watch.executing = watch.runs_cell = True
        kernel.iopub = cast("IOPubWatch", watch)
        client = stack.enter_context(BrokerClient(live.socket, token=lease.token))
        ended: list[FractionalGPUError] = []

        def suspend() -> None:
            try:
                client.suspend(lease.lease_id)
            except FractionalGPUError as error:
                ended.append(error)

        asking = threading.Thread(target=suspend)
        asking.start()
        until(lambda: kernel.requests.suspend_waiters == 1, "it waits for the end of the cell")
        client.close()
        asking.join(DEADLINE_S)
        assert ended
        until(lambda: kernel.requests.suspend_waiters == 0, "the broker has noticed")
        watch.busy = watch.executing = False
        live.on_loop(lambda: _look(live, kernel))
        view = live.broker.arbiter.lease(lease.lease_id)
        assert view is not None
        assert (view.state, view.suspend_requested) == (LeaseState.RESIDENT, False)
        live.call("DELETE", f"/v1/leases/{lease.lease_id}")


async def _look(live: LiveBroker, kernel: Kernel) -> None:
    live.broker.sync_busy_state(kernel)
