"""Asks for the GPU where a task or a timer of the notebook blocks the main loop of a suspended kernel.

An `asyncio` task outlives the cell that started it. If it uses the GPU while the kernel is suspended, its call blocks in the driver, and
the main loop with it: the kernel reads no request any more, so it stays idle by its messages, no cell reaches the gate, and interrupts have
no effect. Only the extension's threads run on.

The broker's keep-alives, one every `PULSE_S` seconds while the kernel is suspended, drive the watch. At one of them it hands a callback to
the main loop. If that has not run at the next one, and no cell holds the loop, the watch takes part in the kernel's ticket, as a waiting
cell does, until the gate opens or the callback runs. A task that only computes for so long looks the same, and costs a resume; so does
a dialog of a GUI event loop (`%gui`), which is otherwise woken for the callback.
"""

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from fractional_gpu_kernel.cells.acquire import FREE, Acquirer, Waiter
from fractional_gpu_kernel.cells.gate import Gate

BLOCKED = (
    "A task of this notebook blocks the kernel, perhaps in a GPU call: the kernel is not on the GPU. It asks for the GPU now; "
    "what was sent to it runs when the task lets it."
)


class LoopWatch:
    """The watch of one kernel.

    `schedule` hands a callback to the main loop, and returns whether that runs; `is_held` returns whether a cell may hold the loop;
    `notice` takes a sentence to show.
    """

    def __init__(
        self,
        schedule: Callable[[Callable[[], None]], bool],
        gate: Gate,
        acquirer: Acquirer,
        *,
        is_held: Callable[[], bool],
        notice: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._gate = gate
        self._acquirer = acquirer
        self._is_held = is_held
        self._notice = notice
        self._notes: Waiter | None = None  # the callback on the main loop leaves FREE here

    def look(self) -> None:
        """Called now and then by one thread. Never blocks. Raises RuntimeError if there are no more threads."""
        notes, self._notes = self._notes, None
        if not self._gate.is_shut_again or self._is_held():
            return
        if notes is None or not notes.empty():
            notes = SimpleQueue()
            if self._schedule(partial(notes.put, FREE)):
                self._notes = notes
            return
        threading.Thread(target=self._acquirer.hold, args=(notes,), name="gpu-loop", daemon=True).start()
        self._notice(BLOCKED)
