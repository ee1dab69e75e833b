"""Tab in real shells, set up as `jupyter gpu completion --help` says: typed at a terminal, and read from the shell's own line."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands.conftest import OwnBroker
from tests.support.paths import PYTHONPATH

pytestmark = pytest.mark.promise("completion")

DEADLINE_S = 240
READY = "ready"  # each shell's prompt
TAB = "\t"
REPORT = "\x14"  # Ctrl-T, bound below
CLEAR = "\x15"  # Ctrl-U empties the line in all three

# Each shell's own file: its completion as documented, a prompt to wait for, and a key that writes the line to a file.
FILES = {
    "bash": (
        ".bashrc",
        f"""\
eval "$(jupyter gpu completion bash)"
PS1='{READY}'
bind -x '"\\C-t": printf "%s" "$READLINE_LINE" > ~/line.part && mv ~/line.part ~/line'
""",
    ),
    "zsh": (
        ".zshrc",
        f"""\
autoload -Uz compinit && compinit -u
eval "$(jupyter gpu completion zsh)"
PROMPT='{READY}'
report() {{ printf %s "$BUFFER" > ~/line.part && mv ~/line.part ~/line }}
zle -N report
bindkey '^T' report
""",
    ),
    "fish": (
        ".config/fish/config.fish",
        f"""\
function fish_greeting; end
function fish_prompt; printf '{READY}'; end
bind \\ct 'commandline > ~/line.part; and mv ~/line.part ~/line'
""",
    ),
}


class Terminal:
    """A shell at a separate terminal."""

    def __init__(self, home: Path, terminal: int, shell: subprocess.Popen[bytes]) -> None:
        self._line, self._terminal, self._shell = home / "line", terminal, shell
        self._shown = b""
        self._end = time.monotonic() + DEADLINE_S

    def until_shown(self, text: str) -> None:
        while text.encode() not in self._shown:
            self._look()

    def write(self, keys: str) -> None:
        """Press the keys."""
        self._shown = b""
        os.write(self._terminal, keys.encode())

    def completed(self, typed: str) -> str:
        """Return the shell's line after Tab was pressed at the end of the input."""
        self._line.unlink(missing_ok=True)
        self.write(f"{CLEAR}{typed}{TAB}{REPORT}")
        while not self._line.exists():
            self._look()
        return self._line.read_text().strip()

    def _look(self) -> None:
        """Read what the shell shows, so that it never waits for its terminal."""
        assert self._shell.poll() is None, f"the shell has ended: {self._shown!r}"
        assert time.monotonic() < self._end, self._shown
        if select.select([self._terminal], [], [], 0.05)[0]:
            self._shown += os.read(self._terminal, 65536)


@contextmanager
def at_a_terminal(shell: str, home: Path) -> Iterator[Terminal]:
    """A shell for a user whose home folder has only what the documents tell users to put there."""
    environment = {
        "FISH_UNIT_TESTS_RUNNING": "1",  # or it reads every manual page of the machine in the background
        "HOME": str(home),
        "JUPYTER_GPU_SOCKET": os.environ["JUPYTER_GPU_SOCKET"],
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": PYTHONPATH,
        "TERM": "xterm",
    }
    name, content = FILES[shell]
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_text(content)
    if shell == "fish":
        completions = home / ".config/fish/completions"
        completions.mkdir()
        printed = subprocess.run(
            ["jupyter", "gpu", "completion", "fish"], env=environment, stdout=subprocess.PIPE, check=True
        )
        (completions / "jupyter.fish").write_bytes(printed.stdout)
    terminal, its_end = pty.openpty()
    # The first terminal that a session's first process opens is the session's: the shell needs that to control its jobs.
    command = ["sh", "-c", 'exec "$1" -i <>"$0" >&0 2>&0', os.ttyname(its_end), shell]
    process = subprocess.Popen(command, cwd=home, env=environment, start_new_session=True)
    try:
        yield Terminal(home, terminal, process)
    finally:
        process.kill()
        process.wait()
        os.close(its_end)
        os.close(terminal)


@pytest.mark.parametrize("shell", FILES)
def test_tab_completes_commands_and_leases(shell: str, broker: OwnBroker, tmp_path: Path) -> None:
    label = "train: $(touch ran) `touch ran`.ipynb"
    lease_id = broker.add("resident", label=label)
    with at_a_terminal(shell, tmp_path) as terminal:
        terminal.until_shown(READY)
        assert terminal.completed("jupyter gpu sta") == "jupyter gpu status"
        assert terminal.completed("jupyter gpu status --wa") == "jupyter gpu status --watch"
        assert terminal.completed(f"jupyter gpu pin {lease_id[:3]}") == f"jupyter gpu pin {lease_id}"
        assert terminal.completed("jupyter-gpu unp") == "jupyter-gpu unpin"
        other_id = broker.add("resident", label="other.ipynb")
        terminal.write(f"{CLEAR}jupyter gpu pin {TAB}{TAB}")
        for text in (lease_id, other_id, *([] if shell == "bash" else [label, "other.ipynb"])):
            terminal.until_shown(text)
    assert not (tmp_path / "ran").exists(), "a notebook's name is text"
