"""What can go wrong in this process, not at the broker, when our threads speak to the broker.

A cell may do to its process what it likes: replace functions of the standard library, use up the descriptors, change the user. Our threads
keep references of their own to what they need and go on trying. What still fails is one of these errors, and is told as such: starting
the broker again, or the kernel, would not help.
"""

__all__ = ["LOCAL_FAILURES", "describe", "is_local"]

LOCAL_FAILURES: tuple[type[Exception], ...] = (
    AttributeError,  # a module of the standard library with other functions
    ImportError,  # of what we import late: `sys.path` was changed, or its files are gone
    LookupError,
    MemoryError,
    OSError,  # no descriptors, no access
    RuntimeError,  # no threads; also what packages raise that forbid sockets
    TypeError,  # a function that was replaced by something else
    ValueError,  # a descriptor that was closed
)
_REASONS = frozenset({"no-descriptor", "no-access"})


def is_local(error: Exception) -> bool:
    """Return whether this process cannot reach the broker, whatever the broker does."""
    return getattr(error, "reason", None) in _REASONS or isinstance(error, LOCAL_FAILURES)


def describe(error: Exception) -> str:
    """Return what went wrong, for people."""
    return str(error) if hasattr(error, "reason") else f"{type(error).__name__}: {error}"
