"""The broker's end of the line to one kernel's extension: commands go down a stream, answers come back as requests."""

import asyncio
import itertools
from collections.abc import Mapping

from provisioner.protocol.messages import GateAnswer, GateCommand, GateVerb

__all__ = ["GateLink"]

_QUEUE = 64  # commands not yet read by the extension; a reader that slow has lost the line


class GateLink:
    """One connected extension. A newer connection of the same kernel replaces an older one."""

    def __init__(self, now_s: float) -> None:
        self.last_pulse_s = now_s
        self.exempt = False  # the running cell declared that it does not use the GPU (`%%cpu`, `%gpu`)
        self.closed = False
        self.detail = ""  # of the last answer
        self._numbers = itertools.count(1)
        self._queue: asyncio.Queue[GateCommand | None] = asyncio.Queue(_QUEUE)
        self._answers: dict[int, asyncio.Future[str]] = {}

    def send(self, verb: GateVerb, *, sentence: str = "", environment: Mapping[str, str] | None = None) -> None:
        """Send a command that needs no answer; dropped when the line is lost."""
        self._put(GateCommand(verb=verb, sentence=sentence, environment=dict(environment or {})))

    async def ask(self, verb: GateVerb, timeout_s: float) -> str:
        """Send a command and return the extension's word, or "" when none came in time or the line broke. Cancellation forgets it."""
        if self.closed:
            return ""
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._put(GateCommand(verb=verb, number=number))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return ""
        finally:
            del self._answers[number]

    def take(self, answer: GateAnswer, now_s: float) -> None:
        """Note an answer or a pulse; late and unknown numbers are ignored."""
        self.last_pulse_s = now_s
        if answer.number == 0:
            self.exempt = answer.word == "exempt" or (self.exempt and answer.word in ("pulse", "managed"))
            return
        waiting = self._answers.get(answer.number)
        if waiting is not None and not waiting.done():
            self.detail = answer.detail
            waiting.set_result(answer.word)

    async def next(self, patience_s: float) -> GateCommand | None:
        """Return the next command to write, an empty one as keep-alive after `patience_s`, or None when the line is closed."""
        if self.closed and self._queue.empty():
            return None
        try:
            async with asyncio.timeout(patience_s):
                return await self._queue.get()
        except TimeoutError:
            return GateCommand()

    def close(self) -> None:
        """End the line: whoever waits for an answer gets "" now."""
        if self.closed:
            return
        self.closed = True
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_result("")
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    def _put(self, command: GateCommand) -> None:
        if self.closed:
            return
        if self._queue.full():
            self.close()
            return
        self._queue.put_nowait(command)
