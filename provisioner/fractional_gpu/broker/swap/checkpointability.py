"""Checks whether a kernel can be checkpointed at all, after its gate has been closed and before any process is locked.

The driver guarantees nothing about a process after a failed checkpoint, so this module looks for known obstacles first.

- NCCL: Communicators within one machine map segments in /dev/shm, which can be detected. Collectives with processes outside the kernel's
  tree, or without shared memory (`NCCL_SHM_DISABLE=1`), can't be detected.
- Profilers and debuggers: Injected ones are recognised by their libraries, and by the variable that makes the driver load such a library.
  `libcupti` proves nothing, because torch and JAX always link it. The extension detects profilers that the kernel itself starts.
"""

from collections.abc import Collection
from contextlib import suppress

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import HostSnapshot
from fractional_gpu.broker.lanes import SWAPS
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.gpu.interface import ProcessKind
from fractional_gpu.host.process import ProcessIdentity, environment_value, maps
from fractional_gpu.protocol.codec import printable

_NCCL_SEGMENT = "/dev/shm/nccl-"  # noqa: S108 - how the names of its files begin
_FEWEST_MEMBERS = 2  # processes that form a collective
_INJECTED = (  # how the libraries' names begin
    "libToolsInjection",  # Nsight Systems
    "libcuda-injection.so",  # Nsight Compute
    "libInterceptorInjectionTarget.so",  # Nsight Compute, Compute Sanitizer
    "libsanitizer-collection.so",
    "libcudainj",  # nvprof
)
_INJECTION = "CUDA_INJECTION64_PATH"


async def why_not_checkpointable(
    arbiter: Arbiter, kernel: Kernel, processes: Collection[ProcessIdentity], host: HostSnapshot
) -> str:
    """Return a sentence explaining why these CUDA processes can't be checkpointed, or "" if no obstacle is known."""
    view = arbiter.lease(kernel.lease_id)
    if view is not None and view.unsuspendable_reason:
        return view.unsuspendable_reason
    pids = sorted(process.pid for process in processes)
    clients = {one.pid for use in host.uses.values() for one in use.processes if one.kind is ProcessKind.MPS}
    if own_clients := clients.intersection(pids):
        return f"process {min(own_clients)} is a client of the MPS server, and the driver cannot checkpoint MPS clients"
    return await SWAPS.run(_find_obstacle, pids)


def _find_obstacle(pids: list[int]) -> str:
    if len(pids) >= _FEWEST_MEMBERS:
        members = [pid for pid in pids if maps(pid, lambda path: path.startswith(_NCCL_SEGMENT))]
        if len(members) >= _FEWEST_MEMBERS:
            return (
                f"its processes {', '.join(map(str, members))} share NCCL memory: checkpointing one member of a collective "
                "hangs the others"
            )
    return next((why_not for pid in pids if (why_not := _injected(pid))), "")


def _injected(pid: int) -> str:
    library = ""
    with suppress(ProcessLookupError, PermissionError):
        library = environment_value(pid, _INJECTION) or ""
    if not library and not maps(pid, lambda path: path.rpartition("/")[2].startswith(_INJECTED)):
        return ""
    named = f" ({_INJECTION}={printable(library)[:100]})" if library else ""
    return f"a profiler or debugger is attached to process {pid}{named}, and the driver cannot save such a process"
