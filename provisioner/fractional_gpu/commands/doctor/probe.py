"""Whether this user may checkpoint here: really tried, by a checkpoint worker like the broker's, on a process of our own.

The rules:
- Nobody else's process is touched. While a broker manages any of the devices nothing is tried: two workers at a time are not safe.
  Meanwhile the devices are claimed, so that no broker starts to manage them.
- Every step has a time limit, and in the end both processes are gone, whatever happened.
- What NVML says of the process before and after is part of the result: a broker that cannot see by pid what a kernel uses cannot
  know what a suspend will need.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fractional_gpu.commands.doctor.finding import (
    Finding,
    note,
    ok,
    problem,
    warning,
)
from fractional_gpu.gpu import driver_environment
from fractional_gpu.gpu.interface import (
    DeviceInfo,
    GPUError,
    GPUErrorCode,
    Monitor,
)
from fractional_gpu.gpu.probe_process import VICTIM_MIB
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.claims import DeviceClaim, DeviceClaimedError
from fractional_gpu.host.process import PROC, ProcessIdentity, identify

__all__ = ["Probe", "findings_of", "try_checkpoint"]

_START_S = 60.0  # of the victim: starting the driver takes seconds
_ANSWER_S = 20.0
_LOCK_MS = 10_000
_MOVE_S = 60.0
_PHASES = ("lock", "checkpoint", "restore", "unlock")


@dataclass(slots=True)
class Probe:
    """What became of the attempt. Memory in MiB, phases in microseconds; `wrong` is empty after a good end."""

    phases_us: dict[str, int] = field(default_factory=dict)
    before_mib: int | None = None  # None: NVML did not count the process
    left_mib: int | None = None
    wrong: str = ""
    code: GPUErrorCode | None = None
    not_tried: str = ""


def try_checkpoint(backend: str, monitor: Monitor, devices: Sequence[DeviceInfo]) -> Probe:
    """Try it on the first device that can be checkpointed. Blocks for seconds, with a driver that hangs for minutes.

    Raises nothing that a driver, a broker or a missing permission causes: those are results.
    """
    able = [device for device in devices if device.checkpointable]
    if not able:
        return Probe(not_tried="no device can be checkpointed")
    with ExitStack() as claims:
        try:
            for device in devices:
                claims.enter_context(DeviceClaim.claim(device.device_id))
        except DeviceClaimedError as error:
            return Probe(not_tried=str(error))
        return asyncio.run(_try(backend, monitor, able[0]))


def findings_of(probe: Probe, *, kind: str) -> list[Finding]:
    """Return what the attempt means. `kind` is the monitor's."""
    if probe.not_tried:
        return [note("checkpoint", f"not tried: {probe.not_tried}")]
    if probe.wrong:
        return [problem("checkpoint", f"tried on a process of our own: {probe.wrong}", _advice(probe.code))]
    each = ", ".join(f"{phase} {probe.phases_us[phase] / 1000:.0f} ms" for phase in _PHASES)
    simulated = " on a simulated device" if kind == "simulated" else ""
    found = [
        ok("checkpoint", f"tried on a process of our own{simulated}: {VICTIM_MIB} MiB saved and brought back ({each})")
    ]
    if probe.before_mib is None:
        found.append(
            warning(
                "process-use",
                "the driver does not count memory under the process ids that are seen here: what a kernel uses is not known",
                "in a container, share the host's process ids (--pid=host), or run the broker on the host",
            )
        )
    elif probe.left_mib:
        found.append(
            warning(
                "process-use",
                f"of {probe.before_mib} MiB the process still held {probe.left_mib} MiB on the device while it was saved",
                "plan for so much per suspended kernel, and please report it with the driver's version",
            )
        )
    else:
        found.append(ok("process-use", f"{probe.before_mib} MiB were counted for it, and none while it was saved"))
    return found


def _advice(code: GPUErrorCode | None) -> str:
    if code is GPUErrorCode.NOT_PERMITTED:
        scope = Path(PROC, "sys/kernel/yama/ptrace_scope")
        level = scope.read_text().strip() if scope.is_file() else "not set"
        return (
            "run the broker as root (a system service), or give it CAP_SYS_PTRACE; "
            f"kernel.yama.ptrace_scope is {level}: 0 allows it to the same user"
        )
    if code is GPUErrorCode.WORKER_HUNG:
        return "the driver did not answer: `nvidia-smi` and `dmesg` may tell more; a reboot may be needed"
    return "kernels run, and are not suspended, until this works; see the driver's release notes"


async def _try(backend: str, monitor: Monitor, device: DeviceInfo) -> Probe:
    probe = Probe()
    try:
        async with _victim(monitor, device) as process:
            await _move(backend, monitor, device, process, probe)
    except GPUError as error:
        probe.wrong, probe.code = str(error), error.code
    except TimeoutError:
        probe.wrong = "the process did not answer in time"
    except _VictimError as error:
        probe.wrong = str(error)
    return probe


async def _move(
    backend: str, monitor: Monitor, device: DeviceInfo, process: asyncio.subprocess.Process, probe: Probe
) -> None:
    identity = identify(process.pid)
    worker = WorkerLink(backend)
    try:
        await worker.start()
        probe.before_mib = await _used(monitor, device, identity)
        probe.phases_us["lock"] = await worker.lock(identity, _LOCK_MS)
        probe.phases_us["checkpoint"] = await worker.checkpoint(identity, _MOVE_S)
        probe.left_mib = await _used(monitor, device, identity)
        probe.phases_us["restore"] = await worker.restore(identity, None, _MOVE_S)
        probe.phases_us["unlock"] = await worker.unlock(identity)
    finally:
        await worker.close()
    if process.stdin is None:
        raise _VictimError("the process has no standard input")
    process.stdin.write(b"\n")
    said = await _line(process, _ANSWER_S)
    if said != "intact":
        raise _VictimError(f"its memory was not the same afterwards ({said or 'it ended'})")


async def _used(monitor: Monitor, device: DeviceInfo, identity: ProcessIdentity) -> int | None:
    use = await asyncio.to_thread(monitor.use, device.device_id)
    return next((process.used_mib for process in use.processes if process.pid == identity.pid), None)


@asynccontextmanager
async def _victim(monitor: Monitor, device: DeviceInfo) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with device memory, killed at the end."""
    environment = driver_environment.cleaned(os.environ, keep=monitor.kernel_environment(device.device_id))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "fractional_gpu.gpu.probe_process", monitor.kind),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        said = await _line(process, _START_S)
        if said != "ready":
            raise _VictimError(f"no device memory could be had for it: {said.removeprefix('failed: ') or 'it ended'}")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _line(process: asyncio.subprocess.Process, limit_s: float) -> str:
    if process.stdout is None:
        raise _VictimError("the process has no standard output")
    async with asyncio.timeout(limit_s):
        return (await process.stdout.readline()).decode(errors="replace").strip()


class _VictimError(Exception):
    """The process on which it was tried said something unexpected; the sentence says what."""
