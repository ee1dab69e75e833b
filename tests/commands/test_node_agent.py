"""How the node agent ends, and which events it must not miss."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from fractional_gpu.commands.node.agent import _keep_pods, ending

PATIENCE_S = 30.0


def lines_of(call: Callable[[], object], at: int = 0, action: Callable[[], object] = lambda: None) -> int:
    """Call it, and do the action at the start of the given line of Python that it runs; return how many lines it ran."""
    begun = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401 - a trace function
        nonlocal begun
        begun += event == "line"
        if event == "line" and begun == at:
            action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return begun


@pytest.fixture
def patience() -> Iterator[None]:
    """Fail if a test waits for ever, even for a lock."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"it still waits after {PATIENCE_S:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_agent_at_whatever_moment_of_its_wait_it_comes(number: signal.Signals) -> None:
    with ending() as ended:
        lines = lines_of(lambda: ended(0))
    assert lines
    for line in range(1, lines + 1):
        with ending() as ended:
            lines_of(lambda: ended(2 * PATIENCE_S), line, lambda: os.kill(os.getpid(), number))
            assert ended(0)


class Changed(threading.Event):
    """An event that, with `late`, another thread sets just after it was checked."""

    late = False

    def is_set(self) -> bool:
        """See Event."""
        was = super().is_set()
        if self.late:
            self.late = False
            self.set()
        return was


def test_a_pod_that_changes_while_the_agent_looks_is_seen_in_the_next_round() -> None:
    changed, kept, rounds = Changed(), list[object](), list[int]()
    engine: Any = SimpleNamespace(changed=changed, pods=list)
    seats: Any = SimpleNamespace(keep=kept.append, note=lambda _: None)
    agent: Any = SimpleNamespace(step=lambda: 0)

    def ended(_: float) -> bool:
        rounds.append(len(kept))
        changed.late = len(rounds) == 2
        return len(rounds) == 5

    _keep_pods(engine, agent, seats, ended, 0)
    assert rounds == [0, 1, 1, 2, 2], "late in the second round, seen in the third, once"
