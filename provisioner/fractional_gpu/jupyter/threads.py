"""Blocking work beside an event loop that may be forked, or run once more while its program exits.

`asyncio.to_thread` keeps its threads in the loop's default executor. That breaks two kinds of ordinary programs:

- After a fork the child has the parent's loop, and with it an executor that counts idle threads which the child does not
  have: work that it is given is never done. (A script that ran a notebook and then uses a `ProcessPoolExecutor`.)
- Once the interpreter has begun to exit, executors refuse work. (A script that shuts its kernels down in `atexit`.)

Here each call has a thread of its own, and nothing of it outlives the call.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

__all__ = ["in_thread"]

P = ParamSpec("P")
T = TypeVar("T")

# A loop that was forked shares the pipe that wakes it with its parent, and either may read the other's byte.
_LOST_WAKEUP_S = 0.05


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do the work in a daemon thread of its own and return what it returns. Raises what it raises.

    Cancelled, it returns at once; the work goes on to its end, and its outcome is dropped.
    """
    done = Future[T]()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(work, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again where the work is awaited
            done.set_exception(error)
        else:
            done.set_result(result)

    done.set_running_or_notify_cancel()  # a cancelled wait leaves it as it is
    threading.Thread(target=run, name=f"gpu-{getattr(work, '__name__', 'work')}", daemon=True).start()
    outcome = asyncio.wrap_future(done)
    try:
        while not outcome.done():
            await asyncio.wait({outcome}, timeout=_LOST_WAKEUP_S)
        return outcome.result()
    finally:
        outcome.cancel()
