"""Tries a checkpoint and a restore on a child process of our own, because only a real CUDA process shows what the driver allows.

The doctor runs this, and so does the broker when it starts. It touches no other process, sets a time limit for each step, and kills the
child (`probe_process`) at the end. The result includes the memory the monitor reports for the child. If devices do not report memory under
the pids the broker sees, the broker cannot know how much host memory a suspend needs.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from fractional_gpu.gpu import driver_environment
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, Monitor
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import ProcessIdentity, identify

PHASES: Final = ("lock", "checkpoint", "restore", "unlock")
_START_S: Final = 60.0  # the limit for starting the probe process, because starting the driver takes seconds
_ANSWER_S: Final = 20.0
_LOCK_MS: Final = 10_000
_COPY_S: Final = 60.0
_NO_RIGHTS: Final = (
    "for our own child process, this means missing rights (run the broker as root, or with CAP_SYS_PTRACE), or a sandbox such as gVisor, "
    "which does not let the driver reach other processes"
)


@dataclass(slots=True, kw_only=True)
class LimitTrial:
    """Whether a memory limit is enforced. If not, `why_not` says why. `is_told` is set if a process sees its limit as the device's size."""

    why_not: str = ""
    is_told: bool = False


@dataclass(slots=True)
class TrialResult:
    """The result of a trial. `wrong` is a sentence that describes the failure, or "" on success."""

    phases_us: dict[str, int] = field(default_factory=dict)
    before_mib: int | None = None  # the process's memory before the checkpoint; None if the device did not report it
    left_mib: int | None = None  # the process's memory while it was checkpointed
    wrong: str = ""
    code: GPUErrorCode | None = None  # the error code of the device operation that failed
    not_tried: str = ""  # a sentence that explains why there was no trial
    limit: LimitTrial | None = None  # the result for a memory limit, if one was tried


async def try_checkpoint(
    worker: WorkerLink, monitor: Monitor, device_id: str, *, exempt_pids: set[int] | None = None
) -> TrialResult:
    """Try a checkpoint. This takes seconds, or minutes if the driver hangs. Cancellation kills the probe process.

    While the probe process is running, its pid is in `exempt_pids`, so that the broker does not require it to have a lease. A driver
    failure, a full device, a missing permission or a lack of host memory is reported in the result, not raised.
    """
    result = TrialResult()
    try:
        async with probe_process(monitor, device_id, exempt_pids if exempt_pids is not None else set()) as process:
            await _move_out_and_back(worker, monitor, device_id, process, result)
    except GPUError as error:
        result.wrong, result.code = str(error), error.code
    except TimeoutError:
        result.wrong = "the process did not answer in time"
    except (OSError, RuntimeError) as error:  # RuntimeError also if no thread can be started to watch the process
        result.wrong = str(error)
    return result


async def _move_out_and_back(
    worker: WorkerLink, monitor: Monitor, device_id: str, process: asyncio.subprocess.Process, result: TrialResult
) -> None:
    identity = identify(process.pid)
    result.before_mib = await _used_mib(monitor, device_id, identity)
    try:
        result.phases_us["lock"] = await worker.lock(identity, _LOCK_MS)
    except GPUError as error:
        if error.code is not GPUErrorCode.OPERATING_SYSTEM:
            raise
        raise GPUError(GPUErrorCode.NOT_PERMITTED, f"{error}; {_NO_RIGHTS}") from error
    result.phases_us["checkpoint"] = await worker.checkpoint(identity, _COPY_S)
    result.left_mib = await _used_mib(monitor, device_id, identity)
    result.phases_us["restore"] = await worker.restore(identity, None, _COPY_S)
    result.phases_us["unlock"] = await worker.unlock(identity)
    answer = await ask_probe(process, "check")
    if answer != "intact":
        raise RuntimeError(f"its memory changed during the suspend and resume ({answer or 'it ended'})")


async def ask_probe(process: asyncio.subprocess.Process, command: str) -> str:
    """Send the probe process a command and return its answer, or "" if the process has ended. Raises TimeoutError or RuntimeError."""
    if process.stdin is None:
        raise RuntimeError("the process has no standard input")
    process.stdin.write(f"{command}\n".encode())
    return await _read_line(process, _ANSWER_S)


async def _used_mib(monitor: Monitor, device_id: str, identity: ProcessIdentity) -> int | None:
    use = await asyncio.to_thread(monitor.use, device_id)
    return next((process.used_mib for process in use.processes if process.pid == identity.pid), None)


@asynccontextmanager
async def probe_process(
    monitor: Monitor, device_id: str, exempt_pids: set[int], *group: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "fractional_gpu.gpu.probe_process", monitor.kind, *group),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=driver_environment.cleaned(os.environ, keep=monitor.kernel_environment(device_id)),
    )
    exempt_pids.add(process.pid)
    try:
        answer = await _read_line(process, _START_S)
        if answer != "ready":
            raise RuntimeError(f"it could not allocate device memory: {answer.removeprefix('failed: ') or 'it ended'}")
        yield process
    finally:
        exempt_pids.discard(process.pid)
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _read_line(process: asyncio.subprocess.Process, limit_s: float) -> str:
    if process.stdout is None:
        raise RuntimeError("the process has no standard output")
    async with asyncio.timeout(limit_s):
        return (await process.stdout.readline()).decode(errors="replace").strip()
