"""What the broker remembers about a kernel: it notices the end of the process at once and then forgets everything."""

import asyncio
import os
import select
from typing import cast

import pytest

from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.host.process import ProcessIdentity, identify
from fractional_gpu.protocol.messages import GateAnswer
from tests.broker.live import DEADLINE_S, started_for

pytestmark = pytest.mark.promise("input")


def kernel() -> Kernel:
    return Kernel(lease_id="lease", uid=os.getuid(), token_sha256="")


async def test_the_end_of_the_process_is_noticed_at_once() -> None:
    watched, ended = kernel(), asyncio.Event()
    with started_for("lease") as fields:
        watched.watch_process(identify(fields["pid"]), ended.set)
        busy_at_first = watched.busy
        assert not ended.is_set()
    async with asyncio.timeout(DEADLINE_S):
        await ended.wait()
    watched.forget_process()
    assert (busy_at_first, watched.busy) == (True, False), "a live kernel without a listener may be busy"
    assert watched.identity is None


async def test_a_process_that_is_not_the_one_meant_is_not_watched() -> None:
    watched = kernel()
    with started_for("lease") as fields:
        identity = identify(fields["pid"])
        other = ProcessIdentity(identity.boot_id, identity.pid, identity.start_time + 1)
        for missing in (other, ProcessIdentity(identity.boot_id, 2**22 + 1, 1)):
            with pytest.raises(ProcessLookupError):
                watched.watch_process(missing, lambda: None)
            assert watched.identity is None


class Handles:
    """A watch that has seen these requests begin and none end."""

    busy = executing = runs_cell = True

    def __init__(self, *requests: str, certain: bool = True) -> None:
        self.handled = frozenset(requests)
        self.is_certain = certain


@pytest.mark.parametrize(
    ("watch", "inputs", "in_use"),
    [
        (Handles("cell"), "", True),
        (Handles("cell"), "cell", False),
        (Handles("cell"), "another", True),
        (Handles("cell", "completion"), "cell", True),
        (Handles("cell", "subshell"), "cell subshell", False),
        (Handles("cell", certain=False), "cell", True),
    ],
)
async def test_a_kernel_whose_cells_wait_for_input_is_not_in_use(watch: Handles, inputs: str, *, in_use: bool) -> None:
    watched = kernel()
    watched.identity = identify(os.getpid())
    watched.iopub = cast("IOPubWatch", watch)
    watched.link = GateLink(0.0)
    watched.link.take(GateAnswer(number=0, word="input", detail=inputs), 0.0)
    assert watched.in_use is in_use
    assert watched.executing is in_use
    watched.requests.waiters = 1
    assert watched.in_use, "the answer came, and it waits for the GPU"
    watched.requests.waiters = 0
    watched.link.take(GateAnswer(number=0, word="input"), 0.0)
    assert watched.in_use
    watched.cell.unused = watch.handled
    assert watched.in_use != watch.is_certain, "it holds room that it does not use"


async def test_forgetting_a_process_closes_what_was_held_of_it() -> None:
    watched = kernel()
    with started_for("lease") as fields:
        watched.watch_process(identify(fields["pid"]), lambda: None)
        pidfd = watched._pidfd
        assert pidfd is not None
        assert select.select([pidfd], [], [], 0) == ([], [], [])
        watched.forget_process()
        watched.forget_process()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)


async def test_a_change_between_looking_and_waiting_is_not_missed() -> None:
    watched = kernel()
    change = watched.change()
    watched.notify()
    async with asyncio.timeout(DEADLINE_S):
        await change.wait()
    assert not watched.change().is_set()
