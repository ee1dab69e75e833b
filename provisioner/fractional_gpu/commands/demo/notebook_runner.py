"""Runs notebooks headless, several at once, a cell of each in turn: so each needs the GPU again and again while the others have it.

Kernels are started and shut down here and not by nbclient, whose own signal handlers would shut one kernel down at Ctrl-C and then
report the other as dead.
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

from fractional_gpu.commands.terminal.errors import CommandError

__all__ = ["Tenant", "new_tenant", "result_of", "run_in_turns", "save"]

CELL_TIMEOUT_S = 900
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A notebook that is to run: the file, its cells and the kernel that will run them, which complains into `log`."""

    name: str
    path: Path
    notebook: Any
    kernelspec: str
    kernel_id: str
    log: Path


def new_tenant(path: Path, log: Path) -> Tenant:
    """Read a notebook. Raises OSError and nbformat's errors."""
    notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    return Tenant(path.stem, path, notebook, notebook.metadata.kernelspec.name, str(uuid4()), log)


def save(tenant: Tenant, folder: Path) -> None:
    """Write the notebook with its outputs into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / tenant.path.name).write_text(nbformat.writes(tenant.notebook), encoding="utf-8")  # type: ignore[no-untyped-call]


def result_of(tenant: Tenant) -> dict[str, Any]:
    """Return the JSON that the notebook's last output carries. Raises CommandError if it has none."""
    for cell in reversed(tenant.notebook.cells):
        for output in reversed(cell.get("outputs", [])):
            result = output.get("data", {}).get("application/json")
            if isinstance(result, dict):
                return dict(result)
    raise CommandError(f"{tenant.path.name} ended without its result; run it by hand to see why")


async def run_in_turns(tenants: Sequence[Tenant], tell: Callable[[str], None], finished: Callable[[], None]) -> None:
    """Run all notebooks, a code cell of each in turn; `finished` is called while all the kernels are still alive.

    The outputs are stored in the notebooks. Raises CommandError when a kernel does not start or a cell fails.
    Cancellation shuts the kernels down, as any other end does.
    """
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_kernel(tenant, tell)) for tenant in tenants]
        numbered = [
            [(at, cell) for at, cell in enumerate(t.notebook.cells) if cell.cell_type == "code"] for t in tenants
        ]
        for turn, cells in enumerate(zip_longest(*numbered), start=1):
            for tenant, client, cell in zip(tenants, clients, cells, strict=True):
                if cell is not None:
                    tell(f"{tenant.name}: cell {turn} of {len(numbered[0])}")
                    await _run_cell(tenant, client, *cell)
        finished()


@asynccontextmanager
async def _kernel(tenant: Tenant, tell: Callable[[str], None]) -> AsyncIterator[NotebookClient]:
    """Start a tenant's kernel and yield a client of it; shut it down however the block ends."""
    manager = AsyncKernelManager(kernel_name=tenant.kernelspec)
    tell(f"{tenant.name}: starting its kernel ({tenant.kernelspec})")
    client = NotebookClient(tenant.notebook, km=manager, timeout=CELL_TIMEOUT_S, startup_timeout=CELL_TIMEOUT_S)
    try:
        try:
            with tenant.log.open("wb") as log:  # its own copy is the kernel's
                await manager.start_kernel(cwd=str(tenant.path.parent), kernel_id=tenant.kernel_id, stderr=log)
            await client.async_start_new_kernel_client()
        except RuntimeError as error:
            raise CommandError(f"{tenant.name}: its kernel does not start: {error}") from error
        yield client
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if manager.has_kernel:
            await manager.shutdown_kernel()
        await manager.cleanup_resources()


async def _run_cell(tenant: Tenant, client: NotebookClient, index: int, cell: Any) -> None:  # noqa: ANN401 - nbformat has no types
    """Run one cell. Raises CommandError with what went wrong in it."""
    try:
        await client.async_execute_cell(cell, index)
    except CellExecutionError as error:
        said = _ESCAPES.sub("", f"{error.ename}: {error.evalue}")
        raise CommandError(f"{tenant.name}: a cell failed with {said}") from error
    except CellTimeoutError as error:
        raise CommandError(f"{tenant.name}: a cell did not end within {CELL_TIMEOUT_S} s") from error
    except DeadKernelError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # nbclient takes our cancellation for the death of its kernel
            raise asyncio.CancelledError from error
        raise CommandError(f"{tenant.name}: its kernel died") from error
