"""Suspends and resumes: what they take, what they move, and which of them fail."""

import random
from functools import partial

from fractional_gpu.core.effects import Resume, Suspend
from fractional_gpu.core.events import HostMemoryNeeded, ResumeFinished, ResumeOutcome, SuspendFinished, SuspendOutcome
from fractional_gpu.simulator.one_host.cells import Cells
from fractional_gpu.simulator.one_host.kernel import Kernel
from fractional_gpu.simulator.one_host.state import HostState


class Swaps:
    """The swaps of one host."""

    def __init__(self, state: HostState, cells: Cells) -> None:
        self._state, self._cells = state, cells

    def suspend(self, kernel: Kernel, effect: Suspend) -> None:
        """Begin to save a kernel; one that has asked for a cell waits from then on."""
        self._state.result.suspends += 1
        self._state.count_vain(kernel)
        if self._fails(kernel):
            self._failed(kernel, "suspend")
            gives_up = partial(self._suspended, effect, SuspendOutcome.ABORTED)
            self._state.after(self._state.host.swap.fixed_ms, gives_up)
        elif kernel.total_mib > effect.host_mib:
            self._state.after(0, partial(self._reserve_more, kernel, effect))
        else:
            self._save(kernel, effect)

    def _reserve_more(self, kernel: Kernel, effect: Suspend) -> None:
        """Do what the broker does where more would be saved than is reserved: ask for the difference, or leave the kernel as it is."""
        need_mib = kernel.total_mib
        self._state.send(
            HostMemoryNeeded(
                at_ms=self._state.now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                need_mib=need_mib,
            )
        )
        view = self._state.arbiter.lease(effect.lease_id)
        if view is not None and view.host_reserved_mib >= need_mib:
            self._save(kernel, effect)
            return
        self._failed(kernel, "suspend")
        self._suspended(effect, SuspendOutcome.ABORTED, need_mib=need_mib)

    def _save(self, kernel: Kernel, effect: Suspend) -> None:
        self._cells.preempt(kernel)
        device_ids, mib, total_mib, life = kernel.device_ids, kernel.memory_mib, kernel.total_mib, kernel.life
        kernel.swap_ends_ms = self._state.now_ms + self._state.host.swap.save_ms(total_mib)

        def saved() -> None:
            if not kernel.over and kernel.life == life:
                self._state.use(kernel, device_ids, -mib)
                self._state.accounts.save(self._state.number, total_mib)
                self._state.note("saved", kernel, mib=total_mib)
                self._count_moved(kernel, total_mib)
            outcome = SuspendOutcome.NOTHING_TO_SAVE if mib == 0 else SuspendOutcome.SAVED
            self._suspended(effect, outcome, saved_mib=total_mib)

        self._state.at(kernel.swap_ends_ms, saved)

    def _suspended(self, effect: Suspend, outcome: SuspendOutcome, *, saved_mib: int = 0, need_mib: int = 0) -> None:
        self._state.send(
            SuspendFinished(
                at_ms=self._state.now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
                saved_mib=saved_mib,
                need_mib=need_mib,
            )
        )

    def resume(self, kernel: Kernel, effect: Resume) -> None:
        """Begin to restore a kernel on its devices."""
        self._state.result.resumes += 1
        kernel.reserved_mib, kernel.resume_fails = effect.reserve_mib, self._fails(kernel)
        if kernel.resume_fails:
            self._failed(kernel, "resume")
            self._state.after(self._state.host.swap.fixed_ms, partial(self._resumed, effect, ResumeOutcome.NOT_STARTED))
            return
        self._state.use(kernel, kernel.device_ids, kernel.memory_mib)
        total_mib, life = kernel.total_mib, kernel.life
        kernel.swap_ends_ms = self._state.now_ms + self._state.host.swap.restore_ms(total_mib)
        view = self._state.arbiter.lease(effect.lease_id)
        if view is not None and view.came_early:
            self._state.result.early_resumes += 1
            kernel.early_mib = total_mib

        def restored() -> None:
            if not kernel.over and kernel.life == life:
                self._state.accounts.save(self._state.number, -total_mib)
                self._state.note("restored", kernel, mib=total_mib)
                self._count_moved(kernel, total_mib)
            self._resumed(effect, ResumeOutcome.RESTORED)

        self._state.at(kernel.swap_ends_ms, restored)

    def _resumed(self, effect: Resume, outcome: ResumeOutcome) -> None:
        self._state.send(
            ResumeFinished(
                at_ms=self._state.now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
            )
        )

    def _fails(self, kernel: Kernel) -> bool:
        """Return whether the swap that begins fails: by a draw for each swap of each session, whatever the others do."""
        percent = self._state.host.failed_swaps_percent
        kernel.swaps += 1
        if not percent:
            return False
        swap = f"{self._state.host.seed}/swap/{kernel.session.session_id}/{kernel.swaps}"
        return random.Random(swap).random() * 100 < percent  # noqa: S311 - a workload, not a secret

    def _failed(self, kernel: Kernel, kind: str) -> None:
        self._state.result.failed_swaps += 1
        self._state.note("swap-fails", kernel, swap=kind)

    def _count_moved(self, kernel: Kernel, mib: int) -> None:
        if self._state.meter is not None:
            self._state.meter.moved(self._state.now_ms, kernel.spec.lease_id, mib)
