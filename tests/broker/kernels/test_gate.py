"""The connection to a kernel's extension: every question gets an answer or "" in time, and a lost connection stays lost."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO

import pytest

from fractional_gpu.broker.api import handler as handler_module
from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import GateAnswer, GateCommand, GateVerb
from tests.broker.live import LiveBroker
from tests.support.world import until

LONG_S = 30.0


def answer(number: int, word: str) -> GateAnswer:
    return GateAnswer(number=number, word=word)


async def asked(link: GateLink) -> tuple[asyncio.Task[str], GateCommand]:
    """Ask; return the pending question and the command that the extension reads."""
    question = asyncio.create_task(link.ask(GateVerb.CLOSE, LONG_S))
    command = await link.next()
    assert command is not None
    return question, command


async def test_an_answer_reaches_the_question_whose_number_it_repeats() -> None:
    link = GateLink(0.0)
    first, one = await asked(link)
    second, two = await asked(link)
    assert one.number != two.number
    link.take(answer(two.number, "busy"), 1.0)
    link.take(answer(one.number, "closed"), 2.0)
    assert (await first, await second) == ("closed", "busy")
    assert link.last_pulse_s == 2.0


async def test_a_question_without_an_answer_ends_in_time() -> None:
    link = GateLink(0.0)
    assert await link.ask(GateVerb.CLOSE, 0.01) == ""
    command = await link.next()
    assert command is not None
    link.take(answer(command.number, "closed"), 1.0)  # too late: the caller has stopped waiting
    assert link._answers == {}


async def test_an_extension_that_does_not_answer_is_mute_until_it_says_anything() -> None:
    link = GateLink(0.0)
    told = [link.mute]
    assert await link.ask(GateVerb.CLOSE, 0.01) == ""
    told.append(link.mute)
    link.take(answer(0, "managed"), 1.0)
    assert [*told, link.mute] == [False, True, False]


async def test_commands_were_read_once_they_are_written_and_the_stream_is_empty() -> None:
    link, wire = on_a_wire()
    assert link.was_read()
    link.send(GateVerb.CLOSE)
    assert not link.was_read(), "it was not written yet"
    assert await link.next() is not None
    wire.read = False
    assert not link.was_read()
    wire.read = None
    assert not link.was_read(), "not known"
    wire.read = True
    assert link.was_read()
    link.close()
    assert not link.was_read()


async def test_a_line_that_closes_answers_all_questions_and_takes_no_more() -> None:
    link = GateLink(0.0)
    question, _ = await asked(link)
    link.close()
    link.close()
    assert await question == ""
    assert await link.ask(GateVerb.SHRINK, LONG_S) == ""
    link.send(GateVerb.OPEN)
    assert await link.next() is None
    assert await link.next() is None


async def test_what_was_said_before_a_line_closed_is_still_read() -> None:
    link = GateLink(0.0)
    link.send(GateVerb.NOTICE, sentence="first")
    link.close()
    command = await link.next()
    assert command is not None
    assert command.sentence == "first"
    assert await link.next() is None


async def test_an_extension_that_reads_nothing_has_lost_the_line() -> None:
    link = GateLink(0.0)
    question, _ = await asked(link)
    while not link.closed:
        link.send(GateVerb.NOTICE, sentence="again")
    assert await question == ""
    read = [await link.next() for _ in range(link._queue.qsize())]
    assert read[-1] is None, "the reader learns that it is over"


class Wire:
    """Replaces the stream; the test decides whether the extension has read it, and whether it accepts another line."""

    def __init__(self) -> None:
        self.lines = 0
        self.read: bool | None = True
        self.free = True

    def keep_alive(self) -> bool:
        self.lines += self.free
        return self.free

    def is_read(self) -> bool | None:
        return self.read


def on_a_wire() -> tuple[GateLink, Wire]:
    link, wire = GateLink(0.0), Wire()
    link.stream = wire
    return link, wire


def test_an_extension_that_reads_is_alive_and_is_written_to_now_and_then() -> None:
    link, wire = on_a_wire()
    for step in range(1, 201):
        now_s = step / 2
        link.look(now_s)
        assert now_s - link.last_pulse_s <= PULSE_S + 0.5
    assert wire.lines == 100 / PULSE_S


def test_an_extension_that_does_not_read_falls_silent_and_gets_no_further_line() -> None:
    link, wire = on_a_wire()
    wire.read = False
    for step in range(1, 101):
        link.look(step)
    assert (wire.lines, link.last_pulse_s) == (1, 0.0)
    wire.read = True
    link.look(200.0)
    link.look(201.0)
    assert (wire.lines, link.last_pulse_s) == (2, 200.0)


async def test_a_cell_is_exempt_from_when_it_says_so_until_it_says_what_ends_that() -> None:
    link, exempt = GateLink(0.0), []
    for word in ("managed", "exempt", "input", "open", "managed"):
        link.take(answer(0, word), 1.0)
        exempt.append(link.exempt)
    assert exempt == [False, True, True, False, False]


@contextmanager
def connected(live: LiveBroker) -> Iterator[tuple[GateLink, BinaryIO]]:
    """A connection as an extension opens it, and the lines it receives."""
    lease = live.lease()
    hello = json.dumps({"version": "1", "open": False, "busy": False}).encode()
    head = f"POST /v1/leases/{lease.lease_id}/gate HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {lease.token}\r\n"
    with socket.socket(socket.AF_UNIX) as line, line.makefile("rb") as lines:
        line.settimeout(LONG_S)
        line.connect(live.socket)
        line.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(hello) + hello)
        while lines.readline().strip():
            pass
        assert next_line(lines)["verb"] == ""
        link = live.broker.kernels[lease.lease_id].link
        assert link is not None
        until(lambda: link.stream is not None, "the line carries commands")
        link.last_pulse_s = link._line_s = 0.0  # when it was opened
        yield link, lines
    live.call("DELETE", f"/v1/leases/{lease.lease_id}")


def next_line(lines: BinaryIO) -> dict[str, Any]:
    size = int(lines.readline(), 16)
    line: dict[str, Any] = json.loads(lines.read(size))
    assert lines.readline() == b"\r\n"
    return line


def looked(live: LiveBroker, link: GateLink, *times_s: float) -> float:
    """Look at these times; return when Python was known to run."""

    async def look() -> float:
        for time_s in times_s:
            link.look(time_s)
        return link.last_pulse_s

    return live.on_loop(look)


def send(live: LiveBroker, link: GateLink, sentence: str) -> None:
    async def send() -> None:
        link.send(GateVerb.NOTICE, sentence=sentence)

    live.on_loop(send)


def test_a_kernel_that_does_not_read_its_line_is_silent(live: LiveBroker) -> None:
    with connected(live) as (link, lines):
        assert looked(live, link, *(step * PULSE_S for step in range(1, 10))) == 0
        assert next_line(lines)["verb"] == ""
        send(live, link, "the next")
        assert next_line(lines)["sentence"] == "the next", "what is not read is not written to again"


def test_a_keep_alive_comes_between_no_line_and_its_end(live: LiveBroker) -> None:
    with connected(live) as (link, lines):
        handler: Any = link.stream
        stream = handler.request.connection.stream

        async def taken_just_now() -> None:
            while stream.writing():
                stream._handle_write()
            link.look(PULSE_S)  # before the connection has noticed that it is replaced

        send(live, link, "x" * 4_000_000)
        until(stream.writing, "the line is more than the system takes at once")
        with ThreadPoolExecutor(1) as reader:
            notice = reader.submit(next_line, lines)
            live.on_loop(taken_just_now)
            assert len(notice.result()["sentence"]) == 4_000_000
        send(live, link, "the next")
        assert next_line(lines)["sentence"] == "the next"


def test_where_the_system_does_not_tell_who_reads_kernels_count_as_alive(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold(_: socket.socket) -> bool:
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(handler_module, "unread", untold)
    with connected(live) as (link, lines):
        for number in range(1, 4):
            assert looked(live, link, number * PULSE_S, number * PULSE_S + 1) == number * PULSE_S
            assert next_line(lines)["verb"] == "", "it is kept alive all the same"


STUCK = """
import ctypes, sys, threading
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.messages import GateHello
client = BrokerClient(sys.argv[1], token=sys.argv[2])
lines = client.gate(sys.argv[3], GateHello(version="1", open=False, busy=False))
threading.Thread(target=list, args=(lines,), daemon=True).start()
while sys.stdin.readline():
    ctypes.PyDLL(None).system(b"echo stuck; read line")  # without giving the GIL back
"""


@pytest.mark.promise("race-stuck")
def test_a_process_whose_python_does_not_run_reads_nothing(live: LiveBroker) -> None:
    lease = live.lease()
    kernel = live.broker.kernels[lease.lease_id]
    argv = [sys.executable, "-c", STUCK, live.socket, lease.token, lease.lease_id]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        until(lambda: kernel.link is not None and kernel.link.stream is not None, "the line carries commands")
        link = kernel.link
        assert link is not None
        link.last_pulse_s = link._line_s = 0.0

        def is_heard(line_s: float) -> bool:
            return looked(live, link, line_s) == line_s

        until(lambda: is_heard(PULSE_S), "it is heard")
        process.stdin.write("be stuck\n")
        assert process.stdout.readline() == "stuck\n"
        with pytest.raises(AssertionError, match="it is heard"):
            until(lambda: is_heard(2 * PULSE_S), "it is heard", deadline_s=0.5)
        process.stdin.write("go on\n")
        until(lambda: is_heard(2 * PULSE_S), "it is heard again")
        process.stdin.close()
    live.call("DELETE", f"/v1/leases/{lease.lease_id}")


@pytest.mark.parametrize(
    ("detail", "held"),
    [
        ("gc, torch, reserved_mib=1234", 1234),
        ("gc, torch", None),
        ("reserved_mib=", None),
        ("reserved_mib=-5", None),
        ("reserved_mib=12345678901234567890", None),
    ],
)
async def test_what_frameworks_hold_is_known_from_the_answer_until_the_next_command(
    detail: str, held: int | None
) -> None:
    link = GateLink(0.0)
    asked = asyncio.create_task(link.ask(GateVerb.SHRINK, 30))
    command = await link.next()
    assert command is not None
    link.take(GateAnswer(number=command.number, word="done", detail=detail), 1.0)
    assert (await asked, link.reserved_mib) == ("done", held)
    link.take(GateAnswer(number=0, word="managed"), 2.0)
    assert link.reserved_mib == held
    again = asyncio.create_task(link.ask(GateVerb.PREEMPT, 30))
    await link.next()
    assert link.reserved_mib is None
    link.close()
    assert await again == ""
