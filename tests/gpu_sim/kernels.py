"""Real processes for the tests of the simulated GPU."""

import fcntl
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Self

from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.processes import current_key, lock_file
from fractional_gpu.host.process import identify
from tests.gpu_sim.forked import Forked
from tests.support.paths import PYTHONPATH

PATIENCE_S = 30.0
MIB = 1 << 20


def eventually(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for what nothing signals; fail with `what` after the deadline."""
    deadline = time.monotonic() + patience_s
    pause_s = 0.001
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {patience_s} s"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.01)


class KernelError(Exception):
    """The line raised; `name` is the class of the exception."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class KernelProcess:
    """A process on a device. A cell that starts with `!` is statements, others have a value. `module` is what cells know as `cuda`."""

    def __init__(self, module: str, environment: dict[str, str], *, uid: int | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER_GPU_")}
        (cells, written), (read, messages) = os.pipe(), os.pipe()
        self._cells, self._messages = os.fdopen(written, "wb"), os.fdopen(read, "rb")
        self.process = Forked(
            "tests.gpu_sim.child:main",
            module,
            imports=[module],
            stdin=cells,
            stdout=messages,
            environment={**inherited, **environment, "PYTHONPATH": PYTHONPATH},
            uid=uid,
        )
        os.close(cells)
        os.close(messages)
        self.pid = self.process.pid
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    def run(self, line: str) -> Any:  # noqa: ANN401 (whatever the line gives)
        """Run a line and return its value. Raises KernelError."""
        self.begin(line)
        return self.result()

    def begin(self, line: str) -> None:
        """Start a line; it is running when this returns."""
        self._cells.write(json.dumps(line).encode() + b"\n")
        self._cells.flush()
        assert self.message() == {"begun": True}

    def result(self) -> Any:  # noqa: ANN401 (whatever the line gives)
        """Wait for the line that was begun."""
        message = self.message()
        assert message is not None, "no answer"
        if "error" in message:
            raise KernelError(message["error"], message["message"])
        return message["value"]

    def message(self, patience_s: float = PATIENCE_S) -> dict[str, Any] | None:
        """Return the next message, None if there was none in time."""
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._messages], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._messages.fileno(), 1 << 16)
            assert part, "the kernel died"
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def is_blocked(self) -> bool:
        """Return whether the line that was begun gives no answer for a while."""
        return self.message(0.15) is None

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill it and wait until it is reaped. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._cells, self._messages):
            with suppress(BrokenPipeError):
                pipe.close()

    def end(self) -> int:
        """End its input, wait until it exits, and return its exit status."""
        self._cells.close()
        return self.process.wait()


class Kernel(KernelProcess):
    """A process on a device of a simulated host."""

    def __init__(
        self, simulated: host.SimulatedHost, environment: dict[str, str] | None = None, *, device: int = 0
    ) -> None:
        on_device = {
            "JUPYTER_GPU_SIMULATED_DIR": str(simulated.directory),
            "JUPYTER_GPU_SIMULATED_DEVICE": simulated.devices[device].device_id,
        }
        super().__init__("fractional_gpu.gpu.simulated.cuda", {**on_device, **(environment or {})})


class WorkerProcess(NamedTuple):
    """A checkpoint worker and its channel."""

    process: Forked
    channel: socket.socket


def worker_process(simulated: host.SimulatedHost) -> AbstractContextManager[WorkerProcess]:
    """A checkpoint worker for a simulated host; killed at the end."""
    return backend_worker(f"simulated:{simulated.directory}", {})


@contextmanager
def backend_worker(backend: str, environment: dict[str, str]) -> Iterator[WorkerProcess]:
    """A checkpoint worker, as the broker starts it; killed at the end."""
    paths = [environment.get("PYTHONPATH", ""), PYTHONPATH]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = Forked(
        "fractional_gpu.gpu.worker:main",
        "--backend",
        backend,
        imports=["fractional_gpu.gpu.simulated.checkpointer", "fractional_gpu.gpu.nvidia.checkpointer"],
        stdin=theirs.fileno(),
        stdout=2,
        environment={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )
    theirs.close()
    worker = WorkerProcess(process, ours)
    try:
        assert answer(worker) == {"protocol": 1}
        yield worker
    finally:
        process.kill()
        process.wait()
        ours.close()


def in_flight(simulated: host.SimulatedHost, pid: int) -> bool:
    """Return whether a call of the process is in flight: the gate's exclusive lock is then refused."""
    gate = simulated.directory / "memory" / str(current_key(pid)) / "gate"
    with gate.open("rb") as file:
        return not lock_file(file.fileno(), fcntl.LOCK_EX, 0.0)


def ask(worker: WorkerProcess, operation: str, pid: int, **more: object) -> None:
    """Send the worker a request about a living process."""
    send(worker, {"op": operation, "target": identify(pid).to_dict(), **more})


def send(worker: WorkerProcess, message: object) -> None:
    """Send the worker anything."""
    worker.channel.send(json.dumps(message).encode())


def answer(worker: WorkerProcess) -> dict[str, Any]:
    """Return the worker's next message."""
    found: dict[str, Any] = json.loads(worker.channel.recv(1 << 16))
    return found
