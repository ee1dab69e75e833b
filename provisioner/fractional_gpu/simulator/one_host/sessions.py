"""Sessions: a person opens a notebook, thinks, gives signs, asks for the next cell, and closes it."""

from collections.abc import Callable
from functools import partial

from fractional_gpu.core.events import Attached, Expected, LeaseReleased, LeaseRequested, ProcessExited
from fractional_gpu.core.model import LeaseSpec, Sign
from fractional_gpu.simulator.load import SIGN_MS
from fractional_gpu.simulator.one_host.cells import Cells
from fractional_gpu.simulator.one_host.kernel import Kernel
from fractional_gpu.simulator.one_host.state import HostState
from fractional_gpu.simulator.traces import Session


class Sessions:
    """The sessions of one host."""

    def __init__(self, state: HostState) -> None:
        self._state = state
        self.cells = Cells(state, self.done)

    def open(self, session: Session, lease: LeaseSpec, ended: Callable[[], None]) -> None:
        """Begin a session here; `ended` is called when it is over."""
        kernel = self._state.kernels[session.session_id] = Kernel(session, lease, ended)
        self._state.send(LeaseRequested(at_ms=self._state.now_ms, spec=lease))
        if kernel.over:
            ended()
            return
        self._state.felt.entered(0)  # a lease is given at once; its cells wait
        self._state.send(Attached(at_ms=self._state.now_ms, lease_id=lease.lease_id, gated=True))
        first = session.cells[0].start_ms if session.cells else session.close_ms
        self._expect(kernel, first - self._state.now_ms)
        self._state.at(first, partial(self._next, kernel))

    def _expect(self, kernel: Kernel, gap_ms: int) -> None:
        """Schedule the signs that the person gives before the next cell, or before closing the notebook."""
        at_end = kernel.next_cell == len(kernel.session.cells)
        asks = not at_end and self.cells.asks(kernel)
        signs = self._state.host.signs.before(
            self._state.host.seed, kernel.session.session_id, kernel.next_cell, gap_ms, uses_gpu=asks
        )
        for after_ms in signs:
            self._state.after(after_ms, partial(self._sign, kernel, kernel.next_cell))

    def _sign(self, kernel: Kernel, cell: int) -> None:
        if kernel.over or kernel.next_cell != cell:
            return
        until_ms = self._state.now_ms + SIGN_MS
        self._state.send(
            Expected(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id, until_ms=until_ms, sign=Sign.TYPING)
        )

    def _next(self, kernel: Kernel) -> None:
        """Execute the next cell, or close the notebook."""
        if kernel.next_cell == len(kernel.session.cells):
            self._close(kernel)
        else:
            self.cells.ask(kernel)

    def done(self, kernel: Kernel) -> None:
        """Schedule the next cell, or the end, as long after this one as in the trace."""
        cell = kernel.cell
        kernel.next_cell += 1
        follows = kernel.cell.start_ms if kernel.next_cell < len(kernel.session.cells) else kernel.session.close_ms
        thinks_ms = max(0, follows - cell.start_ms - cell.duration_ms)
        self._expect(kernel, thinks_ms)
        self._state.after(thinks_ms, partial(self._next, kernel))

    def _close(self, kernel: Kernel) -> None:
        self._state.count_over(kernel)
        self._state.count_vain(kernel)
        self._state.closed_ms = self._state.now_ms
        self._state.drop_memory(kernel)
        self._state.send(ProcessExited(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id))
        self._state.send(LeaseReleased(at_ms=self._state.now_ms, lease_id=kernel.spec.lease_id))
        kernel.ended()
