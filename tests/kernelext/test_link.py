"""The kernel's line to its broker outlives what goes wrong in the kernel's process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from kernelext.gate import Gate
from kernelext.link import Link
from kernelext.settings import Settings
from kernelext.shrink import Shrinker
from provisioner.client import BrokerClient
from provisioner.protocol import limits
from provisioner.protocol.messages import GateCommand, GateVerb
from tests.kernelext.scripted_broker import LEASE, TOKEN, ScriptedBroker
from tests.support.fake_broker import DEADLINE_S


@pytest.fixture
def settings(folder: Path, broker: ScriptedBroker) -> Settings:
    (folder / "token").write_text(TOKEN)
    return Settings(LEASE, broker.path, str(folder / "token"))


@contextmanager
def a_line(settings: Settings) -> Iterator[None]:
    gate = Gate(lambda _: None)
    line = Link(settings, gate, Shrinker(lambda _: True, gate), lambda _: None, lambda _: None)
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


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_a_line_that_cannot_be_opened_is_tried_again(
    settings: Settings, broker: ScriptedBroker, error: Exception
) -> None:
    errors = [error]

    class Short:
        """Cannot connect, the first time."""

        lease_id = LEASE

        def connect(self) -> BrokerClient:
            if errors:
                raise errors.pop()
            return settings.connect()

    with a_line(cast("Settings", Short())):
        broker.stream("gate").command(GateVerb.CLOSE, 1)
        assert broker.answer_to(1) == "closed"
    assert errors == []


def test_a_broker_that_hears_by_itself_that_python_runs_gets_no_pulse(
    settings: Settings, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULSE_S", 0.05)
    with a_line(settings):
        stream = broker.stream("gate")
        broker.wait_for(lambda: len(broker.words()) >= 3)
        stream.send(GateCommand(hears=True))
        stream.command(GateVerb.CLOSE, 1)
        assert broker.answer_to(1) == "closed"
        so_far = len(broker.words())
        for number in range(2, 12):  # for as long as several pulses would take
            threading.Event().wait(limits.PULSE_S)
            stream.command(GateVerb.CLOSE, number)
            assert broker.answer_to(number) == "closed"
        assert len(broker.words()) <= so_far + 1, "the one that was under way"
        stream.break_off()
        broker.stream("gate", 2)
        broker.wait_for(lambda: len(broker.words()) >= so_far + 3)  # this one has not said so
