"""The broker's end of the line to one kernel's extension: commands go down a stream, answers come back as requests.

Does Python still run in the kernel? An extension used to prove it with a request every few seconds, its pulse. Now the broker sees by
itself whether the stream is read, at a fraction of the cost: it writes a keep-alive, and a moment later it has been read or not (how
our client sees to it that this takes a step of Python: `BrokerClient.gate`). Extensions that pulse, and brokers that cannot see it,
do as before.
"""

import asyncio
import itertools
import re
from collections.abc import Mapping
from typing import Final, Protocol

from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import GateAnswer, GateCommand, GateVerb

__all__ = ["OPEN_LINE_S", "GateLink", "Stream"]

OPEN_LINE_S: Final = 3 * PULSE_S  # from one keep-alive to the next while the gate is open: nobody needs a proof
_RESERVED: Final = re.compile(r"\breserved_mib=(\d{1,9})\b", re.ASCII)
_MOST_INPUTS = 64
_QUEUE = 64  # commands not yet read by the extension; a reader that slow has lost the line


class Stream(Protocol):
    """What carries the commands to the extension."""

    def keep_alive(self) -> bool:
        """Write an empty command; returns whether that was possible, for another line may be under way. Waits for nothing."""

    def is_read(self) -> bool | None:
        """Whether the extension has read everything that was written; None: unknown here."""


class GateLink:
    """One connected extension. A newer connection of the same kernel replaces an older one."""

    def __init__(self, now_s: float) -> None:
        self.last_pulse_s = now_s
        self.exempt = False  # the running cell declared that it does not use the GPU (`%%cpu`, `%gpu`)
        self.inputs: frozenset[str] = frozenset()  # the requests that wait for input, and use no GPU
        self.closed = False
        self.mute = False  # the last question got no answer, and nothing was said since
        self.detail = ""  # of the last answer
        self.reserved_mib: int | None = None  # what frameworks held when the last command was answered, if that told
        self.stream: Stream | None = None  # once it carries anything
        self._line_s = now_s  # when the last keep-alive was written, or last seen not to be read
        self._on_its_way = False  # it has not been seen to be read
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
        self.reserved_mib = None  # an older answer's
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._put(GateCommand(verb=verb, number=number))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self.mute = True
            return ""
        finally:
            del self._answers[number]

    def take(self, answer: GateAnswer, now_s: float) -> None:
        """Note an answer or a pulse; late and unknown numbers are ignored."""
        self.last_pulse_s = now_s
        self.mute = False
        if answer.number == 0:
            self.exempt = answer.word == "exempt" or (self.exempt and answer.word in ("pulse", "managed", "input"))
            if answer.word == "input":
                self.inputs = frozenset(answer.detail.split()[:_MOST_INPUTS])
            return
        waiting = self._answers.get(answer.number)
        if waiting is not None and not waiting.done():
            self.detail = answer.detail
            reserved = _RESERVED.search(answer.detail)
            self.reserved_mib = int(reserved[1]) if reserved is not None else None
            waiting.set_result(answer.word)

    def look(self, now_s: float, every_s: float = PULSE_S) -> None:
        """Note whether the extension reads, and keep the line alive, `every_s`. For the watcher, every moment; never blocks."""
        if self.stream is None or self.closed:
            return
        if self._on_its_way:
            read = self.stream.is_read()
            if read is False:
                self._line_s = now_s
                return  # nothing more is written until it is
            if read:
                self.last_pulse_s = max(self.last_pulse_s, self._line_s)
            self._on_its_way = False
        if now_s - self._line_s >= every_s and self.stream.keep_alive():
            self._on_its_way, self._line_s = True, now_s

    def was_read(self) -> bool:
        """Whether the extension is known to have read every command."""
        return not self.closed and self._queue.empty() and self.stream is not None and self.stream.is_read() is True

    def forgive(self, seconds: float, now_s: float) -> None:
        """Count these last seconds as no silence: nobody looked, or the process could not read."""
        self.last_pulse_s = min(now_s, self.last_pulse_s + seconds)
        self._line_s = min(now_s, self._line_s + seconds)

    async def next(self) -> GateCommand | None:
        """Wait for the next command to write, None when the line is closed."""
        if self.closed and self._queue.empty():
            return None
        return await self._queue.get()

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
