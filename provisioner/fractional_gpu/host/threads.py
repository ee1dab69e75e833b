"""Threads that start before they are needed: a user's limit of processes also counts threads, and can be reached at any later moment.

A pool of the standard library starts a thread when work comes. If the system then refuses one, the caller gets RuntimeError, and the
queued work may still be done later.
"""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor


class StartedThreads(ThreadPoolExecutor):
    """A pool whose `count` threads run from the start: work never lacks one. Raises OSError if they cannot."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(max_workers=count, thread_name_prefix=name)
        all_there = threading.Event()
        try:
            for _ in range(count):
                self.submit(all_there.wait)  # none is free before all are there, so each takes a new one
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
