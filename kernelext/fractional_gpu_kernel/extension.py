"""The extension for a kernel with a lease. Creates the extension's parts, connects them, and installs them in the shell."""

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
from fractional_gpu_kernel.memory import CheckpointBlockers, ImportHooks, MemoryLimits
from fractional_gpu_kernel.registrations import Registrations
from fractional_gpu_kernel.settings import Settings


class LeasedKernel:
    def __init__(self, shell: Any, settings: Settings, notice: str) -> None:  # noqa: ANN401 - IPython is untyped
        self.shell = shell
        self.settings = settings
        self.registrations = Registrations(shell)
        self._hooks = ImportHooks()
        self.limits = MemoryLimits(os.environ, self._hooks)
        self.first_grant = FirstGrant(self._hooks)
        self.blockers = CheckpointBlockers(lambda why: self.channel.report_managed(why), self._hooks)  # noqa: PLW0108 - the channel is created below
        self.notices = Notices(shell, notice)
        self.gate = Gate(self.limits.bind, self.first_grant.bind)
        self.acquirer = Acquirer(settings, self.gate, is_reachable=lambda: self.channel.is_connected)
        self.turns = Turns(settings, self.gate, self.notices)
        self.loop_watch = LoopWatch(self)
        self.channel = BrokerChannel(self)
        self.inputs = InputRequests(self)
        self.magics = Magics(self)
        self._guard = CellGuard(self)

    def load(self) -> None:
        self.limits.install()
        self.first_grant.install()
        self.blockers.install()
        self.magics.install()
        cell_transform = make_cell_transform(cell_magic, leading_empty_lines)
        self.registrations.item(self.shell.input_transformers_cleanup, cell_transform)
        self.notices.install(self.registrations)
        self._guard.install()
        self.inputs.install()
        self.channel.start()

    def unload(self) -> None:
        self.channel.stop()
        self._guard.uninstall()
        self.registrations.undo()
        self.magics.stop()
        self._hooks.close()
        self.first_grant.release()

    def become_inert(self) -> None:
        self.gate.become_inert()
        self.acquirer.become_inert()
        self.inputs.become_inert()

    def take_size(self, environment: Mapping[str, str]) -> None:
        """Apply a new size. Frameworks imported later read it from the environment. The main loop limits those already imported."""
        self.gate.bind(environment)
        self.on_main_loop(self._apply_limit)

    def _apply_limit(self) -> None:
        """Limit frameworks that are already loaded, but do not lower their limit while a cell is running or paused at an `await`."""
        if self.limits.is_stale and not (self.limits.is_lowered and self.gate.is_running):
            self.limits.refresh()

    def is_held(self) -> bool:
        return self.gate.is_busy or self.gate.is_exempt or bool(self.inputs.waiting)

    def has_gui_loop(self) -> bool:
        """Return whether the main thread runs a GUI event loop (`%gui`) between cells, which delays callbacks on the main loop."""
        return getattr(getattr(self.shell, "kernel", None), "eventloop", None) is not None

    def on_main_loop(self, callback: Any) -> bool:  # noqa: ANN401 - tornado's callbacks are untyped
        """Run the callback on the main loop. Return False if no main loop is running, as in a terminal or an older ipykernel's GUI loop."""
        kernel: Any = getattr(self.shell, "kernel", None)
        loop = getattr(kernel, "io_loop", None)
        shell_channel: Any = getattr(kernel, "shell_channel_thread", None)
        if loop is None or (self.has_gui_loop() and shell_channel is None):
            return False
        loop.add_callback(callback)
        if self.has_gui_loop() and not self.is_held():
            # A shell message makes a GUI event loop return to the main loop, and ipykernel ignores this message. Do not send it during a
            # cell: if the cell fails, the cells after it would run.
            shell_channel.io_loop.add_callback(kernel._post_dummy_stop_aborting_message, None)  # noqa: SLF001 - there is no public way
        return True
