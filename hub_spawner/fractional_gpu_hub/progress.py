"""A list of progress events that any number of viewers follow, each from the beginning."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

__all__ = ["ProgressLog"]


class ProgressLog:
    """Events of one start after the other. Viewers may come at any time: before a start has begun, and after its end."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._closed = False
        self._begun = 0
        self._news = asyncio.Event()

    @property
    def count(self) -> int:
        """How many events there are."""
        return len(self._events)

    def add(self, progress: int, message: str) -> None:
        """Add an event; `progress` is out of 100."""
        self._events.append({"progress": progress, "message": message})
        self._wake()

    def begin(self) -> None:
        """Another start begins: viewers of it see its events only."""
        self._events = []
        self._closed = False
        self._begun += 1
        self._wake()

    def close(self) -> None:
        """There will be no more."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield every event of the present start, until there are no more. Cancellation ends it; others are not concerned."""
        told, begun = 0, self._begun
        while True:
            news = self._news
            if begun != self._begun:
                told, begun = 0, self._begun
            while told < len(self._events):
                told += 1
                yield self._events[told - 1]
            if self._closed:
                return
            await news.wait()
