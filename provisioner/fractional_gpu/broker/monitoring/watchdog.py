"""Ends a broker whose event loop is blocked, and logs the stacks of all its threads.

A thread passes a callback to the loop and waits for it to run. If it does not run in time, the broker exits as if killed by SIGKILL, and
the next client or the supervisor starts another. Only time during which this thread was running counts, because a broker that was paused
(by SIGSTOP, a frozen control group or sleep) was not blocked. A broker that is being debugged is not ended either. If the loop resumes
while the stacks are being written, the broker keeps running. Native code that holds the GIL also stops this thread, so such a block goes
unnoticed.
"""

import asyncio
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from fractional_gpu.host.threads import start

EXIT_HUNG = 70  # exit status of a broker that ended itself; systemd's Restart=on-failure starts it again
_LONGEST_TICK_S = 2.0
_TICKS = 10  # the least number of ticks within the limit
_SYSTEMD_TICK_S = 30.0  # a sixth of the unit's WatchdogSec
_DEBUGGERS = frozenset({"pdb", "pydevd", "debugpy"})


async def notify_systemd() -> None:
    """Tell systemd that the broker accepts connections, then keep reporting that its loop is running (`Type=notify`, `WatchdogSec`).

    Runs until cancelled.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as line:
        while True:
            if address:
                with suppress(OSError):  # systemd is busy or restarting, and will receive the next one
                    line.sendto(b"READY=1\nWATCHDOG=1", address.replace("@", "\0", 1) if address[0] == "@" else address)
            await asyncio.sleep(_SYSTEMD_TICK_S)


@contextmanager
def watchdog(limit_ms: int | None) -> Iterator[None]:
    """Watch the event loop during the `with` block. If it is blocked for `limit_ms`, end the process. None means no limit."""
    if limit_ms is None:
        yield
        return
    over = threading.Event()
    watch = partial(_watch, asyncio.get_running_loop(), limit_ms / 1000, over)
    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    start(thread)
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(loop: asyncio.AbstractEventLoop, limit_s: float, over: threading.Event) -> None:
    tick_s = min(_LONGEST_TICK_S, limit_s / _TICKS)
    still_s, looked_s = 0.0, time.monotonic()
    answered = _probe(loop)
    while not over.wait(tick_s):
        now_s = time.monotonic()
        # In any time beyond two ticks, this thread, and so the loop, too, was stopped or got no processor time.
        passed_s, looked_s = min(now_s - looked_s, 2 * tick_s), now_s
        if answered.is_set():
            still_s, answered = 0.0, _probe(loop)
        elif _is_debugged():
            still_s = 0.0
        else:
            still_s += passed_s
        if still_s >= limit_s:
            _write_stacks(still_s)
            if not answered.wait(tick_s):
                os._exit(EXIT_HUNG)
            _write(f"the event loop continued after {still_s:.0f} s: the broker keeps serving")


def _probe(loop: asyncio.AbstractEventLoop) -> threading.Event:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered


def _is_debugged() -> bool:
    if not _DEBUGGERS.isdisjoint(sys.modules):
        return True
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:
        return False
    return any(line.startswith(b"TracerPid:") and line.split()[1] != b"0" for line in status.split(b"\n"))


def _write_stacks(still_s: float) -> None:
    """Write every thread's stack to the log, bypassing Python's logging, whose lock the blocked thread may hold."""
    _write(
        f"the event loop has been blocked for {still_s:.0f} s: the broker exits, and restarts when it is needed; no kernel "
        "loses anything. Stacks of its threads, most recent call first:"
    )
    for descriptor in _log_descriptors():
        # This function is written in C and allocates nothing, so no lock of the blocked thread can block it.
        faulthandler.dump_traceback(descriptor, all_threads=True)


def _write(sentence: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 CRITICAL {sentence}\n".encode()
    for descriptor in _log_descriptors():
        try:
            os.write(descriptor, line)
        except OSError:
            continue  # a full disk must not keep a blocked broker alive


def _log_descriptors() -> list[int]:
    found = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            with suppress(OSError, ValueError, AttributeError):  # a closed stream, no stream, or no file
                found.append(handler.stream.fileno())
    return found
