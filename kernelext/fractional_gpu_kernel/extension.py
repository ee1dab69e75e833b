"""The extension of a kernel that has a lease: makes its parts, connects them, and installs them into the shell."""

import os
from collections.abc import Mapping
from typing import Any

from IPython.core.inputtransformer2 import cell_magic, leading_empty_lines

from fractional_gpu_kernel.cells.acquire import Acquirer, FirstGrant, LoopWatch, Turns
from fractional_gpu_kernel.cells.broker_channel import BrokerChannel
from fractional_gpu_kernel.cells.gate import Gate, make_cell_transform
from fractional_gpu_kernel.cells.guard import CellGuard, InputRequests
from fractional_gpu_kernel.display.lines import Notices
from fractional_gpu_kernel.magics.magics import Magics
from fractional_gpu_kernel.memory.checkpointability import CheckpointBlockers
from fractional_gpu_kernel.memory.limits import ImportHooks, MemoryLimits, Shrinker
from fractional_gpu_kernel.registrations import Registrations
from fractional_gpu_kernel.settings import Settings


class LeasedKernel:
    def __init__(self, shell: Any, settings: Settings, notice: str) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._registrations = Registrations(shell)
        self._hooks = ImportHooks()
        self._limits = MemoryLimits(os.environ, self._hooks)
        self._notices = Notices(shell, notice)
        self._first_grant = FirstGrant(self._hooks)
        self.gate = Gate(self._limits.bind, self._first_grant.bind)
        self._acquirer = Acquirer(settings, self.gate, is_reachable=lambda: self._channel.is_connected)
        self._turns = Turns(settings, self.gate, self._notices)
        self._blockers = CheckpointBlockers(lambda why: self._channel.report_managed(why), self._hooks)  # noqa: PLW0108 - made below
        shrinker = Shrinker(
            self._on_main_loop,
            self.gate,
            why_not=self._blockers.reason,
            waits_for_input=lambda: bool(self._inputs.waiting),
            has_gui_loop=self._has_gui_loop,
        )
        watch = LoopWatch(
            self._on_main_loop, self.gate, self._acquirer, is_held=self._is_held, notice=self._notices.add
        )
        self._channel = BrokerChannel(
            settings,
            self.gate,
            shrinker,
            self._notices.add,
            self._take_size,
            managed=lambda: self._blockers.seen,
            inputs=lambda: self._inputs.waiting,
            look=watch.look,
            urgent_notice=self._notices.add_urgent,
            preempted=self._turns.show,
        )
        self._inputs = InputRequests(shell, self.gate, self._acquirer, self._channel.report_inputs)
        self._magics = Magics(shell, settings, self.gate, self._acquirer, limits=self._limits, notify=self._notices.add)
        self._guard = CellGuard(
            shell,
            self.gate,
            self._acquirer,
            self._limits,
            self._first_grant,
            report_exempt=self._channel.report_exempt,
            make_bursts=self._magics.resizer,
        )

    def load(self) -> None:
        self._limits.install()
        self._first_grant.install()
        self._blockers.install()
        self._magics.install(self._registrations)
        cell_transform = make_cell_transform(cell_magic, leading_empty_lines)
        self._registrations.item(self._shell.input_transformers_cleanup, cell_transform)
        self._notices.install(self._registrations)
        self._guard.install(self._registrations)
        self._inputs.install()
        self._channel.start()

    def unload(self) -> None:
        self._channel.stop()
        self._inputs.uninstall()
        self._guard.uninstall()
        self._registrations.undo()
        self._magics.stop()
        self._hooks.close()
        self._first_grant.release()

    def become_inert(self) -> None:
        self.gate.become_inert()
        self._acquirer.become_inert()
        self._inputs.become_inert()

    def _take_size(self, environment: Mapping[str, str]) -> None:
        """The lease has another size: later imports read it from the environment, loaded frameworks are limited on the main loop."""
        self.gate.bind(environment)
        self._on_main_loop(self._apply_limit)

    def _apply_limit(self) -> None:
        """Limit loaded frameworks. A lower limit waits for the next cell while one runs (`await` lets the loop go on beneath it)."""
        if self._limits.is_stale and not (self._limits.is_lowered and self.gate.is_running):
            self._limits.refresh()

    def _is_held(self) -> bool:
        return self.gate.is_busy or self.gate.is_exempt or bool(self._inputs.waiting)

    def _has_gui_loop(self) -> bool:
        """Return whether the main thread runs a GUI event loop (`%gui`) between cells: no callback of the main loop runs meanwhile."""
        return getattr(getattr(self._shell, "kernel", None), "eventloop", None) is not None

    def _on_main_loop(self, callback: Any) -> bool:  # noqa: ANN401 - tornado's callbacks are untyped
        """Hand a callback to the kernel's main loop; False if that does not run (a terminal, or a GUI event loop of an older ipykernel)."""
        kernel: Any = getattr(self._shell, "kernel", None)
        loop = getattr(kernel, "io_loop", None)
        shell_channel: Any = getattr(kernel, "shell_channel_thread", None)
        if loop is None or (self._has_gui_loop() and shell_channel is None):
            return False
        loop.add_callback(callback)
        if self._has_gui_loop() and not self._is_held():
            # A GUI event loop returns to the main loop when a shell message comes. ipykernel drops this one without a word. Not during a
            # cell: if the cell fails, the message would let those behind it run.
            shell_channel.io_loop.add_callback(kernel._post_dummy_stop_aborting_message, None)  # noqa: SLF001 - there is no public way
        return True
