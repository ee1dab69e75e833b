"""Tests whether the driver enforces a control group's memory limit on a device, by setting a limit for a child process.

The child runs in a separate control group below the broker's. It must be able to allocate memory up to the limit, but not beyond it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from fractional_gpu.gpu.checkpoint_trial import LimitTrial, ask_probe, probe_process
from fractional_gpu.gpu.interface import GPUError, Monitor
from fractional_gpu.gpu.probe_process import MEMORY_MIB
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.control_groups import ROOT, mounts
from fractional_gpu.host.own_group import group_of_self


async def try_memory_limit(
    worker: WorkerLink, monitor: Monitor, device_id: str, device_mib: int, *, exempt_pids: set[int] | None = None
) -> LimitTrial:
    """Run the test, which takes several seconds. Cancellation kills the child and removes its control group and the limit."""
    try:
        with _group() as (group, folder):
            await worker.set_limit(device_id, group, device_mib)
            async with probe_process(
                monitor, device_id, exempt_pids if exempt_pids is not None else set(), folder
            ) as process:
                found = await worker.read_limit(device_id, group)
                if found is None or found.hard_mib != device_mib or found.used_mib < MEMORY_MIB:
                    return LimitTrial(why_not=f"a test set a limit of {device_mib} MiB, but the driver reports {found}")
                near_mib = found.used_mib + MEMORY_MIB // 2
                await worker.set_limit(device_id, group, near_mib)
                is_told = await ask_probe(process, "size") == str(near_mib)
                past = await ask_probe(process, "grow")
                await worker.set_limit(device_id, group, device_mib)
                within = await ask_probe(process, "grow")
                if (past, within) != ("full", "grown"):
                    return LimitTrial(
                        why_not=f"an allocation beyond a test limit reported {past or 'nothing'} (expected full), and one below "
                        f"it {within or 'nothing'} (expected grown)"
                    )
                await worker.set_limit(device_id, group, None)
                return LimitTrial(is_told=is_told)
    except (GPUError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
        return LimitTrial(why_not=str(error) or "the process did not answer in time")


@contextmanager
def _group() -> Iterator[tuple[str, str]]:
    """Create a control group below our own for the duration of the block. Raises OSError or RuntimeError."""
    mount = next((one for one in mounts() if one.version == 2), None)
    own = group_of_self()
    folder = mount.folder(own) if mount is not None and own is not None else None
    if folder is None:
        raise RuntimeError("cgroup v2 is not available")
    name = f"jupyter-gpu-trial-{os.getpid()}"
    (folder / name).mkdir()
    try:
        yield str((own or ROOT) / PurePosixPath(name)), str(folder / name)
    finally:
        (folder / name).rmdir()
