"""Starts threads before they are needed, because threads count towards the user's process limit, which can be reached at any time.

The standard library's thread pool starts threads as work arrives. If the system refuses to start one, the caller gets RuntimeError even
though the work is queued and can still run later.
"""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor


class StartedThreads(ThreadPoolExecutor):
    """A thread pool that starts all `count` threads immediately. Raises OSError if the system allows no more threads."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(max_workers=count, thread_name_prefix=name)
        all_there = threading.Event()
        try:
            for _ in range(count):
                self.submit(all_there.wait)  # no thread is free before all have started, so each task starts a new one
        except RuntimeError as error:
            self.shutdown(wait=False)
            raise _shortage(error) from error
        finally:
            all_there.set()


def start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise _shortage(error) from error


def _shortage(error: RuntimeError) -> OSError:
    return OSError(errno.EAGAIN, str(error))
