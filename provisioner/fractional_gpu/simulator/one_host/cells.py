"""Cells: what one asks for, the memory that it takes, how long it runs beside its neighbours, and what is measured of it."""

from collections.abc import Callable, Sequence
from functools import partial

from fractional_gpu.core.effects import Granted, Resized
from fractional_gpu.core.events import BusyChanged, LeaseMeasured, Wanted
from fractional_gpu.core.model import LeaseState
from fractional_gpu.simulator.machine import UNSHARED, Running
from fractional_gpu.simulator.one_host.kernel import Kernel
from fractional_gpu.simulator.one_host.state import HostState

_MEASURED_MS = 2_000  # from one measurement of the broker to the next


class Cells:
    """The cells of one host's sessions. `done` is told when one has ended or failed."""

    def __init__(self, state: HostState, done: Callable[[Kernel], None]) -> None:
        self._state, self._done = state, done

    def asks(self, kernel: Kernel) -> bool:
        """Return whether the kernel's next cell asks for the GPU."""
        return bool(kernel.cell.gpus) or self._state.host.every_cell_asks

    def ask(self, kernel: Kernel) -> None:
        """Ask for the kernel's next cell: it runs now, or waits."""
        cell = kernel.cell
        kernel.asked_ms = self._state.now_ms
        self._state.note("asked", kernel, cell=kernel.next_cell)
        if not self.asks(kernel):
            self._state.note("begins", kernel, cell=kernel.next_cell, device_ids=(), util_percent=0)
            self._state.after(cell.duration_ms, partial(self._ends_without_gpu, kernel))
            return
        kernel.early_mib = 0
        self._state.send(BusyChanged(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id, busy=True))
        self._state.accounts.waiting += 1
        view = self._state.arbiter.lease(kernel.spec.lease_id)
        if kernel.state is LeaseState.RESIDENT and (view is None or not view.gate_closed):
            self._grow(kernel)
            return
        kernel.waiting = True
        self._watch_wait(kernel)
        self._state.send(Wanted(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id))

    def _watch_wait(self, kernel: Kernel) -> None:
        """Count the cell against the goal as soon as its wait exceeds a limit, and not only when it begins."""
        if kernel.cell.gpus:
            for limit, limit_ms in enumerate(self._state.felt.wait_limits_ms):
                self._state.at(
                    self._state.now_ms + limit_ms + 1, partial(self._overdue, kernel, kernel.next_cell, limit)
                )

    def _overdue(self, kernel: Kernel, cell: int, limit: int) -> None:
        unbegun = kernel.unfinished is None and (kernel.waiting or kernel.growing)
        if kernel.next_cell == cell and unbegun and not kernel.over:
            kernel.overdue = limit + 1
            self._state.felt.overdue(limit)

    def _ends_without_gpu(self, kernel: Kernel) -> None:
        self._state.note("ends", kernel, cell=kernel.next_cell)
        self._done(kernel)

    def granted(self, kernel: Kernel, grant: Granted) -> None:
        """Let the cell of a kernel that waits begin."""
        kernel.reserved_mib = grant.reserved_mib or kernel.spec.reserve_mib
        if kernel.waiting:
            kernel.waiting = False
            self._grow(kernel)

    def resized(self, kernel: Kernel, effect: Resized) -> None:
        """Let a cell that is short of memory take what its kernel may use now."""
        kernel.reserved_mib = effect.reserved_mib or kernel.reserved_mib
        if kernel.growing:
            self._grow(kernel)

    def _grow(self, kernel: Kernel) -> None:
        """Take the memory that the cell of a granted kernel needs, as far as allowed; run the cell once it has all of it."""
        need_mib = kernel.cell.gpu_mib if kernel.cell.gpus and kernel.unfinished is None else kernel.memory_mib
        mib = min(need_mib, kernel.reserved_mib)
        if mib != kernel.memory_mib:
            self._state.use(kernel, kernel.device_ids, mib - kernel.memory_mib)
            kernel.memory_mib = mib
        if mib < need_mib and not kernel.growing:
            kernel.short_ms = self._state.now_ms
            self._state.note("short", kernel, cell=kernel.next_cell, mib=mib, need_mib=need_mib)
            plan = partial(self._give_up, kernel, kernel.next_cell, self._state.now_ms)
            patience_ms = self._state.host.patience_ms if need_mib <= kernel.spec.reserve_mib else 0
            self._state.after(patience_ms, plan)
        kernel.growing = mib < need_mib  # before it is measured: the answer may let it grow at once
        if kernel.cell.gpus:
            self._measure(kernel, None)
        if mib == need_mib:
            self._state.after(_MEASURED_MS, partial(self._measure_again, kernel, kernel.next_cell))
            self._run_cell(kernel)

    def _measure_again(self, kernel: Kernel, cell: int) -> None:
        """Measure again as the broker does: how much of the device the cell uses, if it still runs, and that its memory grew no further."""
        if kernel.state is LeaseState.RESIDENT:
            running = kernel.running if kernel.next_cell == cell and kernel.cell.gpus else None
            used_milli = self._state.devices[kernel.device_ids[0]].used_milli(running) if running is not None else None
            self._measure(kernel, used_milli)

    def _measure(self, kernel: Kernel, util_milli: int | None) -> None:
        used_mib, lease_id = kernel.total_mib, kernel.spec.lease_id
        self._state.send(
            LeaseMeasured(at_ms=self._state.now_ms, lease_id=lease_id, used_mib=used_mib, util_milli=util_milli)
        )

    def _give_up(self, kernel: Kernel, cell: int, since_ms: int) -> None:
        """Fail a cell that is short of memory since then, as an allocation fails at the framework's limit."""
        if kernel.growing and (kernel.next_cell, kernel.short_ms) == (cell, since_ms):
            kernel.growing = False
            self._state.result.out_of_memory += 1
            self._state.note("failed", kernel, cell=cell)
            self._begins(kernel)
            self._state.send(BusyChanged(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id, busy=False))
            self._done(kernel)

    def _begins(self, kernel: Kernel) -> None:
        self._state.accounts.waiting -= 1
        if kernel.unfinished is None and kernel.cell.gpus:
            self._state.felt.waited(self._state.now_ms - kernel.asked_ms, kernel.overdue, host=self._state.number)
            kernel.overdue = 0

    def _run_cell(self, kernel: Kernel) -> None:
        """Run the cell on the kernel's devices; the first of them decides how much its neighbours slow it down."""
        cell = kernel.cell
        self._begins(kernel)
        running, kernel.unfinished = kernel.unfinished, None
        kind = "begins" if running is None else "continues"
        if running is None:
            util_percent = cell.util_percent if cell.gpus else 0
            kernel.ran_ms = 0
            running = Running(kernel.spec.lease_id, util_percent, cell.duration_ms * UNSHARED, self._state.now_ms)
        running.at_ms = self._state.now_ms
        kernel.running, kernel.began_ms = running, self._state.now_ms
        ids, util = kernel.device_ids, running.util_percent
        self._state.note(kind, kernel, cell=kernel.next_cell, device_ids=ids, util_percent=util)
        self._state.accounts.running_gpus += cell.gpus
        self._plan(self._state.devices[kernel.device_ids[0]].begin(running))
        self._count_work(kernel)

    def _count_work(self, kernel: Kernel) -> None:
        """Tell the meter which cells run now on the devices of a cell that has begun or was stopped, and how much of each they use."""
        if self._state.meter is not None:
            shared = self._state.devices[kernel.device_ids[0]]
            used = {
                session_id: (self._state.kernels[session_id].next_cell, shared.used_milli(running))
                for session_id, running in shared.running.items()
            }
            self._state.meter.works(self._state.now_ms, kernel.device_ids[: max(1, kernel.cell.gpus)], used)

    def _plan(self, ends: Sequence[tuple[int, Running]]) -> None:
        for at_ms, running in ends:
            self._state.at(at_ms, partial(self._cell_ends, running, running.version))

    def _cell_ends(self, running: Running, version: int) -> None:
        if running.version != version:
            return
        kernel = self._state.kernels[running.session_id]
        self._state.note("ends", kernel, cell=kernel.next_cell)
        self._stop(kernel)
        if kernel.cell.gpus:
            if kernel.ran_ms >= _MEASURED_MS:  # of a shorter one the broker has not measured a whole period
                worked_ms = kernel.cell.util_percent * kernel.cell.duration_ms
                self._measure(kernel, worked_ms * 10 // kernel.ran_ms)
            alone_ms = kernel.cell.duration_ms
            self._state.felt.ended(kernel.session.user, self._state.now_ms - kernel.asked_ms - alone_ms, alone_ms)
        self._state.send(BusyChanged(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id, busy=False))
        self._done(kernel)

    def preempt(self, kernel: Kernel) -> None:
        """Stop the cell of a kernel that is saved, if it has one that runs or grows: the cell waits."""
        if kernel.running is None and not kernel.growing:
            return
        self._state.result.preemptions += 1
        self._state.note("preempted", kernel, cell=kernel.next_cell)
        if kernel.running is not None:
            kernel.unfinished = self._stop(kernel)
            self._state.accounts.waiting += 1
        kernel.growing, kernel.waiting = False, True

    def lose(self, kernel: Kernel) -> bool:
        """Fail the cell of a kernel whose process is lost, if one had begun; return whether one had. The caller tells `done`."""
        has_begun = kernel.growing or kernel.unfinished is not None
        if kernel.running is not None:
            self._stop(kernel)
            has_begun = True
        elif has_begun:
            self._begins(kernel)
        if has_begun:
            kernel.unfinished, kernel.growing, kernel.waiting = None, False, False
            self._state.note("failed", kernel, cell=kernel.next_cell)
            self._state.send(BusyChanged(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id, busy=False))
        return has_begun

    def ask_again(self, kernel: Kernel) -> None:
        """Ask, in a kernel's new process, for the cell that waited for its first turn in the lost one."""
        self._state.send(BusyChanged(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id, busy=True))
        self._state.send(Wanted(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id))

    def _stop(self, kernel: Kernel) -> Running:
        """Take the running cell off its device, which may speed up the others there."""
        stopped, ends = self._state.devices[kernel.device_ids[0]].finish(kernel.spec.lease_id, self._state.now_ms)
        kernel.running = None
        kernel.ran_ms += self._state.now_ms - kernel.began_ms
        kernel.worked_ms += self._state.now_ms - kernel.began_ms
        self._state.accounts.running_gpus -= kernel.cell.gpus
        self._plan(ends)
        self._count_work(kernel)
        return stopped
