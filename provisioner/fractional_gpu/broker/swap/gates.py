"""Closing a kernel's gate before a suspend, and what the gate's answer says about cells that could still reach the GPU.

- An idle kernel: the gate is closed (`close`), so that no cell begins. A cell that runs is a reason to stop.
- A preempted kernel, or one whose next cell waits at its gate: the kernel is busy, so its gate is shut for the next cell only (`shut`),
  and being busy is no reason to stop.
- A gate that does not answer in time, or that is not connected, is no veto. The kernel is treated as one without our extension, once the
  devices' counters were quiet for a while. Python that does not run (an extension module that holds the GIL) looks idle by its
  messages, too, which is why the counters decide.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap.steps import StepError, SwapTimes
from fractional_gpu.core.effects import Suspend
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.host.process import is_alive
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.messages import (
    CELL_BARRED,
    CELL_EXAMINED,
    CELL_RUNS,
    NO_CELL_RUNS,
    GateVerb,
)

__all__ = ["SHRINK_TIMEOUT_S", "Gate", "Gates", "IsQuiet", "check_alive", "check_idle", "is_no_kernel", "runs_no_cell"]

SHRINK_TIMEOUT_S = 10.0
_LONGEST_REASON = 300
_MUTE_GATE_S = 0.25  # how long a gate may take to answer that did not answer the last time
_BETWEEN_CELLS_S = 1.0  # how long a kernel without a context may take to come to the end of its cell
_LOOK_S = 0.02
_DEAF_S = 5.0  # a process whose connections broke this long ago, and that answers nothing, is no kernel any more

IsQuiet = Callable[[Kernel], Awaitable[bool]]
"""Returns whether the devices have seen no work of a kernel for so long that it is idle, though its extension does not say so."""


async def _always_quiet(_kernel: Kernel) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Gate:
    """What became of a kernel's gate: whether it keeps cells out, as far as is known, and whether the extension answers.

    `barred`: a cell runs nevertheless, and waits before its first use of the GPU.
    """

    shut: bool = False
    answers: bool = False
    barred: bool = False


class Gates:
    """Closes and shuts gates. Until `connect`, every kernel counts as quiet."""

    def __init__(self, times: SwapTimes) -> None:
        self._times = times
        self._is_quiet: IsQuiet = _always_quiet

    def connect(self, is_quiet: IsQuiet) -> None:
        """Have `is_quiet` decide about kernels whose extension does not answer."""
        self._is_quiet = is_quiet

    async def close(self, kernel: Kernel) -> Gate:
        """Have our extension keep cells out from now on. Raises StepError if a cell runs."""
        await kernel.until_linked(self._times.gate_s)  # right after a broker's start it may not have come back yet
        link = kernel.link
        if link is not None:
            word = await link.ask(GateVerb.CLOSE, _MUTE_GATE_S if link.mute else self._times.gate_s)
            if word == "closed":
                check_idle(kernel)
                return Gate(shut=True, answers=True, barred=link.detail == CELL_BARRED)
            if word:
                raise StepError(SuspendOutcome.ABORTED, "a cell began to run")
            if link.closed:
                raise StepError(SuspendOutcome.ABORTED, "the kernel's extension hung up")
        check_idle(kernel)
        if not kernel.gated and link is None:
            return Gate()
        if not await self._is_quiet(kernel):
            raise StepError(
                SuspendOutcome.ABORTED,
                "the kernel's extension does not answer, and the kernel has worked on the GPU within the last seconds",
            )
        # The extension obeys a command in the step that reads it. Where the command was read, only the answer could not be sent.
        return Gate(shut=link is not None and link.was_read())

    async def shut(self, kernel: Kernel, effect: Suspend) -> Gate:
        """Have the next cell ask before it runs, where an extension is there to do so.

        An extension that does not answer (the running cell may hold the interpreter) obeys later. Until then a cell that runs blocks in
        CUDA, and gets its ticket for being busy. Raises StepError if the kernel was to be between two cells, and a cell runs in another of
        its shells.
        """
        check_alive(kernel)
        link = kernel.link
        if link is None:
            return Gate()
        word = await link.ask(GateVerb.PREEMPT, _MUTE_GATE_S if link.mute else self._times.gate_s)
        if effect.between_cells and word and link.detail in (CELL_RUNS, CELL_EXAMINED):
            raise StepError(SuspendOutcome.ABORTED, "a cell runs in another shell of the kernel")
        return Gate(shut=True, answers=bool(word), barred=bool(word) and link.detail == CELL_BARRED)

    async def comes_between_cells(self, kernel: Kernel) -> bool:
        """Return whether a busy kernel, whose gate was shut, ends its cell in a moment, or its cell is barred from the GPU.

        From then on no cell can create a context.
        """
        until_s = time.monotonic() + _BETWEEN_CELLS_S
        while time.monotonic() < until_s and kernel.link is not None:
            if kernel.requests.waiters > 0 or not kernel.in_use:
                await kernel.link.ask(GateVerb.PREEMPT, self._times.gate_s)
                return runs_no_cell(kernel)
            await asyncio.sleep(_LOOK_S)
        return False

    @staticmethod
    async def shrink(kernel: Kernel) -> StepError | None:
        """Have cached memory given back on the idle main loop; return what speaks against saving what is left."""
        if kernel.link is None:
            return StepError(SuspendOutcome.ABORTED, "the kernel's extension hung up")
        word = await kernel.link.ask(GateVerb.SHRINK, SHRINK_TIMEOUT_S)
        if word == "managed":
            return StepError(SuspendOutcome.IMPOSSIBLE, printable(kernel.link.detail)[:_LONGEST_REASON])
        if word != "done":  # also when it does not answer
            return StepError(SuspendOutcome.ABORTED, "the kernel's main loop was not idle")
        return None


def runs_no_cell(kernel: Kernel) -> bool:
    """Return whether the kernel's gate, which was shut just now, says that no cell runs that could reach the GPU past the gate."""
    return kernel.link is not None and kernel.link.detail in (NO_CELL_RUNS, CELL_BARRED)


def is_no_kernel(kernel: Kernel) -> bool:
    """Return whether the process that was a kernel with our extension runs no cells any more: `os.execv` put another program there.

    Whatever that program does is background work, as a child's of an idle kernel is.
    """
    doubt_s = kernel.iopub.doubt_s if kernel.iopub is not None else 0.0
    return kernel.gated and kernel.link is None and doubt_s >= _DEAF_S


def check_alive(kernel: Kernel) -> None:
    """Raise StepError if the kernel's process has ended."""
    if kernel.identity is None or not is_alive(kernel.identity):
        raise StepError(SuspendOutcome.ABORTED, "the kernel process ended")


def check_idle(kernel: Kernel) -> None:
    """Raise StepError if the kernel's process has ended or is busy."""
    check_alive(kernel)
    if kernel.busy:
        raise StepError(SuspendOutcome.ABORTED, "the kernel became busy")
