"""The broker's end of the line to one kernel's extension: commands go down a stream, answers come back as requests.

The broker must know whether Python still runs in the kernel. It writes a keep-alive, and sees a moment later whether the stream was read,
which takes a step of Python in the kernel (`BrokerClient.gate` sees to that). Where the broker cannot see that, and from extensions of
earlier versions, a request every few seconds, the pulse, shows the same.
"""

import asyncio
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import GateAnswer, GateCommand, GateVerb

__all__ = ["OPEN_LINE_S", "GateLink", "Stream"]

OPEN_LINE_S: Final = (
    3 * PULSE_S
)  # from one keep-alive to the next while the gate is open: no decision depends on it then
_RESERVED: Final = re.compile(r"\breserved_mib=(\d{1,9})\b", re.ASCII)
_MOST_INPUTS = 64
_QUEUE = 64  # commands that the extension has not read; when it is full, the line is given up


class Stream(Protocol):
    """Carries the commands to the extension."""

    def keep_alive(self) -> bool:
        """Write an empty command, without waiting; return False if another write is under way."""

    def is_read(self) -> bool | None:
        """Whether the extension has read everything that was written; None: unknown here."""


class GateLink:
    """One connected extension. A newer connection of the same kernel replaces an older one."""

    def __init__(self, now_s: float, inputs: Iterable[str] = ()) -> None:
        self.last_pulse_s = now_s
        self.exempt = False  # the running cell declared that it does not use the GPU (`%%cpu`, `%gpu`)
        self.inputs = frozenset(inputs)  # the requests that wait for input, and use no GPU
        self.closed = False
        self.mute = False  # the last command got no answer in time, and nothing came from the extension since
        self.detail = ""  # of the last answer
        self.reserved_mib: int | None = (
            None  # what frameworks held when the last command was answered, if the answer says so
        )
        self.stream: Stream | None = None  # once it carries anything
        self._line_s = now_s  # when the last keep-alive was written, or last seen unread
        self._on_its_way = False  # that keep-alive has not been seen to be read
        self._numbers = itertools.count(1)
        self._queue: asyncio.Queue[GateCommand | None] = asyncio.Queue(_QUEUE)
        self._answers: dict[int, asyncio.Future[str]] = {}

    def send(self, verb: GateVerb, *, sentence: str = "", environment: Mapping[str, str] | None = None) -> None:
        """Send a command that needs no answer; dropped when the line is lost."""
        self._put(GateCommand(verb=verb, sentence=sentence, environment=dict(environment or {})))

    async def ask(self, verb: GateVerb, timeout_s: float) -> str:
        """Send a command and return the extension's word, or "" if none came in time or the line broke. Cancellation drops the answer."""
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
        """Note whether the extension reads, and write a keep-alive if the last one is `every_s` old. Called often; never blocks."""
        if self.stream is None or self.closed:
            return
        if self._on_its_way:
            read = self.stream.is_read()
            if read is False:
                self._line_s = now_s
                return  # no further keep-alive until this one is read: its silence is what counts
            if read:
                self.last_pulse_s = max(self.last_pulse_s, self._line_s)
            self._on_its_way = False
        if now_s - self._line_s >= every_s and self.stream.keep_alive():
            self._on_its_way, self._line_s = True, now_s

    def was_read(self) -> bool:
        """Whether the extension is known to have read every command."""
        return not self.closed and self._queue.empty() and self.stream is not None and self.stream.is_read() is True

    def forgive(self, seconds: float, now_s: float) -> None:
        """Do not count the last seconds as silence: the line was not looked at, or the process was stopped and could not read."""
        self.last_pulse_s = min(now_s, self.last_pulse_s + seconds)
        self._line_s = min(now_s, self._line_s + seconds)

    async def next(self) -> GateCommand | None:
        """Wait for the next command to write, None when the line is closed."""
        if self.closed and self._queue.empty():
            return None
        return await self._queue.get()

    def close(self) -> None:
        """End the line. Each `ask` that waits for an answer returns "" now."""
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
