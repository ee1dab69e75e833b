"""Suspends and resumes kernels with the checkpoint worker, one operation at a time. The steps of a suspend are in `suspend`.

- The driver reports the actual state, whereas the ledger records only what was intended. If the driver can't checkpoint at all (`off`), all
  that is known is the memory that devices report for each process.
- `truth` determines a kernel's real state after the broker starts, and for quarantined leases. Half-finished work is completed or
  undone, whichever is safe. Any other state is left alone and treated as unknown.
- An operation reads only the lease's own devices and any others on which its processes have been seen.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import ENDED, FRESH_S, HostSnapshot, ProcessInspector
from fractional_gpu.broker.swap.outcomes import after_restore
from fractional_gpu.broker.swap.suspend import SHRINK_TIMEOUT_S, CheckpointCheck, IsQuiet, Suspension, SwapTimes
from fractional_gpu.core.effects import Resume
from fractional_gpu.core.events import ResumeOutcome
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.units import RESTORE_MARGIN_MIB, format_memory
from fractional_gpu.gpu.interface import GPUError, Monitor, ProcessState
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import ProcessIdentity, is_alive
from fractional_gpu.protocol.messages import GateVerb

log = logging.getLogger(__name__)

_MAY_BE_COMPLETED = {ProcessState.CHECKPOINTED, ProcessState.LOCKED, ProcessState.RUNNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A kernel's real state: unattached, without a context, resident, suspended, or quarantined if the driver reports a failed process."""

    state: LeaseState
    device_id: str | None = None
    saved_mib: int = 0
    sentence: str = ""


class Swaps:
    """Runs one operation at a time with the checkpoint worker. `off` explains why operations are impossible ("" if they aren't).

    `overhead_mib` is the memory on each device that leases can't reserve. A restore needs up to that much free memory as a margin. `check`
    returns a sentence explaining why a kernel can't be checkpointed, or "" if it can.
    """

    def __init__(
        self,
        monitor: Monitor,
        worker: WorkerLink,
        times: SwapTimes,
        overhead_mib: Mapping[str, int] | None = None,
        *,
        check: CheckpointCheck | None = None,
        off: str = "",
    ) -> None:
        self.inspector = ProcessInspector(monitor, worker, off=off)
        self.worker = worker
        self._times = times
        self._overhead_mib = overhead_mib or {}
        self._suspension = Suspension(self.inspector, worker, times, check)
        self.suspend = self._suspension.suspend

    def connect(self, *, roots: Callable[[], list[ProcessIdentity]], is_quiet: IsQuiet | None = None) -> None:
        """Set the callbacks for all kernels.

        `roots` returns all kernels' processes. They are needed because a kernel started by another kernel has its own lease. Without
        `is_quiet`, every kernel is assumed to have done no work.
        """
        self.inspector.roots = roots
        self._suspension.is_quiet = is_quiet

    async def glance(self) -> None:
        """Scan the machine's processes ahead of the next `resume`. If this fails, the resume scans again and reports any error."""
        with suppress(GPUError):
            await self.inspector.scan_processes()

    async def shrink(self, kernel: Kernel) -> int | None:
        """Have an idle kernel free cached memory. Return the MiB it still uses, or None on failure. Safe to cancel."""
        if kernel.link is None or kernel.busy or await kernel.link.ask(GateVerb.SHRINK, SHRINK_TIMEOUT_S) != "done":
            return None
        try:
            return await self.inspector.used_mib(kernel)
        except GPUError as error:
            log.info(
                "lease %s: cannot tell how much memory it still uses after freeing its caches: %s",
                kernel.lease_id[:8],
                error,
            )
            return None

    async def resume(self, kernel: Kernel, effect: Resume, saved_mib: int) -> tuple[ResumeOutcome, str]:
        """Resume the kernel. Return the outcome and a sentence.

        Cancel this only when the broker is exiting, because the resume may be left unfinished.
        """
        if self.inspector.off:
            return ResumeOutcome.NOT_STARTED, f"the saved state cannot be restored now: {self.inspector.off}"
        device_ids = effect.device_ids
        try:
            # A restore without room kills the process, so it cannot be used to find out whether there is room. The devices are read first,
            # and a margin covers what another process might take until the restore.
            device_reads = kernel.measurement.devices_to_read(device_ids)
            host = await self.inspector.take(device_reads, max_age_s=FRESH_S)
            states, _ = await self.inspector.states(kernel, host)
            # It is unknown what another broker saved, so its whole reservation must be free.
            pids = {identity.pid for identity in states}
            lacking = self._lacking_room(host, device_ids, saved_mib or effect.reserve_mib, effect.reserve_mib, pids)
            if kernel.identity is None:
                # The kernel's process has ended since the decision. Its remaining processes are still saved. `survivors` must find them
                # first, since a resume that restored nothing must not count as done.
                lacking = "the kernel process ended"
        except GPUError as error:
            return ResumeOutcome.NOT_STARTED, f"it cannot be resumed now: {error}"
        if lacking:
            return ResumeOutcome.NOT_STARTED, lacking
        saved = [identity for identity, state in states.items() if state is ProcessState.CHECKPOINTED]
        locked = [identity for identity, state in states.items() if state is ProcessState.LOCKED]
        try:
            await self._restore(
                saved, locked, moves_between(kernel.checkpoint.homes or effect.from_device_ids, device_ids)
            )
            # The kernel's calls already continue. To save time, the driver's answer is verified only afterwards.
            states = await self._states_of(states)
        except GPUError as error:
            return await self._after_failed_restore(kernel, error)
        if all(state is ProcessState.RUNNING for state in states.values()):
            return ResumeOutcome.RESTORED, f"{format_memory(saved_mib)} restored"
        return ResumeOutcome.UNKNOWN, f"after the restore, the driver reports {', '.join(sorted(set(states.values())))}"

    async def _restore(
        self, saved: Sequence[ProcessIdentity], locked: Sequence[ProcessIdentity], moves: Mapping[str, str] | None
    ) -> None:
        # All processes are restored before any is unlocked, so that no process of the tree runs while a part of the tree is saved.
        for identity in saved:
            await self.worker.restore(identity, moves, self._times.checkpoint_s)
        for identity in (*locked, *saved):
            try:
                await self.worker.unlock(identity)
            except GPUError as error:
                if error.code not in ENDED:
                    raise

    def _lacking_room(
        self, host: HostSnapshot, device_ids: Sequence[str], saved_mib: int, reserve_mib: int, pids: Collection[int]
    ) -> str:
        """Return a sentence about the first device that lacks room for these processes' saved memory, or "" if none does. Raises GPUError.

        It is unknown how saved memory is divided among several devices, so each must have room for all of it, or for the amount reserved
        there if that is less. A device that no other process uses needs no margin, because waiting would not give it more room.
        """
        need_mib = saved_mib if len(device_ids) == 1 else min(saved_mib, reserve_mib)
        for device_id in device_ids:
            free_mib = host.free_mib(device_id)
            margin_mib = 0
            if not host.is_alone(pids, device_id):
                margin_mib = min(RESTORE_MARGIN_MIB, self._overhead_mib.get(device_id, 0))
            if free_mib < need_mib + margin_mib:
                margin = f" and a margin of {format_memory(margin_mib)}" if margin_mib else ""
                return f"the device has {format_memory(free_mib)} free, but the kernel needs {format_memory(need_mib)}{margin}"
        return ""

    async def _states_of(self, identities: Iterable[ProcessIdentity]) -> dict[ProcessIdentity, ProcessState]:
        states = {}
        for identity in identities:
            try:
                states[identity] = await self.worker.state(identity)
            except GPUError as error:
                if error.code not in ENDED:
                    raise
        return {
            one: state for one, state in states.items() if state not in (ProcessState.GONE, ProcessState.NO_CONTEXT)
        }

    async def _after_failed_restore(self, kernel: Kernel, error: GPUError) -> tuple[ResumeOutcome, str]:
        try:
            states, _ = await self.inspector.states(kernel, await self.inspector.take())
        except GPUError as again:
            sentence = f"the restore failed ({error}), and the driver does not report the state ({again})"
            return ResumeOutcome.UNKNOWN, sentence
        outcome = after_restore(error.code, states.values())
        if outcome is ResumeOutcome.NOT_STARTED:
            return outcome, f"the driver could not restore it: {error}"
        return outcome, f"the restore failed halfway: {error}"

    async def truth(
        self, kernel: Kernel, device_id: str | None, saved_mib: int, host: HostSnapshot | None = None
    ) -> Truth | None:
        """Return the kernel's real state, or None if it is unknown. Half-finished work is completed or undone if that is safe.

        `device_id` and `saved_mib` come from the lease's record.
        """
        try:
            if kernel.identity is None or not is_alive(kernel.identity):
                # `survivors` may first have to find the kernel's remaining processes.
                return Truth(state=LeaseState.UNATTACHED) if kernel.ending.task is None else None
            host = host or await self.inspector.take()
            states, _ = await self.inspector.states(kernel, host)
            if await self._complete_or_undo(kernel, states, device_id, saved_mib):
                host = await self.inspector.take()
                states, _ = await self.inspector.states(kernel, host)
        except (GPUError, OSError) as error:
            log.warning("lease %s: its state is not known yet: %s", kernel.lease_id, error)
            return None
        kinds = set(states.values())
        if not kinds:  # a driver that cannot be asked does not report what is saved
            return None if self.inspector.off and saved_mib else Truth(state=LeaseState.NO_CONTEXT)
        if kinds == {ProcessState.CHECKPOINTED}:
            saved_mib = max(saved_mib, kernel.checkpoint.total_mib, sum(host.used_mib(one.pid) for one in states))
            return Truth(state=LeaseState.SUSPENDED, device_id=kernel.checkpoint.home or device_id, saved_mib=saved_mib)
        if kinds == {ProcessState.RUNNING}:
            return Truth(state=LeaseState.RESIDENT, device_id=self._where(kernel, host) or device_id)
        failed = [identity.pid for identity, state in states.items() if state is ProcessState.FAILED]
        if not failed:
            return None
        sentence = (
            f"the driver reports an uncorrectable error in process {failed[0]}: everything this kernel had on the GPU is lost. Its "
            "other variables are still there: save what you need, using cells that begin with %%cpu, then restart the kernel"
        )
        return Truth(state=LeaseState.QUARANTINED, device_id=device_id, saved_mib=saved_mib, sentence=sentence)

    async def _complete_or_undo(
        self,
        kernel: Kernel,
        states: Mapping[ProcessIdentity, ProcessState],
        device_id: str | None,
        saved_mib: int,
    ) -> bool:
        """Complete or undo half-finished work if that is safe. Return whether there was any. Raises GPUError."""
        kinds = set(states.values())
        if ProcessState.CHECKPOINTED in kinds and len(kinds) > 1:
            await self._restore_rest(kernel, states, device_id, saved_mib)
            return True
        if ProcessState.LOCKED not in kinds:
            return False
        for identity in reversed([one for one, state in states.items() if state is ProcessState.LOCKED]):
            try:
                await self.worker.unlock(identity)
            except GPUError as error:
                log.warning("process %d could not be unlocked: %s", identity.pid, error)
        return True

    async def _restore_rest(
        self,
        kernel: Kernel,
        states: Mapping[ProcessIdentity, ProcessState],
        device_id: str | None,
        saved_mib: int,
    ) -> None:
        """Restore the rest of a partly saved process tree if the devices are certain to have room. Raises GPUError."""
        homes = kernel.checkpoint.homes or ((device_id,) if device_id is not None else ())
        if not set(states.values()) <= _MAY_BE_COMPLETED or not homes:
            return
        # Another kernel that was resumed in the meantime may now use the room that was free.
        host = await self.inspector.take()
        # The rest goes to where the others are, because they may have been on the way to another device.
        there = self._where(kernel, host)
        targets = homes if len(homes) > 1 or there is None else (there,)
        rest_mib = _rest_mib(kernel, host, states, saved_mib)
        pids = {identity.pid for identity in self.inspector.tree(kernel, host)}
        lacking = ""
        if rest_mib > 0:
            lacking = self._lacking_room(host, targets, rest_mib, rest_mib, pids)
        elif not all(host.is_alone(pids, one) for one in targets):  # if it is alone, there will never be more room
            lacking = "the saved size is unknown, and other processes use its device"
        if lacking:
            log.warning("lease %s: part of its memory cannot be restored yet: %s", kernel.lease_id, lacking)
            return
        saved = [one for one, state in states.items() if state is ProcessState.CHECKPOINTED]
        locked = [one for one, state in states.items() if state is ProcessState.LOCKED]
        await self._restore(saved, locked, moves_between(homes, targets))

    def _where(self, kernel: Kernel, host: HostSnapshot) -> str | None:
        """Return the device that holds most of the kernel's memory, or its first device if it has several."""
        found = host.homes({identity.pid for identity in self.inspector.tree(kernel, host)})
        if len(kernel.checkpoint.homes) > 1 and set(found) <= set(kernel.checkpoint.homes):
            return kernel.checkpoint.homes[0]
        return found[0] if found else None


def moves_between(homes: Sequence[str], targets: Sequence[str]) -> dict[str, str] | None:
    """Map each old device to its new one, or return None if nothing moves."""
    moves = dict(zip(homes, targets, strict=False))
    return moves if any(old != new for old, new in moves.items()) else None


def _rest_mib(
    kernel: Kernel, host: HostSnapshot, states: Mapping[ProcessIdentity, ProcessState], saved_mib: int
) -> int:
    """Return the MiB needed to restore the saved processes of a partly saved tree, or 0 if unknown.

    A broker started after the suspend knows only the total. From that, it subtracts the memory of locked processes, which can't have
    changed, but not the memory of running processes, which may have grown.
    """
    if kernel.checkpoint.sizes:
        saved = [
            kernel.checkpoint.sizes.get(one, 0) for one, state in states.items() if state is ProcessState.CHECKPOINTED
        ]
        return sum(saved) if all(saved) else 0
    locked_mib = sum(host.used_mib(one.pid) for one, state in states.items() if state is ProcessState.LOCKED)
    return max(0, saved_mib - locked_mib)
