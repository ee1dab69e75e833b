"""What a pool's way of sharing puts into its kernels' environment, and what it needs of the machine.

- `mps`: the thread percentage is the fraction (a cap on multiprocessors, not a reservation), and the pinned memory limit is the memory
  cap, for each device that the kernel sees. The administrator runs the control daemon.
- `mig`: the kernel may use the whole instance, whatever the fraction came to.
- HAMi-core is preloaded when the kernel starts, if the administrator names its library. Its bookkeeping file would be shared by all
  kernels of a machine, so each lease gets a file of its own.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fractional_gpu.config import ConfigError
from fractional_gpu.core.model import DeviceView, LeaseSpec, PoolSpec, Sharing
from fractional_gpu.gpu.driver_environment import PRELOAD, PRELOADED_FOR_US

_MIG = "MIG-"


def sharing_environment(pool: PoolSpec, spec: LeaseSpec, limit_mib: int, held: Sequence[DeviceView]) -> dict[str, str]:
    """Return what binds a kernel to its share. `limit_mib`: its cap on each device; `held`: the devices that it has so far."""
    if pool.sharing is Sharing.MPS:
        limits = ",".join(f"{place}={limit_mib}M" for place in range(max(1, spec.devices)))
        return {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(_percent(spec)),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limits,
        }
    if pool.sharing is Sharing.MIG and held:
        return {"JUPYTER_GPU_MEMORY_MIB": str(max(limit_mib, min(device.leasable_mib for device in held)))}
    return {}


def launch_environment(pool: PoolSpec, spec: LeaseSpec) -> dict[str, str]:
    """Return the variables that the kernel's process must start with."""
    if not pool.hami_library:
        return {}
    return {
        PRELOAD: pool.hami_library,
        PRELOADED_FOR_US: pool.hami_library,
        "CUDA_DEVICE_MEMORY_LIMIT": f"{spec.reserve_mib}m",
        "CUDA_DEVICE_SM_LIMIT": str(_percent(spec)),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(_books(spec.lease_id)),
    }


def remove_books(lease_id: str) -> None:
    """Remove the bookkeeping file of HAMi-core for a lease that is over, if there is one and we may."""
    with suppress(PermissionError):
        _books(lease_id).unlink(missing_ok=True)


def check_pools(pools: Sequence[PoolSpec], names: Mapping[str, str], *, simulated: bool) -> None:
    """Check the pools against the machine; `names`: of its devices, by id. Raises ConfigError that says what to do."""
    for pool in pools:
        if pool.hami_library and not Path(pool.hami_library).is_file():
            raise ConfigError(
                f"pool {pool.name!r}: hami_library is {pool.hami_library!r}, and there is no such file: install HAMi-core, or leave the "
                "key out"
            )
        if pool.sharing is Sharing.MIG and not simulated:
            for device_id in pool.devices:
                if not device_id.startswith(_MIG):
                    raise ConfigError(
                        f"pool {pool.name!r} hands out MIG instances, and {names.get(device_id, 'a device')} ({device_id}) is a whole "
                        "device: divide it (nvidia-smi -mig 1, nvidia-smi mig -cgi), or leave 'sharing' out"
                    )


def _books(lease_id: str) -> Path:
    return Path(tempfile.gettempdir(), f"jupyter-gpu-{lease_id}.hami")


def _percent(spec: LeaseSpec) -> int:
    """Return the fraction in percent, not less than was asked for."""
    return max(1, -(-spec.fraction_milli // 10))
