"""The kernel's connection to its broker survives whatever goes wrong in the kernel's process."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.messages import GateVerb
from fractional_gpu_kernel.cells import broker_channel
from fractional_gpu_kernel.cells.broker_channel import BrokerChannel
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.settings import Settings
from tests.kernelext.parts import a_kernel
from tests.kernelext.scripted_broker import LEASE, TOKEN, ScriptedBroker
from tests.support.fake_broker import DEADLINE_S
from tests.support.world import until

pytestmark = pytest.mark.promise("deaf-kernels")


@pytest.fixture
def settings(folder: Path, broker: ScriptedBroker) -> Settings:
    (folder / "token").write_text(TOKEN)
    return Settings(LEASE, broker.path, str(folder / "token"))


@contextmanager
def a_line(
    settings: Settings, gate: Gate | None = None, notice: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    gate = gate or Gate(lambda _: None)
    line = BrokerChannel(a_kernel(settings=settings, gate=gate, notices=SimpleNamespace(add=notice)))
    before = set(threading.enumerate())
    line.start()
    threads = set(threading.enumerate()) - before
    try:
        yield
    finally:
        line.stop()
        for thread in threads:
            thread.join(DEADLINE_S)


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_command_that_cannot_be_carried_out_is_answered_and_the_line_stays(
    settings: Settings, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Timer, "start", no_thread)
    with a_line(settings):
        stream = broker.stream("gate")
        stream.command(GateVerb.SHRINK, 1)
        assert broker.answer_to(1) == "busy"
        assert "can't start new thread" in broker.bodies("answer")[0]["detail"]
        stream.command(GateVerb.CLOSE, 2)
        assert broker.answer_to(2) == "closed"
    assert broker.count("gate") == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
        TypeError("'NoneType' object is not callable"),
        AttributeError("'Fake' object has no attribute 'makefile'"),
        ValueError("negative file descriptor"),
        MemoryError(),
        BrokerUnavailableError("no descriptor is left", reason="no-descriptor"),
    ],
    ids=repr,
)
def test_a_line_that_cannot_be_opened_is_tried_again(
    settings: Settings, broker: ScriptedBroker, error: Exception
) -> None:
    errors = [error]

    class Short:
        """Fails to connect the first time."""

        lease_id = LEASE

        def connect(self) -> BrokerClient:
            if errors:
                raise errors.pop()
            return settings.connect()

    with a_line(cast("Settings", Short())):
        broker.stream("gate").command(GateVerb.CLOSE, 1)
        assert broker.answer_to(1) == "closed"
    assert errors == []


class Cut:
    """Connects once for the stream, and again only after it is mended."""

    lease_id = LEASE

    def __init__(self, settings: Settings, error: Exception) -> None:
        self._settings = settings
        self._error = error
        self.mended = False
        self.attempts = 0

    def connect(self) -> BrokerClient:
        self.attempts += 1
        if self.attempts > 1 and not self.mended:
            raise self._error
        return self._settings.connect()


def test_an_answer_that_cannot_be_sent_is_sent_as_soon_as_it_can(
    settings: Settings, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_channel, "SEND_AGAIN_S", 0.01)
    monkeypatch.setattr(broker_channel, "SEND_ATTEMPTS", 10**6)
    cut = Cut(settings, TypeError("'NoneType' object is not callable"))
    with a_line(cast("Settings", cut)):
        broker.stream("gate").command(GateVerb.CLOSE, 1)
        until(lambda: cut.attempts > 3, "it tries again")
        assert broker.count("answer") == 0
        cut.mended = True
        assert broker.answer_to(1) == "closed"


def test_a_kernel_that_cannot_answer_says_so_once_and_obeys(
    settings: Settings, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_channel, "SEND_AGAIN_S", 0.0)
    said: list[str] = []
    gate = Gate(lambda _: None)
    cut = Cut(settings, BrokerUnavailableError("no socket can be had", reason="no-descriptor"))
    with a_line(cast("Settings", cut), gate, said.append):
        stream = broker.stream("gate")
        stream.command(GateVerb.OPEN, 0)
        until(lambda: gate.is_open, "the gate is open")
        for number in (1, 2):
            before = cut.attempts
            stream.command(GateVerb.CLOSE, number)
            until(lambda before=before: cut.attempts >= before + broker_channel.SEND_ATTEMPTS, "it tries")  # type: ignore[misc]
        assert not gate.is_open
        stream.command(GateVerb.OPEN, 0)
        until(lambda: gate.is_open, "the gate is open")
    assert said == [broker_channel.UNHEARD.format(why="no socket can be had")]


def test_sockets_that_a_cell_took_away_are_there_for_the_line(settings: Settings, broker: ScriptedBroker) -> None:
    program = (
        "import socket, sys\n"
        "from fractional_gpu.client.client import BrokerClient\n"
        "from fractional_gpu.protocol.messages import GateAnswer\n"
        "socket.socket = None\n"
        "with BrokerClient(sys.argv[1], token=sys.argv[2]) as client:\n"
        "    client.answer(sys.argv[3], GateAnswer(number=7, word='closed'))\n"
    )
    subprocess.run([sys.executable, "-c", program, settings.socket_path, TOKEN, LEASE], check=True, timeout=DEADLINE_S)
    assert broker.answer_to(7) == "closed"
