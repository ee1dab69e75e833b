"""The start of a program under a lease: a stub is attached to the lease, waits for the GPU, and becomes the program.

What starts programs (`jupyter gpu run`, `jupyter gpu measure`) says by `say` why they wait.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import FrameType
from typing import Final

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.commands.run.process import ENDING
from fractional_gpu.commands.terminal.connection import watch_silence
from fractional_gpu.commands.terminal.errors import CommandError
from fractional_gpu.commands.terminal.output import say as write
from fractional_gpu.commands.terminal.progress import WaitLine
from fractional_gpu.jupyter.kernel_lease import KernelLease, environment_with
from fractional_gpu.jupyter.kernel_process import identity_of
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.messages import COMMAND, AcquireRequest, AttachRequest, Progress, ProgressKind
from fractional_gpu_kernel.memory.limits import CONTEXT, CONTEXT_MIB, DEVICE, MEMORY, MemoryLimits, framework_mib

TIMEOUT_S: Final = 30.0
_LEAST_WAIT_MS: Final = 1000  # the ledger has to be written, too
_ATTEMPTS: Final = 3  # to reach a broker that ends while the command waits
_TORCH: Final = "JUPYTER_GPU_MEMORY_FRACTION"


class EndedError(Exception):
    """A signal ended the wait."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let the signals that end a program raise EndedError in the main thread, unless they are ignored."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise EndedError(number)

    numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def attach(lease: KernelLease, pid: int, *, served: bool = False) -> None:
    """Attach the stub's process to its lease. Raises the errors of the protocol."""
    lease.attach(
        AttachRequest(**identity_of(pid), connection={}, language="", ipykernel=False, kind=COMMAND, served=served)
    )


def command_environment(lease: KernelLease, granted: Mapping[str, str]) -> dict[str, str]:
    """Return what the command gets: a kernel's variables, hints for frameworks that read some, and a fraction for those that do not."""
    environment = {**environment_with(lease, os.environ), **granted, "JUPYTER_GPU_KIND": COMMAND}
    MemoryLimits(environment).bind({})
    device_mib = int(environment.get(DEVICE, "0"))
    if device_mib:
        mib = framework_mib(int(environment[MEMORY]), int(environment.get(CONTEXT, CONTEXT_MIB)))
        environment[_TORCH] = f"{min(1.0, mib / device_mib):.4f}"
    return environment


def wait_for_gpu(lease: KernelLease, wait_ms: int | None, say: Callable[[str], None]) -> Mapping[str, str]:
    """Return the variables that bind the command to its device, as soon as it has one.

    Raises CommandError with the reason when it is refused, and BrokerUnavailableError when no broker can be reached.
    """
    line = WaitLine(lambda text: say(f"waiting for the GPU: {text}"))
    for attempt in range(_ATTEMPTS):
        try:
            with ensure_broker(lease.socket, token=lease.token, timeout_s=TIMEOUT_S) as client:
                last = _last_progress(client, lease, wait_ms, line)
                break
        except BrokerUnavailableError:
            if attempt == _ATTEMPTS - 1:
                raise
        finally:
            line.stop()
    if last.kind != ProgressKind.GRANTED:
        raise CommandError(last.sentence)
    return last.environment


def _last_progress(client: BrokerClient, lease: KernelLease, wait_ms: int | None, line: WaitLine) -> Progress:
    """Return the grant or the refusal, and tell of the wait meanwhile, and of a broker that does not answer."""
    if wait_ms is None:
        lines = client.hold(lease.lease_id, AcquireRequest())
    else:
        lines = client.acquire(lease.lease_id, AcquireRequest(wait_ms=max(wait_ms, _LEAST_WAIT_MS)))
    silence = watch_silence(client, lambda text: write(text, sys.stderr, flush=True))
    last = Progress(kind=ProgressKind.REFUSED)
    try:
        with closing(lines):
            for last in lines:
                if last.kind != ProgressKind.WAITING:
                    break
                line.update(last)
    finally:
        silence.stop()
    return last
