"""When output has colours: the conventions of terminals, NO_COLOR and FORCE_COLOR."""

import io
import subprocess
import sys

import pytest

from fractional_gpu.commands.terminal.text import Style, line, shown
from tests.commands.terminal.test_layout import Terminal

WORD = line("a ", ("lost", Style.WRONG), " GPU")
PLAIN, BOLD, RED = "a lost GPU\n", "a \x1b[1mlost\x1b[0m GPU\n", "a \x1b[1;31mlost\x1b[0m GPU\n"


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {}, RED),
        (True, {"NO_COLOR": "1"}, BOLD),
        (True, {"NO_COLOR": "0"}, BOLD),
        (True, {"NO_COLOR": ""}, RED),
        (True, {"TERM": "dumb"}, PLAIN),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, BOLD),
        (False, {}, PLAIN),
        (False, {"NO_COLOR": "1"}, PLAIN),
        (False, {"FORCE_COLOR": "1"}, RED),
        (True, {"COLUMNS": "0"}, RED),
        (False, {"FORCE_COLOR": ""}, PLAIN),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    is_terminal: bool, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    assert shown([WORD], Terminal() if is_terminal else io.StringIO()) == expected


DURING_WORK = (
    "fractional_gpu_kernel.extension",
    "fractional_gpu_kernel.server.app",
    "fractional_gpu.jupyter.provisioner",
    "fractional_gpu.broker.process.app",
    "fractional_gpu.gpu.worker",
    "fractional_gpu_hub.mixin",
    "fractional_gpu.commands.run.run",
    "fractional_gpu.commands.completion",
)


def test_commands_that_run_during_users_work_load_no_tables() -> None:
    probe = f"import sys, {', '.join(DURING_WORK)}; print('rich' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"
