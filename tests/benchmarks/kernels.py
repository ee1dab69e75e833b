"""Kernels as a notebook front end without a server drives them: started by jupyter_client, talked to over ZeroMQ."""

import tempfile
import time
from contextlib import suppress
from queue import Empty
from types import TracebackType
from typing import IO, Self

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.status import LeaseStatus

__all__ = ["PLAIN", "BenchKernel", "KernelDiedError"]

PLAIN = "python3"  # ipykernel's own kernelspec, started by jupyter_client's local provisioner
_DEADLINE_S = 60.0
_RECONNECT_MS = 2  # ZeroMQ's usual 100 ms would round every start time up to a multiple of it


class KernelDiedError(Exception):
    """A kernel ended before its first answer; the text is the end of what it said."""


class BenchKernel:
    """A kernel that has answered once, shut down at the end of the block. `start_s`: from the call to its first answer.

    Raises KernelDiedError if it never answers: jupyter_client chooses ports before the kernel takes them, and another program of a
    busy machine may take one in between.
    """

    def __init__(self, kernelspec: str) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.manager = KernelManager(kernel_name=kernelspec, context=self._context)
        with tempfile.TemporaryFile() as said:
            begun = time.perf_counter()
            self.manager.start_kernel(stdout=said, stderr=said)
            self.client: BlockingKernelClient = self.manager.client()
            self.client.start_channels(stdin=False, hb=False)
            try:
                self._await_answer(said)
                self.start_s = time.perf_counter() - begun
                self._await_iopub()
            except BaseException:
                self.close()
                raise

    @property
    def kernel_id(self) -> str:
        """The id that the broker knows it by."""
        return str(self.manager.kernel_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_answer(self, said: IO[bytes]) -> None:
        """Return when the kernel has answered a first `kernel_info`. Raises KernelDiedError if it ends instead."""
        message_id = self.client.kernel_info()
        while self.manager.is_alive():
            with suppress(Empty):
                while self.client.get_shell_msg(timeout=1)["parent_header"].get("msg_id") != message_id:
                    pass
                return
        said.seek(0)
        raise KernelDiedError(said.read()[-2000:].decode(errors="replace"))

    def _await_iopub(self) -> None:
        """Return when our subscription has reached the kernel: what it published before that was lost."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            self.client.kernel_info(reply=True, timeout=_DEADLINE_S)
            with suppress(Empty):
                self.client.get_iopub_msg(timeout=0.05)
                return
        raise RuntimeError(f"kernel {self.kernel_id} published nothing")

    def run(self, code: str) -> float:
        """Run a cell and return the seconds until both its reply and its idle status are here. Raises RuntimeError if it fails."""
        begun = time.perf_counter()
        message_id = self.client.execute(code)
        while True:
            reply = self.client.get_shell_msg(timeout=_DEADLINE_S)
            if reply["parent_header"].get("msg_id") == message_id:
                break
        while True:
            message = self.client.get_iopub_msg(timeout=_DEADLINE_S)
            if (
                message["parent_header"].get("msg_id") == message_id
                and message["content"].get("execution_state") == "idle"
            ):
                break
        took = time.perf_counter() - begun
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"the cell {code!r} failed: {reply['content'].get('evalue')}")
        return took

    def lease(self, broker: BrokerClient) -> LeaseStatus:
        """Return this kernel's lease. Raises RuntimeError if it has none."""
        for lease in broker.status().leases:
            if lease.kernel_id == self.kernel_id:
                return lease
        raise RuntimeError(f"kernel {self.kernel_id} has no lease")

    def close(self) -> None:
        """End the kernel at once."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self._context.term()
