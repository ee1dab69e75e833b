"""Ends processes, and explains an eviction to the user of the next kernel.

- A process is identified by its start time and signalled through its pidfd, first with SIGTERM and, after a grace period, with SIGKILL.
  After each round, the remaining processes are listed again, because they can start others while they are ending.
- Jupyter restarts an evicted kernel under the same id with a new lease. A sentence tells the new lease's user who ended the previous
  kernel, when and why. These sentences are kept in memory, for the last `_MOST` evictions only.
"""

import asyncio
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.host.process import ProcessIdentity, open_pidfd
from fractional_gpu.protocol.errors import ConflictError

GRACE_S: Final = 5.0
EVICTED: Final = "evicted"  # why the lease ended; its successor's story uses the word, too
_ROUNDS: Final = 20
_MOST: Final = 1000


async def end_processes(left: Callable[[], Awaitable[Sequence[ProcessIdentity]]], what: str) -> None:
    """End the processes that `left` returns, and repeat until it returns none. `what` describes them in errors.

    Raises ConflictError if a process does not end, or if the broker is not permitted to signal it. Processes that have already been
    signalled still exit if this call is cancelled.
    """
    deadline_s = time.monotonic() + GRACE_S
    number, found = signal.SIGTERM, await left()
    for _ in range(_ROUNDS):
        if not found:
            return
        await wait_for_end(found, max(0.0, deadline_s - time.monotonic()), number)
        # Every later round uses SIGKILL, since its processes outlived the grace period or were started after the first round.
        number, deadline_s = signal.SIGKILL, time.monotonic() + GRACE_S
        found = await left()
    if found:
        raise ConflictError(
            f"{what.format(pid=found[0].pid)} is still running after SIGKILL; check the system log",
            reason="does-not-end",
        )


async def wait_for_end(
    processes: Sequence[ProcessIdentity], patience_s: float, number: signal.Signals | None = None
) -> None:
    """Wait up to `patience_s` seconds for these processes to end. If `number` is given, send them this signal first.

    Raises ConflictError if the broker is not permitted to signal a process.
    """
    pidfds: dict[int, asyncio.Event] = {}
    loop = asyncio.get_running_loop()
    try:
        for identity in processes:
            try:
                pidfd = open_pidfd(identity)
                pidfds[pidfd] = ended = asyncio.Event()
                loop.add_reader(pidfd, ended.set)
                if number is not None:
                    signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                continue  # it has ended
            except PermissionError:
                if number is not None:
                    raise ConflictError(
                        f"the broker's user is not permitted to end process {identity.pid}; end it yourself, or run the broker as root",
                        reason="not-permitted",
                    ) from None
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for ended in pidfds.values():
                    await ended.wait()
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)
            os.close(pidfd)


class Evictions:
    """The reasons for one broker's evictions, by user and kernel id. All methods run on the broker's loop."""

    def __init__(self) -> None:
        self._sentences: OrderedDict[tuple[int, str], str] = OrderedDict()

    def begin(self, kernel: Kernel, who: str, why: str) -> str:
        """Record who is ending the kernel and why. Return a sentence that explains this to the next kernel's user."""
        ended = f"at {time.strftime('%H:%M', time.localtime())}{why}."
        if kernel.launch.command:
            kernel.notices.append(f"{who} ended this command {ended}")
            kernel.notify()  # its runner prints it
        sentence = f"{who} ended the previous kernel {ended} Its variables are lost: run the cells again."
        if kernel.facts.kernel_id:
            self._sentences[kernel.uid, kernel.facts.kernel_id] = sentence
            if len(self._sentences) > _MOST:
                self._sentences.popitem(last=False)
        return sentence

    def failed(self, kernel: Kernel) -> None:
        self._sentences.pop((kernel.uid, kernel.facts.kernel_id), None)

    def successor(self, kernel: Kernel) -> str:
        """Return why the previous kernel was evicted, or "" if it was not. Only the first call returns the sentence."""
        return self._sentences.pop((kernel.uid, kernel.facts.kernel_id), "")
