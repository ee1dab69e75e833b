"""Stops time spent waiting for the GPU from counting towards the cell timeout of programs that run notebooks with nbclient."""

import asyncio
from typing import Any

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import socket_path


def wait_before_cells(notebook_client: Any) -> None:  # noqa: ANN401 - nbclient's NotebookClient, which not everybody installs
    """Make an nbclient client wait for the GPU before it sends a cell, so that the wait does not count towards the cell's `timeout`.

    Each wait lasts up to an hour, unless `async_execute` is cancelled. There is no wait for `%%cpu` cells or kernels without a lease. Any
    existing `on_cell_execute` hook is called first. The new hook raises the protocol's errors, such as ConflictError if the GPU is refused.
    """
    earlier = notebook_client.on_cell_execute

    async def hook(cell: Any, cell_index: int) -> None:  # noqa: ANN401 - nbformat's node
        if earlier is not None and asyncio.iscoroutine(waiting := earlier(cell=cell, cell_index=cell_index)):
            await waiting
        if not cell.source.lstrip().startswith("%%cpu"):
            client = BrokerClient(socket_path())
            try:
                await asyncio.to_thread(_bring_to_gpu, client, notebook_client.km.kernel_id)
            finally:
                client.close()  # a cancelled wait withdraws its ticket

    notebook_client.on_cell_execute = hook


def _bring_to_gpu(client: BrokerClient, kernel_id: str) -> None:
    for lease in client.status().leases:
        if lease.kernel_id == kernel_id:
            client.resume(lease.lease_id)
