"""Devices that leave the host with what is on them, and others in their places."""

from collections.abc import Callable, Sequence

from fractional_gpu.core.events import Attached, DeviceDrained, DeviceLost, DeviceSeen, DeviceUndrained, ProcessExited
from fractional_gpu.core.model import HOLDING, LeaseState
from fractional_gpu.core.rules.salvage import value_of
from fractional_gpu.simulator.one_host.kernel import Kernel
from fractional_gpu.simulator.one_host.sessions import Sessions
from fractional_gpu.simulator.one_host.state import HostState
from fractional_gpu.simulator.revocation.orders import Holder


class LeavingDevices:
    """One host for what takes its devices away (`revocation.revocations.Revocable`)."""

    def __init__(self, state: HostState, sessions: Sessions) -> None:
        self._state, self._sessions = state, sessions

    @property
    def now_ms(self) -> int:
        """The time of the run."""
        return self._state.now_ms

    def plan(self, at_ms: int, act: Callable[[], None]) -> None:
        """Plan what happens then."""
        self._state.at(at_ms, act)

    def announce(self, device_ids: Sequence[str], deadline_ms: int) -> None:
        """Let the arbiter know that the devices go away."""
        for device_id in device_ids:
            self._state.send(DeviceDrained(at_ms=self._state.now_ms, device_id=device_id, deadline_ms=deadline_ms))

    def _there(self, device_ids: Sequence[str]) -> list[Kernel]:
        """Return the kernels that hold memory on one of the devices, or have it restored there."""
        return [
            kernel
            for kernel in self._state.kernels.values()
            if not kernel.over and kernel.state in HOLDING and not set(device_ids).isdisjoint(kernel.device_ids)
        ]

    def holders(self, device_ids: Sequence[str]) -> list[Holder]:
        """Return the kernels that hold memory on the devices."""
        return [self._holder(kernel) for kernel in self._there(device_ids) if kernel.memory_mib]

    def _holder(self, kernel: Kernel) -> Holder:
        worked_ms = kernel.worked_ms + (self._state.now_ms - kernel.began_ms if kernel.running is not None else 0)
        return Holder(
            lease_id=kernel.spec.lease_id,
            mib=kernel.total_mib,
            swap_ms=self._state.host.swap.save_ms(kernel.total_mib),
            work=worked_ms * kernel.spec.devices,
            value=value_of(worked_ms, kernel.spec.priority),
            under_way_until_ms=kernel.swap_ends_ms if kernel.state is LeaseState.SUSPENDING else None,
        )

    def swap_room(self) -> tuple[list[int], int]:
        """Return when each swap channel is free, and how much host memory is left, MiB."""
        moving = (LeaseState.SUSPENDING, LeaseState.RESUMING)
        free_ms = [
            kernel.swap_ends_ms for kernel in self._state.kernels.values() if kernel.state in moving and not kernel.over
        ]
        free_ms += [self._state.now_ms] * (self._state.host.parallel_swaps - len(free_ms))
        arbiter = self._state.arbiter
        return free_ms, arbiter.host_budget_mib - arbiter.host_saved_mib - arbiter.host_reserved_mib

    def take_away(self, device_ids: Sequence[str], *, whole_host: bool) -> tuple[list[Holder], list[Holder]]:
        """Take the devices away; return the kernels that were not saved, and those whose saved state was lost with the host."""
        for device_id in device_ids:
            self._state.send(DeviceLost(at_ms=self._state.now_ms, device_id=device_id))
        lost = self._there(device_ids)
        unsaved, saved = [self._holder(kernel) for kernel in lost if kernel.memory_mib], list[Holder]()
        if whole_host:
            asleep = [one for one in self._state.kernels.values() if not one.over and one.state is LeaseState.SUSPENDED]
            saved = [self._holder(kernel) for kernel in asleep]
            lost += asleep
        for kernel in lost:
            self._lose_process(kernel)
        return unsaved, saved

    def give_back(self, device_ids: Sequence[str]) -> None:
        """Put other devices in their places."""
        for device in self._state.host.devices:
            if device.device_id in device_ids:
                self._state.send(DeviceSeen(at_ms=self._state.now_ms, device=device))
                self._state.send(DeviceUndrained(at_ms=self._state.now_ms, device_id=device.device_id))

    def has_closed(self, lease_id: str) -> bool:
        """Return whether its notebook was closed."""
        return self._state.kernels[lease_id].over

    def _lose_process(self, kernel: Kernel) -> None:
        """End a kernel's process, and begin another: a cell that had begun has failed; one that waits for its first turn waits on."""
        lease_id, cells = kernel.spec.lease_id, self._sessions.cells
        has_begun = cells.lose(kernel)
        self._state.drop_memory(kernel)
        self._state.count_vain(kernel)
        kernel.memory_mib, kernel.worked_ms, kernel.life = 0, 0, kernel.life + 1
        self._state.send(ProcessExited(at_ms=self._state.now_ms, lease_id=lease_id))
        self._state.send(Attached(at_ms=self._state.now_ms, lease_id=lease_id, gated=True))
        if has_begun:
            self._sessions.done(kernel)
        elif kernel.waiting:
            cells.ask_again(kernel)
