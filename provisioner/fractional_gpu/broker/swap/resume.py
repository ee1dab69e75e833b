"""Resuming one kernel: see that the room is really free, with a margin, restore, unlock, and see that it is true.

A restore without room kills the process. So a restore is never tried to find out whether there is room: the devices are read first, and
what another process might take meanwhile is covered by a margin.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import ENDED, HostSnapshot, ProcessInspector
from fractional_gpu.broker.swap.outcomes import after_restore
from fractional_gpu.broker.swap.steps import (
    FRESH_S,
    Journal,
    ProcessesSeen,
    SwapTimes,
    devices_concerned,
    moves_between,
)
from fractional_gpu.core.effects import Resume
from fractional_gpu.core.events import ResumeOutcome
from fractional_gpu.core.units import format_memory, restore_margin_mib
from fractional_gpu.gpu.interface import GPUError, ProcessState
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import ProcessIdentity

__all__ = ["Restoration"]


class Restoration:
    """Restores kernels with the checkpoint worker. `overhead_mib` as for `Swaps`."""

    def __init__(
        self, inspector: ProcessInspector, worker: WorkerLink, times: SwapTimes, overhead_mib: Mapping[str, int]
    ) -> None:
        self._inspector = inspector
        self._worker = worker
        self._times = times
        self._overhead_mib = overhead_mib

    async def resume(
        self, kernel: Kernel, effect: Resume, saved_mib: int, journal: Journal, seen: ProcessesSeen | None = None
    ) -> tuple[ResumeOutcome, str]:
        """Do what `Swaps.resume` documents."""
        if self._inspector.off:
            return ResumeOutcome.NOT_STARTED, f"what is saved cannot be brought back now: {self._inspector.off}"
        device_ids = effect.device_ids or (effect.device_id,)
        fresh = seen is not None and time.monotonic() - seen.at_s < FRESH_S
        try:
            processes = seen.processes if seen is not None and fresh else None
            host = await self._inspector.take(devices_concerned(kernel, effect), processes)
            states = await self._inspector.states(kernel, host)
            # What another broker saved is not known: as much as is reserved for it must be free.
            pids = {identity.pid for identity in states}
            lacking = self.lacking_room(host, device_ids, saved_mib or effect.reserve_mib, effect.reserve_mib, pids)
            if kernel.identity is None:
                # It ended since the decision. What it left behind is still saved, and is found out first (`survivors`): a resume that
                # brought nothing back must not be called done.
                lacking = "the kernel process ended"
        except GPUError as error:
            return ResumeOutcome.NOT_STARTED, f"it cannot be brought back now: {error}"
        if lacking:
            return ResumeOutcome.NOT_STARTED, lacking
        saved = [identity for identity, state in states.items() if state is ProcessState.CHECKPOINTED]
        locked = [identity for identity, state in states.items() if state is ProcessState.LOCKED]
        from_ids = effect.from_device_ids or ((effect.from_device_id,) if effect.from_device_id is not None else ())
        await journal("restoring", saved, saved_mib)
        try:
            await self.restore(saved, locked, moves_between(kernel.checkpoint.homes or from_ids, device_ids))
            # The kernel's calls go on already; what the driver said is verified afterwards, to save that time.
            states = await self._states_of(states)
        except GPUError as error:
            return await self._after_failed_restore(kernel, error)
        if all(state is ProcessState.RUNNING for state in states.values()):
            return ResumeOutcome.RESTORED, f"{format_memory(saved_mib)} restored"
        return ResumeOutcome.UNKNOWN, f"after the restore the driver says {', '.join(sorted(set(states.values())))}"

    async def restore(
        self, saved: Sequence[ProcessIdentity], locked: Sequence[ProcessIdentity], moves: Mapping[str, str] | None
    ) -> None:
        """Restore the saved processes, then unlock all that are not gone. `moves`: device to device. Raises GPUError."""
        # All are restored before any is unlocked: no process of the tree runs while a part of the tree is saved.
        for identity in saved:
            await self._worker.restore(identity, moves, self._times.checkpoint_s)
        for identity in (*locked, *saved):
            try:
                await self._worker.unlock(identity)
            except GPUError as error:
                if error.code not in ENDED:
                    raise

    def lacking_room(
        self, host: HostSnapshot, device_ids: Sequence[str], saved_mib: int, reserve_mib: int, pids: Collection[int]
    ) -> str:
        """Return a sentence about the first of the devices without the room for what is saved of these processes, or "".

        How much of what was saved belongs on which of several devices is not known: each must have room for all of it, or be as free as
        what is reserved there. A device that no other process uses will never have more room: it needs no margin. Raises GPUError.
        """
        need_mib = saved_mib if len(device_ids) == 1 else min(saved_mib, reserve_mib)
        for device_id in device_ids:
            free_mib = host.free_mib(device_id)
            margin_mib = 0
            if not host.is_alone(pids, device_id):
                margin_mib = min(restore_margin_mib(need_mib), self._overhead_mib.get(device_id, 0))
            if free_mib < need_mib + margin_mib:
                margin = f" and a margin of {format_memory(margin_mib)}" if margin_mib else ""
                return f"the device has {format_memory(free_mib)} free, {format_memory(need_mib)}{margin} are needed"
        return ""

    async def _states_of(self, identities: Iterable[ProcessIdentity]) -> dict[ProcessIdentity, ProcessState]:
        """Return what the driver says of these processes, without those that are gone. Raises GPUError."""
        states = {}
        for identity in identities:
            try:
                states[identity] = await self._worker.state(identity)
            except GPUError as error:
                if error.code not in ENDED:
                    raise
        return {
            one: state for one, state in states.items() if state not in (ProcessState.GONE, ProcessState.NO_CONTEXT)
        }

    async def _after_failed_restore(self, kernel: Kernel, error: GPUError) -> tuple[ResumeOutcome, str]:
        try:
            states = await self._inspector.states(kernel, await self._inspector.take())
        except GPUError as again:
            sentence = f"the restore failed ({error}) and the driver does not say what is true ({again})"
            return ResumeOutcome.UNKNOWN, sentence
        outcome = after_restore(error.code, states.values())
        if outcome is ResumeOutcome.NOT_STARTED:
            return outcome, f"the driver could not restore it: {error}"
        return outcome, f"the restore failed half way: {error}"
