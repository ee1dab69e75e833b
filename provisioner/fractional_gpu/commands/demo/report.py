"""The demonstration's course and results: it runs notebooks, watches the broker, and shows a table for people and JSON for programs."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.terminal.errors import CommandError
from fractional_gpu.commands.terminal.render import describe_device, table
from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import LeaseStatus
from fractional_gpu.protocol.names import state_words


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoDevice:
    """The GPU that was shared. Memory in MiB."""

    name: str
    simulated: bool
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoKernel:
    """The result of one kernel. `state` is the lease's at the end; `moved_s` seconds its memory was on the move."""

    name: str
    kernelspec: str
    fraction_milli: int
    state: str
    suspends: int
    resumes: int
    moved_s: float
    compared_bytes: int
    state_intact: bool


def find_problems(kernels: Sequence[DemoKernel]) -> list[str]:
    """Return a sentence for each broken promise; an empty list is a success."""
    wrong = [f"{kernel.name} lost state" for kernel in kernels if not kernel.state_intact]
    still = [kernel for kernel in kernels if not kernel.suspends or not kernel.resumes]
    return wrong + [
        f"{kernel.name} was suspended {kernel.suspends} and resumed {kernel.resumes} times: nothing was shown"
        for kernel in still
    ]


def report_as_json(device: DemoDevice, kernels: Sequence[DemoKernel]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "device": {"name": device.name, "simulated": device.simulated, "memory_mib": device.memory_mib},
        "kernels": [
            {
                "kernelspec": kernel.kernelspec,
                "fraction_milli": kernel.fraction_milli,
                "suspends": kernel.suspends,
                "resumes": kernel.resumes,
                "state_intact": kernel.state_intact,
            }
            for kernel in kernels
        ],
        "ok": not find_problems(kernels),
    }


def render_report(device: DemoDevice, kernels: Sequence[DemoKernel]) -> str:
    """Return the table and the conclusion, ending in a newline."""
    header = ("KERNEL", "GPU", "STATE", "SUSPENDED", "RESUMED", "MOVING", "COMPARED", "INTACT")
    rows = [
        (
            kernel.name,
            format_fraction(kernel.fraction_milli),
            state_words(kernel.state),
            f"{kernel.suspends} times",
            f"{kernel.resumes} times",
            f"{kernel.moved_s:.1f} s",
            format_memory(kernel.compared_bytes // 2**20),
            "yes" if kernel.state_intact else "NO",
        )
        for kernel in kernels
    ]
    wrong = find_problems(kernels)
    asked = sum(kernel.fraction_milli for kernel in kernels)
    good = f"Together they asked for {format_fraction_sum(asked)} GPUs, and every byte is where it was."
    conclusion = "Something is wrong: " + "; ".join(wrong) + "." if wrong else good
    return (
        "\n".join(
            [
                describe_device(device.name, device.memory_mib, simulated=device.simulated),
                *table(header, rows),
                conclusion,
            ]
        )
        + "\n"
    )


def format_fraction_sum(milli: int) -> str:
    """Return `1.5` for 1500: a sum of fractions may exceed a GPU."""
    return f"{milli / 1000:g}"


# -- notebook runner ---------------------------------------------------------------------------------------------------
# Runs notebooks headless, several at once, a cell of each in turn: so each needs the GPU again and again while the others have it.
#
# Kernels are started and shut down here and not by nbclient, whose own signal handlers would shut one kernel down at Ctrl-C and then
# report the other as dead.


CELL_TIMEOUT_S = 900
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class DemoNotebook:
    """A notebook to run: the file, its content, and its kernel, whose standard error goes to `log`."""

    name: str
    path: Path
    content: Any
    kernelspec: str
    kernel_id: str
    log: Path


def read_notebook(path: Path, log: Path) -> DemoNotebook:
    """Read a notebook. Raises OSError and nbformat's errors."""
    notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    return DemoNotebook(path.stem, path, notebook, notebook.metadata.kernelspec.name, str(uuid4()), log)


def save(notebook: DemoNotebook, folder: Path) -> None:
    """Write the notebook with its outputs into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / notebook.path.name).write_text(nbformat.writes(notebook.content), encoding="utf-8")  # type: ignore[no-untyped-call]


def result_of(notebook: DemoNotebook) -> dict[str, Any]:
    """Return the JSON that the notebook's last output carries. Raises CommandError if it has none."""
    for cell in reversed(notebook.content.cells):
        for output in reversed(cell.get("outputs", [])):
            result = output.get("data", {}).get("application/json")
            if isinstance(result, dict):
                return dict(result)
    raise CommandError(f"{notebook.path.name} ended without its result; run it by hand to see why")


async def run_in_turns(
    notebooks: Sequence[DemoNotebook], tell: Callable[[str], None], finished: Callable[[], None]
) -> None:
    """Run all notebooks, a code cell of each in turn; `finished` is called while all the kernels are still alive.

    The outputs are stored in the notebooks. Raises CommandError when a kernel does not start or a cell fails.
    Cancellation shuts the kernels down, as any other end does.
    """
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_kernel(notebook, tell)) for notebook in notebooks]
        numbered = [
            [(at, cell) for at, cell in enumerate(t.content.cells) if cell.cell_type == "code"] for t in notebooks
        ]
        for turn, cells in enumerate(zip_longest(*numbered), start=1):
            for notebook, client, cell in zip(notebooks, clients, cells, strict=True):
                if cell is not None:
                    tell(f"{notebook.name}: cell {turn} of {len(numbered[0])}")
                    await _run_cell(notebook, client, *cell)
        finished()


@asynccontextmanager
async def _kernel(notebook: DemoNotebook, tell: Callable[[str], None]) -> AsyncIterator[NotebookClient]:
    """Start a notebook's kernel and yield a client of it; shut it down however the block ends."""
    manager = AsyncKernelManager(kernel_name=notebook.kernelspec)
    tell(f"{notebook.name}: starting its kernel ({notebook.kernelspec})")
    client = NotebookClient(notebook.content, km=manager, timeout=CELL_TIMEOUT_S, startup_timeout=CELL_TIMEOUT_S)
    try:
        try:
            with notebook.log.open("wb") as log:  # its own copy is the kernel's
                await manager.start_kernel(cwd=str(notebook.path.parent), kernel_id=notebook.kernel_id, stderr=log)
            await client.async_start_new_kernel_client()
        except RuntimeError as error:
            raise CommandError(f"{notebook.name}: its kernel does not start: {error}") from error
        yield client
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if manager.has_kernel:
            await manager.shutdown_kernel()
        await manager.cleanup_resources()


async def _run_cell(notebook: DemoNotebook, client: NotebookClient, index: int, cell: Any) -> None:  # noqa: ANN401 - nbformat has no types
    """Run one cell. Raises CommandError with what went wrong in it."""
    try:
        await client.async_execute_cell(cell, index)
    except CellExecutionError as error:
        said = _ESCAPES.sub("", f"{error.ename}: {error.evalue}")
        raise CommandError(f"{notebook.name}: a cell failed with {said}") from error
    except CellTimeoutError as error:
        raise CommandError(f"{notebook.name}: a cell did not end within {CELL_TIMEOUT_S} s") from error
    except DeadKernelError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # nbclient takes our cancellation for the death of its kernel
            raise asyncio.CancelledError from error
        raise CommandError(f"{notebook.name}: its kernel died") from error


# -- monitor -----------------------------------------------------------------------------------------------------------
# Follows leases while the demonstration runs: prints each change of state, and adds up how long their memory was on the move.
#
# `LeaseTracker` is pure: statuses of leases in, sentences out. `LeaseMonitor` feeds it from the broker in a thread of its own. A status
# says for how long a lease has been in its state, so the begin of each state is exact although the broker is polled.


INTERVAL_S = 0.05
_MOVING = frozenset({"suspending", "resuming"})


@dataclass(slots=True)
class _Seen:
    state: str
    entered_s: float
    moved_s: float = 0.0


class LeaseTracker:
    """Follows leases through their states. `names` maps kernel ids to names for people; other leases are ignored."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._seen: dict[str, _Seen] = {}

    def feed(self, now_s: float, leases: Sequence[LeaseStatus]) -> list[str]:
        """Take the leases at `now_s` (of any monotonic clock) and return a sentence for each change, oldest first."""
        changes: list[tuple[float, str]] = []
        for lease in leases:
            if lease.kernel_id not in self.names:
                continue
            entered_s = now_s - lease.age_ms / 1000
            seen = self._seen.get(lease.kernel_id)
            if seen is None:
                self._seen[lease.kernel_id] = _Seen(lease.state, entered_s)
            elif seen.state != lease.state:
                if seen.state in _MOVING:
                    seen.moved_s += max(0.0, entered_s - seen.entered_s)
                seen.state, seen.entered_s = lease.state, entered_s
                changes.append((entered_s, f"{self.names[lease.kernel_id]}: {_news(lease)}"))
        return [sentence for _, sentence in sorted(changes)]

    def moved_s(self, kernel_id: str) -> float:
        """Return how long the kernel's memory was on the move, seconds, as far as it was seen; a move that is under way does not count."""
        seen = self._seen.get(kernel_id)
        return seen.moved_s if seen is not None else 0.0


def _news(lease: LeaseStatus) -> str:
    """Return what just happened to a lease."""
    if lease.state == "suspended":
        return f"suspended, {format_memory(lease.saved_mib)} now in host memory"
    return state_words(lease.state)


class LeaseMonitor:
    """Polls the broker in a thread until `stop`, or the end of the `with` block. `tell` gets each sentence, in that thread."""

    def __init__(self, socket: str, tracker: LeaseTracker, tell: Callable[[str], None]) -> None:
        self._socket = socket
        self._tracker = tracker
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-demo-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Tell nothing from now on. May be called twice."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        client = BrokerClient(self._socket)
        try:
            while not self._over.wait(INTERVAL_S):
                for sentence in self._tracker.feed(time.monotonic(), client.status().leases):
                    self._tell(sentence)
        except FractionalGPUError as error:
            self._tell(f"cannot watch any more: {error}")
        finally:
            client.close()
