"""The extension of a kernel that has a lease: its parts, put together."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.inputtransformer2 import cell_magic, leading_empty_lines

from fractional_gpu_kernel.cells.acquire import LOCAL_FAILURES, Acquirer
from fractional_gpu_kernel.cells.broker_channel import Link
from fractional_gpu_kernel.cells.first_grant import FirstGrant
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.cells.guard import Guard
from fractional_gpu_kernel.cells.inputs import Inputs
from fractional_gpu_kernel.cells.needs_gpu import make_cell_transform
from fractional_gpu_kernel.display.notices import Notices
from fractional_gpu_kernel.magics.magics import Magics
from fractional_gpu_kernel.memory.imports import ImportHooks
from fractional_gpu_kernel.memory.limits import MemoryLimits
from fractional_gpu_kernel.memory.managed import ManagedMemory
from fractional_gpu_kernel.memory.shrink import Shrinker
from fractional_gpu_kernel.registrations import Registrations
from fractional_gpu_kernel.settings import Settings

if TYPE_CHECKING:
    from fractional_gpu_kernel.cells.barrier import Barrier

__all__ = ["LeasedKernel"]


class LeasedKernel:
    """Everything that guards one shell."""

    def __init__(self, shell: Any, settings: Settings, notice: str) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._registrations = Registrations(shell)
        self._hooks = ImportHooks()
        self._limits = MemoryLimits(os.environ, self._hooks)
        self._notices = Notices(shell, notice)
        self._first = FirstGrant(self._hooks)
        self.gate = Gate(self._bind)
        self._acquirer = Acquirer(settings, self.gate, lambda: self._link.listens)
        self._managed = ManagedMemory(self._tell_managed, self._hooks)
        shrinker = Shrinker(
            self._on_main_loop,
            self.gate,
            why_not=self._managed.reason,
            waits_for_input=lambda: bool(self._inputs.waiting),
        )
        self._link = Link(
            settings,
            self.gate,
            shrinker,
            self._notices.add,
            self._take_limit,
            managed=lambda: self._managed.seen,
            inputs=lambda: self._inputs.waiting,
            look=self._look,
        )
        self._barrier: Barrier | None = None  # made when the broker first wants the room while a cell runs
        self._inputs = Inputs(shell, self.gate, self._acquirer, self._link.tell_inputs)
        self._magics = Magics(shell, settings, self.gate, self._acquirer, limits=self._limits, say=self._notices.add)
        self._guard = Guard(
            shell,
            self.gate,
            self._acquirer,
            self._limits,
            self._first,
            exempt=self._link.exempt,
            bursts=self._magics.bursts,
        )
        self._cell_transform = make_cell_transform(cell_magic, leading_empty_lines)

    def load(self) -> None:
        """Guard the shell from now on; returns before the broker is spoken to."""
        self._limits.install()
        self._first.install()
        self._managed.install()
        self._magics.install()
        self._registrations.item(self._shell.input_transformers_cleanup, self._cell_transform)
        self._notices.install()
        self._guard.install()
        self._inputs.install()
        self._link.start()

    def unload(self) -> None:
        """Leave the shell as it was; limits that were set stay. Raises as `Barrier.close` does."""
        if self._barrier is not None:
            self._barrier.close()
        self._link.stop()
        self._inputs.uninstall()
        self._guard.uninstall()
        self._notices.uninstall()
        self._registrations.undo()
        self._magics.uninstall()
        self._managed.uninstall()
        self._limits.uninstall()
        self._first.release()

    def become_inert(self) -> None:
        """For a forked child: the lease, the connections and the threads are the parent's."""
        self.gate.become_inert()
        self._acquirer.become_inert()
        self._inputs.become_inert()
        if self._barrier is not None:
            self._barrier.become_inert()

    def _look(self) -> bool:
        """Find out whether the cells that run could do without the GPU; return whether that is under way."""
        try:
            if self._barrier is None:
                from fractional_gpu_kernel.cells.barrier import Barrier  # noqa: PLC0415 - few kernels ever need it

                self._barrier = Barrier(self._shell, self.gate, self._acquirer, self._inputs)
            return self._barrier.look()
        except LOCAL_FAILURES:
            return False

    def _bind(self, environment: Mapping[str, str]) -> None:
        """Take the variables of a grant or of another size. Called under the gate's lock."""
        self._limits.bind(environment)
        self._first.bind(environment)

    def _tell_managed(self, sentence: str) -> None:
        self._link.tell_managed(sentence)

    def _take_limit(self, environment: Mapping[str, str]) -> None:
        """The lease has another size: what is imported from now on is told at once, what is loaded on the main loop."""
        self.gate.bind(environment)
        self._on_main_loop(self._apply_limit)

    def _apply_limit(self) -> None:
        """Tell loaded frameworks, but lower nothing beneath a running cell (`await` lets the loop go on): the next one begins with it."""
        if self._limits.is_stale and not (self._limits.is_lowered and self.gate.is_running):
            self._limits.refresh()

    def _on_main_loop(self, callback: Any) -> bool:  # noqa: ANN401 - tornado's callbacks are untyped
        """Hand a callback to the kernel's main loop; False where there is none (a terminal, or a kernel that has not started)."""
        loop = getattr(getattr(self._shell, "kernel", None), "io_loop", None)
        if loop is None:
            return False
        loop.add_callback(callback)
        return True
