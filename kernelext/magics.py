"""`%gpu` and `%%cpu`.

A cell made of `%gpu` lines never waits for the GPU and is never marked as running, so the gate can be shut beneath it. But the kernel
is still busy with the very message that carries it, and a broker suspends only what is idle. `%gpu suspend` therefore only leaves a
note; when the cell is over and the main loop has gone on, a thread asks the broker (which waits a moment for the kernel to become
idle) and tells the result in place of the note.
"""

import contextvars
import re
import threading
from collections.abc import Callable
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from kernelext.acquisition import Acquirer, explain
from kernelext.display import LiveLine, Sentence, StatusView, publish
from kernelext.gate import Gate
from kernelext.settings import Settings
from kernelext.waiting import RefusedError, wait_for_gpu

__all__ = ["COMMANDS", "Magics"]

COMMANDS = {
    "status": "this kernel's share of a GPU (also: nothing)",
    "suspend": "save the GPU memory of this kernel to host memory when this cell is over, and free the GPU for others",
    "resume": "wait until this kernel is on a GPU again",
    "help": "this list",
}
HELP = "\n".join(
    [
        *(f"%gpu {name:<8}  {what}" for name, what in COMMANDS.items()),
        "%%cpu          run this cell without waiting for the GPU (it must not use it)",
    ]
)
_COMMAND_SO_FAR = re.compile(r"\s*%gpu\s+(\w*)")
_STATUS_TIMEOUT_S = 5.0


class Magics:
    """The magics of a kernel that has a lease."""

    def __init__(self, shell: Any, settings: Settings, gate: Gate, acquirer: Acquirer) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._settings = settings
        self._gate = gate
        self._acquirer = acquirer

    def gpu(self, line: str) -> None:
        """Show and steer this kernel's share of a GPU; `%gpu help` lists what there is."""
        if self._gate.is_inert:
            raise _usage_error(
                "This is a forked child of the kernel: the GPU share is the parent's. Use %gpu in the notebook."
            )
        words = line.split()
        command = words[0] if words else "status"
        if command not in COMMANDS:
            import difflib  # noqa: PLC0415 - off the kernel's start

            close = difflib.get_close_matches(command, COMMANDS, 1)
            hint = f" Did you mean %gpu {close[0]}?" if close else ""
            raise _usage_error(f"%gpu {command[:50]} is not known; allowed: {', '.join(COMMANDS)}.{hint}")
        if len(words) > 1:
            raise _usage_error(f"%gpu {command} takes no arguments; given: {' '.join(words[1:])[:100]}")
        actions: dict[str, Callable[[], None]] = {
            "status": self._status,
            "suspend": self._suspend,
            "resume": self._resume,
            "help": lambda: print(HELP),  # noqa: T201 - a magic prints
        }
        actions[command]()

    def cpu(self, line: str, cell: str) -> None:
        """Run the cell without waiting for the GPU.

        A notebook's `%%cpu` never comes here: it is taken off the cell's text before. This serves `run_cell_magic`.
        """
        if line.strip():
            raise _usage_error(f"%%cpu takes no arguments; given: {line.strip()[:100]}")
        self._shell.run_cell("%%cpu\n" + cell).raise_error()

    @context_matcher(identifier="gpu_magic")  # type: ignore[untyped-decorator]
    def complete(self, context: Any) -> Any:  # noqa: ANN401 - IPython's completion context and result
        """Complete the word after `%gpu`."""
        match = _COMMAND_SO_FAR.fullmatch(context.text_until_cursor)
        if match is None:
            return {"completions": [], "suppress": False}
        found = [SimpleCompletion(text=name, type="magic") for name in COMMANDS if name.startswith(match[1])]
        return {"completions": found, "suppress": True, "matched_fragment": match[1]}

    def _status(self) -> None:
        from provisioner.protocol.errors import BrokerUnavailableError, FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        try:
            with self._settings.connect(_STATUS_TIMEOUT_S) as client:
                status = client.lease(self._settings.lease_id)
        except BrokerUnavailableError as error:
            now = (
                "is on the GPU and goes on working"
                if self._gate.is_open
                else "is not on the GPU; the next cell starts the broker again"
            )
            publish(self._shell, Sentence(f"{error}. Meanwhile this kernel {now}."))
        except FractionalGPUError as error:
            raise _usage_error(explain(error)) from None
        else:
            publish(self._shell, StatusView(status))

    def _resume(self) -> None:
        line = LiveLine(self._shell)
        if not self._gate.is_open:
            try:
                wait_for_gpu(self._gate, self._acquirer, line)
            except RefusedError as error:
                raise _usage_error(str(error)) from None
        line.show("This kernel is on the GPU.")

    def _suspend(self) -> None:
        line = LiveLine(self._shell)
        line.show("Suspends as soon as this cell is over.")
        context = contextvars.copy_context()  # so that the result lands in this cell

        def ask() -> None:
            context.run(self._ask_to_suspend, line)

        def after_cell(_result: object) -> None:
            self._shell.events.unregister("post_run_cell", after_cell)
            loop = getattr(getattr(self._shell, "kernel", None), "io_loop", None)
            thread = threading.Thread(target=ask, name="gpu-suspend", daemon=True)
            if loop is None:
                thread.start()
            else:
                loop.add_callback(thread.start)

        self._shell.events.register("post_run_cell", after_cell)

    def _ask_to_suspend(self, line: LiveLine) -> None:
        from provisioner.protocol.errors import FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        try:
            self._settings.revive()
            with self._settings.connect() as client:
                client.suspend(self._settings.lease_id)
        except FractionalGPUError as error:
            line.show(f"Not suspended: {explain(error)}")
        else:
            line.show(
                "Suspended: this kernel holds no GPU memory; what it had there is saved. The next cell brings it back."
            )


def _usage_error(message: str) -> Exception:
    from IPython.core.error import UsageError  # noqa: PLC0415 - loaded already whenever this runs

    error: Exception = UsageError(message)
    return error
