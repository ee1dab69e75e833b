"""Programs that run kernels and do not know this project: a fractional kernelspec works like any other."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.paths import PYTHONPATH
from tests.support.stories import CHECK, fill
from tests.support.world import DEADLINE_S, World, new_world, until

pytestmark = pytest.mark.promise("other-programs")

MIB = 8


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One broker for all tests of this file."""
    with new_world() as made:
        yield made


@pytest.fixture
def name(world: World) -> str:
    (installed,) = world.install(750)
    return installed


def run(world: World, *command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=world.environment,
        cwd=world.notebooks,
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def notebook(world: World, *codes: str, kernel: str) -> Path:
    made: Any = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    made.cells = [nbformat.v4.new_code_cell(code) for code in codes]  # type: ignore[no-untyped-call]
    made.metadata.kernelspec = {"name": kernel, "display_name": kernel, "language": "python"}
    path = world.notebooks / "story.ipynb"
    path.write_text(nbformat.writes(made))  # type: ignore[no-untyped-call]
    return path


def last_text(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "".join("".join(output.get("text", "")) for output in cells[-1]["outputs"])


def used_a_device(world: World) -> None:
    """The lease was real, and no process holds it any more (the console ends without giving it back: it expires)."""
    log = Path(world.socket).with_name("broker.log")
    assert "768 MiB is reserved" in log.read_text()
    log.write_text("")  # for the next test; the broker appends
    assert [lease for lease in world.status().leases if lease.pid is not None] == []


def test_papermill_runs_a_notebook(world: World, name: str) -> None:
    path = notebook(world, fill(1, MIB), CHECK, kernel=name)
    run(world, "papermill", str(path), "out.ipynb", "--no-progress-bar")
    assert last_text(world.notebooks / "out.ipynb") == "intact\n"
    used_a_device(world)


def hears_the_kernel(world: World, pid: int) -> bool:
    """Whether a process is connected to the only kernel's IOPub channel."""
    for path in (world.folder / "run").glob("kernel-*.json"):
        try:
            port = json.loads(path.read_text())["iopub_port"]
        except (ValueError, KeyError):  # it is being written
            return False
        sockets = set[str]()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(str(entry.readlink()))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        established = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"}
        return not sockets.isdisjoint(established)
    return False


def test_the_console_talks_to_a_kernel(world: World, name: str) -> None:
    lines = [
        "from fractional_gpu.gpu.simulated import cuda",
        "buffer = cuda.allocate(1 << 20); buffer.write(b'kept')",
        "print('read back:', buffer.read(4))",
    ]
    # It stops asking the kernel after a second, and from then on treats all lines as one cell.
    patience = f"--ZMQTerminalInteractiveShell.kernel_is_complete_timeout={DEADLINE_S}"
    console = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "console", "--simple-prompt", patience, "--kernel", name],
        env=world.environment,
        cwd=world.notebooks,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert console.stdin is not None
    assert console.stdout is not None
    try:
        # It does not wait for this connection, and waits for ever for the end of a cell that ended earlier: with any kernel.
        until(lambda: hears_the_kernel(world, console.pid), "the console hears what the kernel publishes")
        console.stdin.write("".join(f"{line}\n" for line in lines).encode())
        seen = b""
        while b"read back: b'kept'" not in seen:
            assert select.select([console.stdout], [], [], DEADLINE_S)[0], f"the console says no more than {seen!r}"
            piece = os.read(console.stdout.fileno(), 1 << 16)
            assert piece, f"the console ended after {seen!r}"
            seen += piece
            console.stdin.write(b"\n")  # it may show a cell's last output only after Enter is pressed
        console.stdin.write(b"exit\n")
        console.stdin.close()
        assert console.wait(DEADLINE_S) == 0
    finally:
        console.kill()
        with console:  # closes the pipes and waits
            pass
    until(lambda: all(lease.pid is None for lease in world.status().leases), "the kernel ends with the console")
    used_a_device(world)


def test_the_protocols_own_suite_passes_as_on_plain_ipykernel(world: World, name: str) -> None:
    world.environment["PYTHONPATH"] = PYTHONPATH
    world.complete_without_jedi()
    outcomes: dict[str, str] = json.loads(run(world, "tests.support.kernel_suite", name).stdout)
    assert len(outcomes) >= 12
    assert set(outcomes.values()) == {"passed"}
    used_a_device(world)
