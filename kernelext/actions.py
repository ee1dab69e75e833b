"""What `%gpu`'s commands do. Imported when the first one is used.

What is asked from within a `%gpu` cell is answered in it, except what needs the kernel to be idle: the kernel is busy with the very
message that carries the cell, and a broker suspends, or moves, only what is idle. `suspend`, `release` and `resize --later` leave
a note; when the cell is over and the main loop has gone on, a thread asks the broker (which waits a moment for the kernel to become
idle) and tells the result in place of the note.
"""

import argparse
import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any

from kernelext.acquisition import Acquirer, explain
from kernelext.arguments import ArgumentsError, HelpAsked, duration_ms, overview, size
from kernelext.asking import ask
from kernelext.chart import HistoryView
from kernelext.commands import ALWAYS
from kernelext.display import LiveLine, Sentence, publish
from kernelext.gate import Gate
from kernelext.pins import StandingPin
from kernelext.settings import Settings
from kernelext.sizes import Sizes
from kernelext.views import StatusView, StoryView, TopView
from kernelext.waiting import wait_for_gpu
from kernelext.waitline import rough
from provisioner.core.units import format_fraction, format_memory
from provisioner.protocol.errors import BrokerUnavailableError, FractionalGPUError
from provisioner.protocol.messages import LeaseStatus, PinRequest, ResizeRequest

__all__ = ["Actions"]

_LOOK_S = 5.0
_DEFAULT_PIN_MS = 1_800_000
_DEFAULT_LINES = 20
_LATER_MS = 60_000  # how long a share that is asked for after the cell waits for room
_SUSPENDED = "Suspended: this kernel holds no GPU memory; what it had there is saved. The next cell brings it back."
_RELEASED = "Released: no GPU memory is reserved for this kernel. The next cell that needs the GPU asks for it again."


class Actions:
    """One method a command, called with its arguments. Raise ArgumentsError, HelpAsked, FractionalGPUError, RefusedError."""

    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - IPython is untyped
        settings: Settings,
        gate: Gate,
        acquirer: Acquirer,
        *,
        sizes: Sizes,
        pins: StandingPin,
    ) -> None:
        self._shell = shell
        self._settings = settings
        self._gate = gate
        self._acquirer = acquirer
        self._sizes = sizes
        self._pins = pins

    def run(self, arguments: argparse.Namespace) -> None:
        """Do what `%gpu` was asked to do."""
        action: Callable[[argparse.Namespace], None] = getattr(self, arguments.name)
        action(arguments)

    def stop(self) -> None:
        """Renew no pin any more."""
        self._pins.stop()

    # -- looking ----------------------------------------------------------------------------------------------------------------------

    def help(self, arguments: argparse.Namespace) -> None:
        """Show the list; help about one command is the parser's."""
        del arguments
        raise HelpAsked(overview())

    def status(self, arguments: argparse.Namespace) -> None:
        """Show this kernel's share."""
        del arguments
        try:
            status = self._look(lambda client: client.lease(self._settings.lease_id))
        except BrokerUnavailableError as error:
            now = (
                "is on the GPU and goes on working"
                if self._gate.is_open
                else "is not on the GPU; the next cell starts the broker again"
            )
            publish(self._shell, Sentence(f"{error}. Meanwhile this kernel {now}."))
        else:
            publish(self._shell, StatusView(status))

    def top(self, arguments: argparse.Namespace) -> None:
        """Show the machine."""
        del arguments
        publish(self._shell, TopView(self._look(lambda client: client.status()), self._settings.lease_id))

    def history(self, arguments: argparse.Namespace) -> None:
        """Show memory and residency over time."""
        last_ms = None if arguments.last is None else duration_ms("%gpu history", arguments.last)
        history = self._look(lambda client: client.history(self._settings.lease_id))
        publish(self._shell, HistoryView(history, last_ms))

    def explain(self, arguments: argparse.Namespace) -> None:
        """Show the story."""
        lines = str(_DEFAULT_LINES) if arguments.lines is None else arguments.lines
        if not (lines.isascii() and lines.isdigit() and 0 < len(lines) < 7 and int(lines)):
            raise ArgumentsError(f"%gpu explain: --lines {lines[:50]!r} is not a number of lines; allowed: 1 to 999999")
        story = self._look(lambda client: client.story(self._settings.lease_id))
        publish(self._shell, StoryView(story, int(lines)))

    # -- the share --------------------------------------------------------------------------------------------------------------------

    def request(self, arguments: argparse.Namespace) -> None:
        """Have this share, and be on a GPU."""
        milli, memory_mib = size("%gpu request", arguments.fraction, arguments.memory)
        if arguments.pool is not None:
            self._check_pool(arguments.pool)
        line = LiveLine(self._shell)
        status = self._sizes.change(milli, memory_mib, line)
        if not self._gate.is_open:
            wait_for_gpu(self._gate, self._acquirer, line)
        line.show(f"This kernel is on the GPU. {_new_share(status)}")

    def resize(self, arguments: argparse.Namespace) -> None:
        """Have another share."""
        milli, memory_mib = size("%gpu resize", arguments.fraction, arguments.memory)
        if milli is None and memory_mib is None:
            raise ArgumentsError("%gpu resize: give a FRACTION, --memory SIZE, or both, such as %gpu resize 1/2")
        line = LiveLine(self._shell)
        if not arguments.later:
            line.show(_new_share(self._sizes.change(milli, memory_mib, line)))
            return
        request = ResizeRequest(fraction_milli=milli, memory_mib=memory_mib, wait_ms=_LATER_MS)

        def work() -> str:
            with self._settings.connect() as client:  # the new limit comes as a command of the broker's
                return _new_share(client.resize(self._settings.lease_id, request))

        self._after_cell(line, "Asks for its new share as soon as this cell is over.", work, "Not resized: ")

    def _check_pool(self, pool: str) -> None:
        own = self._look(lambda client: client.lease(self._settings.lease_id)).pool
        if pool != own:
            raise ArgumentsError(
                f"%gpu request: this kernel is in pool {own!r}, and a running kernel cannot change to {pool[:50]!r}; restart it with a "
                f"kernel of that pool (`jupyter gpu kernels install --pool {pool[:50]}` adds one to the launcher)"
            )

    # -- being on the GPU -------------------------------------------------------------------------------------------------------------

    def resume(self, arguments: argparse.Namespace) -> None:
        """Wait until the kernel is on a GPU."""
        del arguments
        line = LiveLine(self._shell)
        if not self._gate.is_open:
            wait_for_gpu(self._gate, self._acquirer, line)
        line.show("This kernel is on the GPU.")

    def suspend(self, arguments: argparse.Namespace) -> None:
        """Free the GPU after this cell."""
        del arguments
        self._leave("Suspends as soon as this cell is over.", _SUSPENDED, "Not suspended: ")

    def release(self, arguments: argparse.Namespace) -> None:
        """Give the reservation back after this cell."""
        del arguments
        self._pins.stop()
        self._leave("Gives the GPU back as soon as this cell is over.", _RELEASED, "Not released: ", unpin=True)

    def _leave(self, note: str, done: str, failed: str, *, unpin: bool = False) -> None:
        def work() -> str:
            with self._settings.connect() as client:
                if unpin:
                    client.unpin(self._settings.lease_id)
                status = client.suspend(self._settings.lease_id)
            return f"{done} {format_memory(status.saved_mib)} lie in host memory." if status.saved_mib else done

        self._after_cell(LiveLine(self._shell), note, work, failed)

    def pin(self, arguments: argparse.Namespace) -> None:
        """Stay on the GPU for a while."""
        if arguments.duration == ALWAYS:
            status = self._pins.start(self._pin)
            more = ", and renewed before it ends"
        else:
            given = arguments.duration
            status = self._pin(_DEFAULT_PIN_MS if given is None else duration_ms("%gpu pin", given))
            self._pins.stop()
            more = ""
        where = "" if status.state == "resident" else " It counts when the kernel is on the GPU: %gpu resume."
        publish(
            self._shell,
            Sentence(
                f"Pinned for {rough(status.pinned_ms)}{more}: not suspended for others or for being idle. "
                f"%gpu unpin ends it.{where}"
            ),
        )

    def unpin(self, arguments: argparse.Namespace) -> None:
        """End the pin."""
        del arguments
        self._pins.stop()
        ask(self._settings, lambda client: client.unpin(self._settings.lease_id), revive=True)
        publish(self._shell, Sentence("Not pinned: this kernel may be suspended when it is idle."))

    def _pin(self, duration_ms: int) -> LeaseStatus:
        request = PinRequest(duration_ms=duration_ms)
        return ask(self._settings, lambda client: client.pin(self._settings.lease_id, request), revive=True)

    # -- asking -----------------------------------------------------------------------------------------------------------------------

    def _look(self, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - what the call returns
        """Ask without starting a broker: looking changes nothing."""
        return ask(self._settings, call, timeout_s=_LOOK_S)

    def _after_cell(self, line: LiveLine, note: str, work: Callable[[], str], failed: str) -> None:
        """Show `note` now, and do `work` in a thread when the cell is over: its sentence, or why not, takes the note's place."""
        line.show(note)
        context = contextvars.copy_context()  # so that the result lands in this cell

        def tell() -> None:
            try:
                self._settings.revive()
                line.show(work())
            except FractionalGPUError as error:
                line.show(f"{failed}{explain(error)}")

        def after_cell() -> None:
            self._shell.events.unregister("post_execute", after_cell)
            thread = threading.Thread(target=context.run, args=(tell,), name="gpu-after-cell", daemon=True)
            loop = getattr(getattr(self._shell, "kernel", None), "io_loop", None)
            if loop is None:
                thread.start()
            else:
                loop.add_callback(thread.start)

        self._shell.events.register("post_execute", after_cell)


def _new_share(status: LeaseStatus) -> str:
    jax = " JAX read the limit when it was imported: restart the kernel for it to change there (that loses its variables)."
    restart = jax if "jax" in sys.modules else ""
    return f"Its share is {format_fraction(status.fraction_milli)} GPU, {format_memory(status.reserve_mib)} of device memory now.{restart}"
