"""How much of a lease's device others use: processes of no lease, and leases beside those that are named, other users' among them.

Memory shows that a process is on the device, but not whether it works. Where the device counts by process, the answer is exact; otherwise
there is none. A process that has ended does not count: nothing tells afterwards whether it was of a named lease.
"""

import logging
from collections.abc import Sequence

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import members_of
from fractional_gpu.broker.lanes import QUESTIONS
from fractional_gpu.gpu.interface import DeviceUse, DeviceUtilisation, GPUError, ProcessKind
from fractional_gpu.host.clock import since_boot_us
from fractional_gpu.host.process import Snapshot

log = logging.getLogger(__name__)

_MOST_AGE_S = 1.0  # of the processes' list: questions do not add up to a pass each


async def others_use_milli(broker: Broker, kernels: Sequence[Kernel], last_ms: int) -> int | None:
    """Return what others used of the first lease's device in the last milliseconds, the mean in thousandths of the device.

    `kernels`: the leases that are no others. None: the lease has no single device, or the device does not count by process. Cancelled:
    nothing is left behind.
    """
    view = broker.arbiter.lease(kernels[0].lease_id)
    if view is None or view.device_id is None or len(view.device_ids) > 1:
        return None
    reading = await QUESTIONS.run(_read, broker, view.device_id, since_boot_us() - last_ms * 1000)
    if reading is None:
        return None
    use, utilisation, snapshot = reading
    roots = broker.roots()
    ours = {
        member.pid
        for kernel in kernels
        if kernel.identity is not None
        for member in [kernel.identity, *members_of(kernel, kernel.identity, snapshot, roots)]
    }
    there = [one for one in use.processes if one.kind is not ProcessKind.GRAPHICS]
    # The MPS server's processes compute in the server's name: nothing tells theirs from one another.
    if utilisation.by_pid is None or any(one.kind is ProcessKind.MPS for one in there):
        return None
    return sum(utilisation.by_pid.get(one.pid, 0) for one in there if one.pid not in ours)


def _read(broker: Broker, device_id: str, since_us: int) -> tuple[DeviceUse, DeviceUtilisation, Snapshot] | None:
    """In a thread. None: the device cannot be read, or reports nothing."""
    try:
        use, utilisation = broker.monitor.use(device_id), broker.monitor.utilisation(device_id, since_us)
    except GPUError as error:  # whether it is lost is seen where its memory is sampled
        log.debug("what processes use of device %s could not be read: %s", device_id, error)
        return None
    return None if utilisation is None else (use, utilisation, broker.scans.take(_MOST_AGE_S))
