"""Runs blocking calls for an event loop, with one thread per call, even in a forked process or while the interpreter exits.

`asyncio.to_thread` is not used, because it runs work in the loop's default executor. A forked child inherits the executor but not its
threads, so the work never runs. Once the interpreter begins to exit (`atexit`), executors refuse work. Calls that wait for the GPU would
also occupy all of the executor's threads.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from fractional_gpu.host.threads import start

T = TypeVar("T")
P = ParamSpec("P")

# A forked loop shares its wake-up pipe with its parent, which may read the bytes meant for the child. So the loop also wakes up by time.
_LOST_WAKEUP_S = 0.05


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a daemon thread and return its result. If no thread can be started, run it in this thread.

    Cancellation takes effect at once. `work` continues in its thread, and its result is discarded.
    """
    done = Future[T]()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(work, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - re-raised where the work is awaited
            done.set_exception(error)
        else:
            done.set_result(result)

    done.set_running_or_notify_cancel()  # prevents a cancelled wait from cancelling the work's future
    try:
        start(threading.Thread(target=run, name=f"gpu-{getattr(work, '__name__', 'work')}", daemon=True))
    except OSError:  # the system has no thread left, or Python 3.12 starts no more while it exits
        run()
    outcome = asyncio.wrap_future(done)
    try:
        while not outcome.done():
            await asyncio.wait({outcome}, timeout=_LOST_WAKEUP_S)
        return outcome.result()
    finally:
        outcome.cancel()
