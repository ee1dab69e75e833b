"""A process that can open nothing more."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["no_free_descriptors"]


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Every file and socket that this process would open fails with EMFILE; what is open stays usable.

    The limit is not set to zero: poll(2) refuses more descriptors than the limit, and a thread that waits in it would end.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with suppress(OSError):  # the free numbers below the limit are taken until there is none
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
