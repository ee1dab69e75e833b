"""Runs notebooks without a browser, one cell of each in turn, so that each needs the GPU while another holds it.

This module starts and shuts down the kernels itself, because on Ctrl-C, nbclient's signal handlers would shut down one kernel and report
the other as dead. It needs nbclient and nbformat from the `lab` extra, so call `require_packages` before importing it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from uuid import uuid4

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from fractional_gpu.commands.terminal.text import CommandError

CELL_TIMEOUT_S = 900
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class DemoNotebook:
    name: str
    path: Path
    content: Any
    kernelspec: str
    kernel_id: str
    log: Path


def read_notebook(path: Path, log: Path) -> DemoNotebook:
    notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    return DemoNotebook(path.stem, path, notebook, notebook.metadata.kernelspec.name, str(uuid4()), log)


def save(notebook: DemoNotebook, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / notebook.path.name).write_text(nbformat.writes(notebook.content), encoding="utf-8")  # type: ignore[no-untyped-call]


def result_of(notebook: DemoNotebook) -> dict[str, Any]:
    for cell in reversed(notebook.content.cells):
        for output in reversed(cell.get("outputs", [])):
            result = output.get("data", {}).get("application/json")
            if isinstance(result, dict):
                return dict(result)
    raise CommandError(f"{notebook.path.name} finished without producing a result; run it by hand to see why")


async def run_in_turns(
    notebooks: Sequence[DemoNotebook],
    tell: Callable[[str], None],
    finished: Callable[[], None],
    count: Callable[[int, int], None],
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_kernel(notebook, tell)) for notebook in notebooks]
        numbered = [
            [(at, cell) for at, cell in enumerate(t.content.cells) if cell.cell_type == "code"] for t in notebooks
        ]
        done, total = 0, sum(map(len, numbered))
        for turn, cells in enumerate(zip_longest(*numbered), start=1):
            for notebook, client, cell in zip(notebooks, clients, cells, strict=True):
                if cell is not None:
                    tell(f"{notebook.name}: cell {turn} of {len(numbered[0])}")
                    await _run_cell(notebook, client, *cell)
                    done += 1
                    count(done, total)
        finished()


@asynccontextmanager
async def _kernel(notebook: DemoNotebook, tell: Callable[[str], None]) -> AsyncIterator[NotebookClient]:
    manager = AsyncKernelManager(kernel_name=notebook.kernelspec)
    tell(f"{notebook.name}: starting its kernel ({notebook.kernelspec})")
    client = NotebookClient(notebook.content, km=manager, timeout=CELL_TIMEOUT_S, startup_timeout=CELL_TIMEOUT_S)
    try:
        try:
            with notebook.log.open("wb") as log:  # the kernel has a copy of the descriptor
                await manager.start_kernel(cwd=str(notebook.path.parent), kernel_id=notebook.kernel_id, stderr=log)
            await client.async_start_new_kernel_client()
        except RuntimeError as error:
            raise CommandError(f"{notebook.name}: its kernel did not start: {error}") from error
        yield client
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if manager.has_kernel:
            await manager.shutdown_kernel()
        await manager.cleanup_resources()


async def _run_cell(notebook: DemoNotebook, client: NotebookClient, index: int, cell: Any) -> None:  # noqa: ANN401 - nbformat has no types
    try:
        await client.async_execute_cell(cell, index)
    except CellExecutionError as error:
        said = _ESCAPES.sub("", f"{error.ename}: {error.evalue}")
        raise CommandError(f"{notebook.name}: a cell failed with {said}") from error
    except CellTimeoutError as error:
        raise CommandError(f"{notebook.name}: a cell did not finish within {CELL_TIMEOUT_S} s") from error
    except DeadKernelError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # nbclient mistakes our cancellation for the death of its kernel
            raise asyncio.CancelledError from error
        raise CommandError(f"{notebook.name}: its kernel died") from error
