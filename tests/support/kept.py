"""What the tests of a file use one after another, each as the one before it left it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, TypeVar

__all__ = ["Kept"]

T = TypeVar("T")


class Kept(Generic[T]):
    """Created for the first test; ended with the block, and after a failed test."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._stack = ExitStack()
        self._made: list[T] = []

    @contextmanager
    def taken(self, has_failed: Callable[[], bool]) -> Iterator[T]:
        """Lend it to one test; `has_failed` reports that test's result at the end."""
        if not self._made:
            self._made.append(self._stack.enter_context(self._make()))
        yield self._made[0]
        if has_failed():
            self._made.clear()
            self._stack.close()

    def __enter__(self) -> "Kept[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
