"""What the tests of suspend, resume and recovery share: the states of kernels, and a machine with too little memory."""

import errno
from collections.abc import Callable, Collection, Mapping

import pytest

from fractional_gpu.broker.kernels import process_inspector
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap import suspend as suspend_module
from fractional_gpu.broker.swap import swap as swap_module
from fractional_gpu.core.effects import Resume
from fractional_gpu.gpu.interface import ProcessState
from fractional_gpu.host.memory import Shortage
from fractional_gpu.host.process import Snapshot
from fractional_gpu.host.process import scan as real_scan
from tests.broker.driver import DEVICE, Driver

__all__ = ["CLOSES", "SHORT", "S", "fails_to_look", "resume_of", "room_for", "running", "saved"]

S = ProcessState


CLOSES = {"close": "closed", "shrink": "done"}


def room_for(left_mib: int, limited_by: str) -> Callable[[Mapping[int, int]], Shortage | None]:
    """Return a check of host memory for several processes that share one limit with this much left."""

    def shortage(needs: Mapping[int, int]) -> Shortage | None:
        need_mib = sum(needs.values())
        return Shortage(need_mib, left_mib, limited_by) if need_mib > left_mib else None

    return shortage


def running(driver: Driver, pids: list[int]) -> None:
    for pid in pids:
        driver.has_context(pid, S.RUNNING, 300)


SHORT = OSError(errno.EMFILE, "Too many open files")


def fails_to_look(monkeypatch: pytest.MonkeyPatch, error: Exception, at: Collection[int]) -> None:
    """Make these looks at the machine fail, counted from one. None is repeated because of its age, even on a slow machine."""
    looks = 0

    def scan(name: str, *_: object) -> Snapshot:
        nonlocal looks
        looks += 1
        if looks in at:
            raise error
        return real_scan(name)

    monkeypatch.setattr(process_inspector, "scan", scan)
    for module in (suspend_module, swap_module):
        monkeypatch.setattr(module, "FRESH_S", 3600.0)


def resume_of(kernel: Kernel) -> Resume:
    return Resume(
        lease_id=kernel.lease_id,
        operation_id=1,
        generation=1,
        device_ids=(DEVICE,),
        from_device_ids=(DEVICE,),
        reserve_mib=600,
    )


def saved(driver: Driver, pids: list[int]) -> None:
    for pid in pids:
        driver.has_context(pid, S.CHECKPOINTED, 300)
