"""`%%gpu measure`, which finds out what share of a GPU is enough for a cell's code.

The code runs as in `jupyter gpu measure`, in separate processes with separate leases. They do not have this kernel's variables, so
`--setup` names the cells that define them. The measurement is a child process in its own session. It receives the kernel's interrupts only
through this module, and exits when its standard input closes because the kernel has ended.
"""

import argparse
import ast
import contextvars
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import IO, Any, Final

from fractional_gpu.core.units import format_memory
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.status import LeaseStatus
from fractional_gpu_kernel.cells.acquire import RefusedError
from fractional_gpu_kernel.display.lines import SIMULATED, LiveLine, View, publish
from fractional_gpu_kernel.magics.arguments import MEASURE, ArgumentsError
from fractional_gpu_kernel.settings import Settings

_RUNNER: Final = Path(__file__).with_name("cell_runner.py")
_SPEAKER: Final = re.compile(r"^jupyter gpu(?: measure)?: (?:nothing could be measured: )?")
_PART: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_OWN: Final = re.compile(r"\s*%%gpu\s+measure\b")
_NO_MEASUREMENT: Final = "Nothing was measured: "
_END_S: Final = 30.0  # how long programs and leases may take to end after an interrupt
_KEPT_LINES: Final = 3
_WRONG_WORDS, _INTERRUPTED = 2, 128 + signal.SIGINT


class MeasurementView(View):
    def __init__(self, found: Mapping[str, Any]) -> None:
        self._sentences = [*found["remarks"], *found["sentences"]]
        self._table = list(found["table"])

    def __repr__(self) -> str:
        return "\n".join([*self._sentences, "", *self._table]).rstrip()

    def html(self) -> str:
        lines = "".join(f"<div>{escape(one)}</div>" for one in self._sentences)
        table = escape("\n".join(self._table))
        # The table is wider than a small screen, so it can be scrolled with the keyboard.
        region = 'role="region" tabindex="0" aria-label="All figures"'
        return f'{lines}<pre {region} style="font-size:90%;overflow-x:auto">{table}</pre>'


def measure_cell(shell: Any, settings: Settings, arguments: argparse.Namespace, cell: str) -> None:  # noqa: ANN401 - IPython is untyped
    """Measure the cell's code. Show the progress and then the result.

    Raises ArgumentsError, SyntaxError, or RefusedError if nothing could be measured. After an interrupt, raises KeyboardInterrupt once all
    processes have ended and the results so far have been shown.
    """
    job = {
        "setup": _setup(shell, arguments.setup),
        "cell": _source(shell, "the cell", cell),
        "from_start": arguments.from_start,
    }
    lease = None
    with (
        suppress(FractionalGPUError),
        settings.connect() as client,
    ):  # the measurement starts a broker, or reports why it cannot
        lease = client.lease(settings.lease_id)
    options = ["--json", "--end-with-input"]
    if arguments.pool is None and lease is not None:
        options += ["--pool", lease.spec.pool]
    for option in MEASURE.arguments:
        value = getattr(arguments, option.name.removeprefix("--").replace("-", "_"))
        if option.name in ("--setup", "--from-start") or not value:
            continue
        values = [value] if isinstance(value, str) else value
        options += [option.name] if option.is_flag else [f"{option.name}={one}" for one in values]
    # The file is in memory, so a killed kernel leaves no file, and the disk may be full. Measured processes open the file through the
    # descriptor of this process.
    with os.fdopen(os.memfd_create("gpu-measure-cell"), "w", encoding="utf-8") as file:
        json.dump(job, file)
        file.flush()
        place = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        measurement = _Measurement(shell, [*options, "--", sys.executable, "-P", str(_RUNNER), place])
        measurement.run()
    measurement.show(lease)


def _source(shell: Any, name: str, text: str) -> str:  # noqa: ANN401 - as above
    source: str = shell.transform_cell(text)
    tree = compile(source, f"<{name}>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if name == "the cell" and isinstance(tree, ast.Module) and not tree.body:
        raise ArgumentsError("%%gpu measure: the cell has no code; put the code to measure below this line")
    return source


def _setup(shell: Any, text: str | None) -> list[tuple[str, str]]:  # noqa: ANN401 - as above
    history: Sequence[str] = shell.history_manager.input_hist_raw
    found = []
    for number in setup_numbers(text, last=shell.execution_count - 1) if text is not None else ():
        raw = history[number] if number < len(history) else ""
        if not _OWN.match(raw):  # a measurement defined nothing in this kernel either
            found.append((f"cell {number}", _source(shell, f"cell {number}", raw)))
    return found


def setup_numbers(text: str, *, last: int) -> list[int]:
    """Parse a list such as `1-3,5`, and return the execution numbers in that order. `last` is the newest number. Raises ArgumentsError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ArgumentsError(
                f"%%gpu measure: --setup is {text[:60]!r}; expected cell numbers and ranges, such as 1-3,5"
            )
        first, final = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= final <= last:
            known = f"the cells of this session are numbered 1 to {last}" if last else "no cell has run in this session"
            raise ArgumentsError(f"%%gpu measure: --setup names {part.strip()}, but {known}")
        numbers += range(first, final + 1)
    return numbers


class _Measurement:
    def __init__(self, shell: Any, options: Sequence[str]) -> None:  # noqa: ANN401 - as above
        self._shell = shell
        self._options = options
        self._line = LiveLine(shell)
        self._printed = b""
        self._complaints: list[str] = []
        self._status = 0

    def run(self) -> None:
        """Run the measurement. After an interrupt, wait until its processes have ended. A second interrupt kills them."""
        self._line.show("Starting the measurement. Interrupt the kernel to stop it; the results so far are shown.")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "measure", *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        context = contextvars.copy_context()  # so that the progress appears in this cell
        readers = [
            threading.Thread(target=self._read_output, args=(process.stdout,), daemon=True),
            threading.Thread(target=context.run, args=(self._read_progress, process.stderr), daemon=True),
        ]
        with process:
            try:
                for reader in readers:
                    reader.start()
                try:
                    self._status = process.wait()
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
                    self._line.show("Stopping the measurement: its programs and leases are ending.")
                    # Do this even if the measurement has just ended, because the user has interrupted the cell.
                    self._status = _INTERRUPTED
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_END_S)
            finally:
                if process.poll() is None:
                    process.kill()  # the system then sends SIGTERM to its programs, and the broker ends their leases
                    process.wait()
                for reader in readers:
                    reader.join()
                self._line.blank()

    def show(self, lease: LeaseStatus | None) -> None:
        if self._printed.strip():
            publish(self._shell, MeasurementView(json.loads(self._printed)))
        if self._status == _INTERRUPTED:
            known = "the results so far are shown" if self._printed.strip() else "there are no results yet"
            raise KeyboardInterrupt(f"the measurement was stopped, and its programs and leases have ended; {known}")
        if self._printed.strip():
            return
        why = self._complaints[-1] if self._complaints else f"it ended with status {self._status}"
        if self._status == _WRONG_WORDS:
            raise ArgumentsError(f"%%gpu measure: {why}")
        raise RefusedError(f"{_NO_MEASUREMENT}{why}.{_held(lease)}")

    def _read_output(self, pipe: IO[bytes]) -> None:
        self._printed = pipe.read()

    def _read_progress(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            text = _SPEAKER.sub("", line.decode("utf-8", "replace").strip())
            if text:
                self._complaints = [*self._complaints[-_KEPT_LINES:], text]
                self._line.show(f"Measuring: {text}. Interrupt the kernel to stop; the results so far are shown.")


def _held(status: LeaseStatus | None) -> str:
    if status is None or not status.lease.reserved_mib or status.lease.device_id is None:
        return ""
    held = f"{'simulated ' if os.environ.get(SIMULATED) else ''}{status.device_name or 'device'}"
    return (
        f" This kernel itself holds {format_memory(status.lease.reserved_mib)} of the {held}, and the measurement cannot use that "
        "memory. To free it, run %gpu release in a cell before this one."
    )
