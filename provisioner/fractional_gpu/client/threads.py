"""Runs blocking calls for an event loop, even a forked or an exiting one: one thread per call.

`asyncio.to_thread` uses the loop's default executor. After a fork, the child has the executor without its threads, so its work
never runs. Once the interpreter begins to exit (`atexit`), executors refuse work. And calls that wait for the GPU would fill it.
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

# A forked loop shares its wake-up pipe with its parent, which may read its bytes: so it also wakes by time.
_LOST_WAKEUP_S = 0.05


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a daemon thread, or in this thread if none can be started, and return its result.

    Cancellation takes effect at once: `work` continues in its thread, and its result is discarded.
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

    done.set_running_or_notify_cancel()  # so that a cancelled wait does not cancel it
    try:
        start(threading.Thread(target=run, name=f"gpu-{getattr(work, '__name__', 'work')}", daemon=True))
    except OSError:  # the system has no thread left, or Python 3.12 starts none while it exits
        run()
    outcome = asyncio.wrap_future(done)
    try:
        while not outcome.done():
            await asyncio.wait({outcome}, timeout=_LOST_WAKEUP_S)
        return outcome.result()
    finally:
        outcome.cancel()
