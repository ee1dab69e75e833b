"""Whether this user may checkpoint here: a trial with a checkpoint worker like the broker's (`gpu.checkpoint_trial`).

While a broker manages any of the devices nothing is tried: two workers at a time are not safe. During the trial the devices are claimed,
so that no broker starts to manage them. `check_claims` says where that broker is another one than this user's.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from fractional_gpu.commands.doctor.report import Finding, note, ok, problem, warning
from fractional_gpu.gpu.checkpoint_trial import PHASES, TrialResult, try_checkpoint
from fractional_gpu.gpu.interface import DeviceInfo, GPUErrorCode, Monitor
from fractional_gpu.gpu.probe_process import MEMORY_MIB
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.claims import DeviceClaim, DeviceClaimedError
from fractional_gpu.host.process import PROC


def claim_and_try(backend: str, monitor: Monitor, devices: Sequence[DeviceInfo]) -> TrialResult:
    """Try it on the first device that can be checkpointed. Blocks for seconds, with a driver that hangs for minutes.

    Raises nothing that a driver, a broker or a missing permission causes: those are results.
    """
    able = [device for device in devices if device.checkpointable]
    if not able:
        return TrialResult(not_tried="no device can be checkpointed")
    with ExitStack() as claims:
        try:
            for device in devices:
                claims.enter_context(DeviceClaim.claim(device.device_id))
        except DeviceClaimedError as error:
            return TrialResult(not_tried=str(error))
        return asyncio.run(_try(backend, monitor, able[0]))


def check_claims(devices: Sequence[DeviceInfo], broker: int | None) -> Iterator[Finding]:
    """Return a warning for each device that another broker manages than this user's; `broker`: the process of that one, if it runs."""
    for device in devices:
        try:
            DeviceClaim.claim(device.device_id).close()
        except DeviceClaimedError as error:
            if broker is None or error.pid != broker:
                yield warning(
                    "broker",
                    str(error),
                    "no kernel of yours starts there before: ask an administrator for one that serves all users (docs/operating.md)",
                )


async def _try(backend: str, monitor: Monitor, device: DeviceInfo) -> TrialResult:
    worker = WorkerLink(backend)
    try:
        return await try_checkpoint(worker, monitor, device.device_id)
    finally:
        await worker.close()


def findings_of(result: TrialResult, *, kind: str) -> list[Finding]:
    """Return what the attempt means. `kind` is the monitor's."""
    if result.not_tried:
        return [note("checkpoint", f"not tried: {result.not_tried}")]
    if result.wrong:
        return [problem("checkpoint", f"tried on a process of our own: {result.wrong}", _advice(result.code))]
    each = ", ".join(f"{phase} {result.phases_us[phase] / 1000:.0f} ms" for phase in PHASES)
    simulated = " on a simulated device" if kind == "simulated" else ""
    found = [
        ok("checkpoint", f"tried on a process of our own{simulated}: {MEMORY_MIB} MiB saved and brought back ({each})")
    ]
    if result.before_mib is None:
        found.append(
            warning(
                "process-use",
                "the driver does not count memory under the process ids that are seen here: what a kernel uses is not known",
                "in a container, share the host's process ids (--pid=host), or run the broker on the host",
            )
        )
    elif result.left_mib:
        found.append(
            warning(
                "process-use",
                f"of {result.before_mib} MiB the process still held {result.left_mib} MiB on the device while it was saved",
                "plan for so much per suspended kernel, and please report it with the driver's version",
            )
        )
    else:
        found.append(ok("process-use", f"{result.before_mib} MiB were counted for it, and none while it was saved"))
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
