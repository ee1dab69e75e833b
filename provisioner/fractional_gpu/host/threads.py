"""Threads that start before they are needed: a user's process limit also counts threads, and may be reached at any later time.

The standard library's pool starts a thread when work arrives. If the system refuses the thread, the caller gets RuntimeError, yet the
queued work may run later.
"""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor


class StartedThreads(ThreadPoolExecutor):
    """A thread pool that starts all its `count` threads at once. Raises OSError if the system has no threads left."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(max_workers=count, thread_name_prefix=name)
        all_there = threading.Event()
        try:
            for _ in range(count):
                self.submit(all_there.wait)  # none is free before all have started, so each needs a new one
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
