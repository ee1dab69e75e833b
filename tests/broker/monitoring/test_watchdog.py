"""The watchdog ends a broker whose loop is blocked, and no other."""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fractional_gpu.broker.monitoring import watchdog as module
from fractional_gpu.broker.monitoring.watchdog import EXIT_HUNG, notify_systemd, watchdog

pytestmark = pytest.mark.promise("watchdog")

DEADLINE_S = 60.0


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    handler = logging.FileHandler(tmp_path / "broker.log")
    logging.getLogger().addHandler(handler)
    yield tmp_path / "broker.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> "Ends":
    ends = Ends()
    monkeypatch.setattr(os, "_exit", ends)
    return ends


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    clock = Clock(0.2)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture(autouse=True)
def undebugged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pdb, which pytest itself loads."""
    monkeypatch.setattr(module, "_DEBUGGERS", frozenset())


class Clock:
    """A clock that advances by `step_s` each time the watchdog looks."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._looks = 0
        self._looked = threading.Condition()

    def __call__(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self._looks * self._step_s

    def await_looks(self, more: int) -> None:
        """Block the calling thread until the watchdog has looked this many more times."""
        with self._looked:
            wanted = self._looks + more
            assert self._looked.wait_for(lambda: self._looks >= wanted, DEADLINE_S)


class Ends:
    """Replaces the function with which the watchdog ends the process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()


def a_recognizable_place(block: Callable[[], object]) -> None:
    block()


def test_a_blocked_loop_is_ended_with_the_stacks_of_its_threads_in_the_log(log_file: Path, ends: Ends) -> None:

    async def blocked() -> None:
        with watchdog(500):
            a_recognizable_place(lambda: ends.ended.wait(DEADLINE_S))

    asyncio.run(blocked())
    assert set(ends.codes) == {EXIT_HUNG}
    text = log_file.read_text()
    assert "CRITICAL the event loop has been blocked" in text
    assert "in a_recognizable_place" in text


async def test_a_loop_that_answers_between_long_steps_stays(ends: Ends, clock: Clock) -> None:
    with watchdog(1000):  # ten looks within the limit
        for _ in range(8):
            clock.await_looks(3)
            await asyncio.sleep(0)
    assert ends.codes == []


async def test_a_loop_that_a_debugger_holds_stays(monkeypatch: pytest.MonkeyPatch, ends: Ends, clock: Clock) -> None:
    monkeypatch.setattr(module, "_is_debugged", lambda: True)
    with watchdog(1000):
        clock.await_looks(20)
    assert ends.codes == []


@pytest.mark.parametrize("name", ["notify", "@jupyter-gpu-test"])
async def test_systemd_hears_that_the_loop_runs_until_it_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    address = f"{name}-{tmp_path.name}" if name[0] == "@" else str(tmp_path / name)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setattr(module, "_SYSTEMD_TICK_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0"))
        systemd.setblocking(False)
        telling = asyncio.create_task(notify_systemd())
        loop = asyncio.get_running_loop()
        for _ in range(3):
            assert await asyncio.wait_for(loop.sock_recv(systemd, 100), DEADLINE_S) == b"READY=1\nWATCHDOG=1"
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling


async def test_without_systemd_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(notify_systemd(), 0.05)
