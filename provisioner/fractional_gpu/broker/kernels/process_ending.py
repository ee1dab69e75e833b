"""Ending processes, each exactly the one that is meant: asked to by SIGTERM, and made to by SIGKILL after a grace.

A process is known by its start time and signalled through its pidfd. Whoever asks says again and again which processes are left: one
may start others while it is asked to end.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from fractional_gpu.host.process import ProcessIdentity, open_pidfd
from fractional_gpu.protocol.errors import ConflictError

__all__ = ["GRACE_S", "end_processes"]

GRACE_S: Final = 5.0
_LOOKS: Final = 20


async def end_processes(left: Callable[[], Awaitable[Sequence[ProcessIdentity]]], what: str) -> None:
    """Return when `left` returns none any more. `what` names a process, with `{pid}`.

    Raises ConflictError for one that may not be signalled, or does not end. Cancelled: those that were told to end do so.
    """
    deadline_s = time.monotonic() + GRACE_S
    number, found = signal.SIGTERM, await left()
    for _ in range(_LOOKS):
        if not found:
            return
        await _signalled(found, number, max(0.0, deadline_s - time.monotonic()))
        number, deadline_s = signal.SIGKILL, time.monotonic() + GRACE_S
        found = await left()
    if found:
        raise ConflictError(
            f"{what.format(pid=found[0].pid)} does not end, even by SIGKILL: the machine's log may say why",
            reason="does-not-end",
        )


async def _signalled(processes: Sequence[ProcessIdentity], number: signal.Signals, patience_s: float) -> None:
    """Signal exactly these and wait until they have ended, but not longer. Raises ConflictError for one that we may not signal."""
    pidfds: dict[int, asyncio.Event] = {}
    loop = asyncio.get_running_loop()
    try:
        for identity in processes:
            try:
                pidfd = open_pidfd(identity)
            except ProcessLookupError:
                continue  # it has ended
            pidfds[pidfd] = ended = asyncio.Event()
            loop.add_reader(pidfd, ended.set)
            _send(pidfd, identity, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for ended in pidfds.values():
                    await ended.wait()
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def _send(pidfd: int, identity: ProcessIdentity, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise ConflictError(
            f"the broker's user may not end process {identity.pid}; a broker that runs as root may",
            reason="not-permitted",
        ) from None
