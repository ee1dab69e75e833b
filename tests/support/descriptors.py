"""A process that can open nothing more."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_free_descriptors"]


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Every file and socket that this process would open fails with EMFILE; what is open stays usable."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
