"""Real ipykernel processes with the extension, driven by jupyter_client, against the scripted broker."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from fractional_gpu.jupyter.kernel_command import KernelPlan
from tests.kernelext import forking
from tests.kernelext.scripted_broker import LEASE, TOKEN
from tests.support.fake_broker import DEADLINE_S
from tests.support.kernels import plain_manager
from tests.support.paths import PYTHONPATH

__all__ = ["Outcome", "RunningKernel", "forked_kernel", "kernel_environment", "running_kernel"]


class Outcome:
    """The result of one request: the reply, and everything published for it until the kernel was idle again."""

    def __init__(self, reply: dict[str, Any], published: list[dict[str, Any]]) -> None:
        self.reply = reply
        self.published = published

    @property
    def status(self) -> str:
        return str(self.reply["content"]["status"])

    @property
    def error(self) -> tuple[str, str]:
        return str(self.reply["content"]["ename"]), str(self.reply["content"]["evalue"])

    def of_type(self, *kinds: str) -> list[dict[str, Any]]:
        return [message["content"] for message in self.published if message["msg_type"] in kinds]

    @property
    def printed(self) -> str:
        return "".join(content["text"] for content in self.of_type("stream"))

    @property
    def shown(self) -> list[str]:
        return [content["data"]["text/plain"] for content in self.of_type("display_data", "update_display_data")]

    @property
    def kinds(self) -> list[str]:
        return [message["msg_type"] for message in self.published]


class RunningKernel:
    """A kernel with a client. `send` starts a request, `finish` waits for it; `run` does both."""

    def __init__(self, pid: int, client: BlockingKernelClient) -> None:
        self.pid = pid
        self.client = client
        self._published: dict[str, list[dict[str, Any]]] = {}

    def send(self, code: str, **options: Any) -> str:  # noqa: ANN401 - jupyter_client's options
        return str(self.client.execute(code, **options))

    def send_with_header(self, code: str, **header: str) -> str:
        """Execute with additional header fields, such as `subshell_id`."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = self.client.session.msg("execute_request", content)
        message["header"].update(header)
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def create_subshell(self) -> str:
        self.client.control_channel.send(self.client.session.msg("create_subshell_request"))
        return str(self.client.get_control_msg(timeout=DEADLINE_S)["content"]["subshell_id"])

    def finish(self, request: str) -> Outcome:
        self.until_published(request, lambda messages: any(_is_idle(message) for message in messages))
        return Outcome(self._reply(request), self._published[request])

    def run(self, code: str, **options: Any) -> Outcome:  # noqa: ANN401 - as above
        return self.finish(self.send(code, **options))

    def until_shown(self, request: str, text: str) -> list[dict[str, Any]]:
        def seen(messages: list[dict[str, Any]]) -> bool:
            return any(text in message["content"].get("data", {}).get("text/plain", "") for message in messages)

        return self.until_published(request, seen)

    def until_published(self, request: str, enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        while not enough(self._published.setdefault(request, [])):
            message = self.client.get_iopub_msg(timeout=DEADLINE_S)
            parent = message["parent_header"].get("msg_id", "")
            self._published.setdefault(parent, []).append(message)
        return self._published[request]

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def _reply(self, request: str) -> dict[str, Any]:
        while True:
            reply: dict[str, Any] = self.client.get_shell_msg(timeout=DEADLINE_S)
            if reply["parent_header"].get("msg_id") == request:
                return reply


def _is_idle(message: dict[str, Any]) -> bool:
    return bool(message["msg_type"] == "status" and message["content"]["execution_state"] == "idle")


def kernel_environment(folder: Path, socket: str) -> dict[str, str]:
    """The environment of a kernel with a lease; its token file is written."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    return {
        **os.environ,
        "JUPYTER_GPU_SOCKET": socket,
        "JUPYTER_GPU_LEASE": LEASE,
        "JUPYTER_GPU_TOKEN_FILE": str(token),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder),
        "PYTHONPATH": PYTHONPATH,
    }


@contextmanager
def running_kernel(environment: dict[str, str], *, extension: bool = True) -> Iterator[RunningKernel]:
    manager = plain_manager("python3")
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = KernelPlan(gated=extension).command(manager.kernel_spec.argv)
    manager.start_kernel(env=environment)
    pid: int = manager.provisioner.pid  # type: ignore[union-attr]
    try:
        with _connected(manager) as client:
            yield RunningKernel(pid, client)
    finally:
        manager.shutdown_kernel(now=True)
        manager.context.destroy(0)


class _Forked:
    """The part of a provisioner that a waiting client needs: whether the process is alive, each second without an answer."""

    has_process = True

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    async def poll(self) -> int | None:
        return self._process.exitcode


@contextmanager
def forked_kernel(environment: dict[str, str]) -> Iterator[RunningKernel]:
    """The same with the extension, in a third of the time; the environment does not affect where modules are found."""
    manager = plain_manager("python3")
    manager.write_connection_file()
    process = forking.start(manager.connection_file, environment)
    assert process.pid is not None
    manager.provisioner = _Forked(process)  # type: ignore[assignment]
    try:
        with _connected(manager) as client:
            yield RunningKernel(process.pid, client)
    finally:
        process.kill()
        process.join(DEADLINE_S)
        manager.cleanup_connection_file()
        manager.context.destroy(0)


@contextmanager
def _connected(manager: KernelManager) -> Iterator[BlockingKernelClient]:
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)
        yield client
    finally:
        client.stop_channels()
