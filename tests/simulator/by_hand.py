"""Machines and sessions small enough to work a run out by hand."""

from dataclasses import replace

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator.machine import Host, SwapSpeed
from fractional_gpu.simulator.traces import Cell, Session

SWAP = SwapSpeed(fixed_ms=100, save_mib_per_s=1000, restore_mib_per_s=2000)


def host(count: int = 1, mib: int = 8000, **policy: object) -> Host:
    """Devices of that size in one pool whose leases are suspended only if another needs the room."""
    devices = tuple(DeviceSpec(device_id=f"d{number}", name="d", memory_mib=mib) for number in range(count))
    names = tuple(device.device_id for device in devices)
    pool = PoolSpec(
        name="default",
        devices=names,
        idle_after_ms=None,
        idle_auto=False,
        preempt_equals=False,
        min_residency_swaps_milli=4_000,
    )
    return Host(devices=devices, pools=(replace(pool, **policy),), swap=SWAP)  # type: ignore[arg-type]


def session(name: str, *cells: Cell, open_ms: int = 0, close_ms: int = 1_000_000) -> Session:
    return Session(name, name, open_ms, close_ms, 1, 0, cells)


def gpu_cell(start_ms: int, duration_ms: int, mib: int = 6000, util: int = 10) -> Cell:
    return Cell(start_ms, duration_ms, 1, mib, util)
