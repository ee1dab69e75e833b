"""Progress of a long command: nothing at first, a bar on a terminal, occasional lines elsewhere; and no remains of a bar."""

import errno
import threading

import pytest

from fractional_gpu.commands.terminal import progress as progress_module
from fractional_gpu.commands.terminal.progress import Progress
from tests.commands.terminal.test_layout import Terminal

ERASE = "\x1b[2K"  # the line that the cursor is in
HIDE_CURSOR = "\x1b[?25l"


class Screen(Terminal):
    """A terminal that records when a text was written."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self.awaited, self.has_come = awaited, threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.awaited in self.getvalue():
            self.has_come.set()
        return count


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def a_terminal_with_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "perf_counter", clock)
    return clock


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_QUIET_S", 0.001)


def test_a_short_command_shows_nothing() -> None:
    out = Terminal()
    with Progress("8 devices", out=out) as progress:
        count = progress.counter("sessions")
        for done in range(20):
            count(done, 20)
    assert out.getvalue() == ""


@pytest.mark.usefixtures("soon")
def test_a_long_command_shows_a_bar_which_is_gone_at_its_end(clock: Clock) -> None:
    out = Screen("3 of 9 sessions after 2 s")
    with Progress("8 devices [red]", out=out) as progress:
        clock.now_s += 2.0
        progress.counter("sessions")(3, 9)
        assert out.has_come.wait(60)
        assert "8 devices [red]" in out.getvalue()
        out.has_come.clear()
        out.awaited = "4 of 9 jobs after 5 s"
        clock.now_s += 3.0
        progress.counter("jobs")(4, 9)
        assert out.has_come.wait(60)
    assert out.getvalue().endswith(ERASE)
    assert HIDE_CURSOR not in out.getvalue()


@pytest.mark.usefixtures("soon")
def test_a_terminal_that_goes_away_does_not_change_how_a_command_ends() -> None:
    class Fragile(Screen):
        is_gone = False

        def write(self, text: str) -> int:
            if self.is_gone:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    out = Fragile("3 of 9")

    def simulate() -> None:
        with Progress("8 devices", out=out) as progress:
            progress.counter("sessions")(3, 9)
            assert out.has_come.wait(60)
            out.is_gone = True
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate()
    assert "3 of 9" in out.getvalue()


@pytest.mark.usefixtures("soon")
def test_elsewhere_each_text_is_a_line_once_and_a_silent_one_none() -> None:
    class Log(Screen):
        def isatty(self) -> bool:
            return False

    out = Log("suspending a")
    with Progress("suspending a ...", out=out) as progress:
        assert out.has_come.wait(60)
        out.has_come.clear()
        out.awaited = "suspending b"
        progress.what = "suspending b ..."
        assert out.has_come.wait(60)
    assert out.getvalue() == "suspending a ...\nsuspending b ...\n"
    silent = Log("never")
    with Progress("reading", silent=True, out=silent) as progress:
        progress.say("a line")
    assert silent.getvalue() == "a line\n"
