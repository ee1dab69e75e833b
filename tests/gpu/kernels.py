"""Kernels as a front end without a server drives them: jupyter_client alone."""

import subprocess
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from fractional_gpu.protocol.status import LeaseStatus
from tests.gpu.lab import DEADLINE_S, Lab

__all__ = ["Kernel", "Reply", "close_event_loop"]


@dataclass(slots=True)
class Reply:
    """What one cell answered. `text` is what it printed."""

    status: str = ""
    error: str = ""
    text: str = ""


class Kernel:
    """A running kernel, ended with the block."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.manager = KernelManager(kernel_name=name)
        self.manager.start_kernel(cwd=str(lab.folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels(stdin=False, hb=False)
        try:
            self.client.wait_for_ready(timeout=DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def lease(self) -> LeaseStatus:
        """Its status at the broker."""
        return self.lab.lease(str(self.manager.kernel_id))

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid = self.lease.pid
        assert pid is not None, "the lease has no process"
        return pid

    def send(self, code: str) -> str:
        """Send a cell and return its message id."""
        return str(self.client.execute(code))

    def wait(self, message_id: str) -> Reply:
        """Wait for the cell's reply and its idle status."""
        reply, idle = Reply(), False
        while not idle:
            message = self.client.get_iopub_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            if message["header"]["msg_type"] == "stream":
                reply.text += message["content"]["text"]
            idle = message["content"].get("execution_state") == "idle"
        while not reply.status:
            message = self.client.get_shell_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") == message_id:
                content = message["content"]
                reply.status = content["status"]
                reply.error = f"{content.get('ename', '')}: {content.get('evalue', '')}" if reply.status != "ok" else ""
        return reply

    def run(self, code: str) -> Reply:
        """Run a cell to any end."""
        return self.wait(self.send(code))

    def must(self, code: str) -> str:
        """Run a cell that has to succeed, and return what it printed."""
        reply = self.run(code)
        assert reply.status == "ok", f"{code!r} ended with {reply.status} {reply.error}\n{reply.text}"
        return reply.text

    def is_intact(self) -> bool:
        """Whether everything that it put on the device is intact; brings it onto the device."""
        return self.must(self.lab.cells.check()) == "intact\n"

    def suspend(self) -> LeaseStatus:
        """Suspend it and return when it is. Raises ConflictError with the reason if it is not."""
        with self.lab.client() as client:
            return client.suspend(self.lease.lease_id)

    def resume(self) -> LeaseStatus:
        """Bring it back and wait for that."""
        with self.lab.client() as client:
            return client.resume(self.lease.lease_id)

    def interrupt(self) -> None:
        """Interrupt it as a front end does."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """Restart it as a front end does, and return when it answers."""
        self.manager.restart_kernel()
        self.client.wait_for_ready(timeout=DEADLINE_S)

    def close(self) -> None:
        """End the kernel at once, and what jupyter_client made for it."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


def close_event_loop() -> None:
    """Close the event loop that jupyter_client's blocking classes made for this thread."""
    ensure_event_loop().close()
