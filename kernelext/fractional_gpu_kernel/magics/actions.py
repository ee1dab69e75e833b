"""What `%gpu`'s commands do. Imported when the first one is used.

What is asked from within a `%gpu` cell is answered in it, except what needs the kernel to be idle: `suspend`, `release` and
`resize --later` are asked when the cell is over (see `after_cell`).
"""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.messages import LeaseStatus, PinRequest, ResizeRequest
from fractional_gpu_kernel.cells.acquire import Acquirer
from fractional_gpu_kernel.cells.broker_call import ask
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.cells.wait import wait_for_gpu
from fractional_gpu_kernel.display.chart import HistoryView
from fractional_gpu_kernel.display.display import LiveLine, Sentence, publish
from fractional_gpu_kernel.display.views import StatusView, StoryView, TopView
from fractional_gpu_kernel.display.wait_line import rough
from fractional_gpu_kernel.magics.after_cell import AfterCell
from fractional_gpu_kernel.magics.arguments import (
    ArgumentsError,
    HelpAsked,
    duration_ms,
    overview,
    size,
)
from fractional_gpu_kernel.magics.commands import ALWAYS
from fractional_gpu_kernel.magics.pins import StandingPin
from fractional_gpu_kernel.magics.resize import Sizes
from fractional_gpu_kernel.settings import Settings

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient

__all__ = ["Actions"]

_LOOK_S = 5.0
_DEFAULT_PIN_MS = 1_800_000
_DEFAULT_LINES = 20
_ON_GPU, _SHARE = "on the GPU", "share"  # what requests for the time after a cell are about
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
        self._after = AfterCell(shell, settings)

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
            status = self._look(lambda client: client.lease(self._settings.lease_id, fresh=True))
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
        publish(self._shell, TopView(self._look(lambda client: client.status(fresh=True)), self._settings.lease_id))

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
        self._after.withdraw(_ON_GPU, "%gpu request")
        self._after.withdraw(_SHARE, "%gpu request")
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
        self._after.withdraw(_SHARE, "%gpu resize")
        if not arguments.later:
            line = LiveLine(self._shell)
            line.show(_new_share(self._sizes.change(milli, memory_mib, line)))
            return
        request = ResizeRequest(fraction_milli=milli, memory_mib=memory_mib, wait_ms=_LATER_MS)
        self._after.ask(
            _SHARE,
            # The new limit comes as a command of the broker's.
            lambda client: _new_share(client.resize(self._settings.lease_id, request)),
            note="Asks for its new share as soon as this cell is over.",
            failed="Not resized: ",
            command="%gpu resize",
        )

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
        self._after.withdraw(_ON_GPU, "%gpu resume")
        line = LiveLine(self._shell)
        if not self._gate.is_open:
            wait_for_gpu(self._gate, self._acquirer, line)
        line.show("This kernel is on the GPU.")

    def suspend(self, arguments: argparse.Namespace) -> None:
        """Free the GPU after this cell."""
        del arguments
        self._after.ask(
            _ON_GPU,
            lambda client: self._suspend(client, _SUSPENDED),
            note="Suspends as soon as this cell is over.",
            failed="Not suspended: ",
            command="%gpu suspend",
        )

    def release(self, arguments: argparse.Namespace) -> None:
        """Give the reservation back after this cell."""
        del arguments
        self._pins.stop()
        self._after.ask(
            _ON_GPU,
            lambda client: client.unpin(self._settings.lease_id).sentence,
            lambda client: self._suspend(client, _RELEASED),
            note="Gives the GPU back as soon as this cell is over.",
            failed="Not released: ",
            command="%gpu release",
        )

    def _suspend(self, client: "BrokerClient", done: str) -> str:
        saved_mib = client.suspend(self._settings.lease_id).saved_mib
        return f"{done} {format_memory(saved_mib)} lie in host memory." if saved_mib else done

    def pin(self, arguments: argparse.Namespace) -> None:
        """Stay on the GPU for a while."""
        given = arguments.duration
        wanted_ms = _DEFAULT_PIN_MS if given in (None, ALWAYS) else duration_ms("%gpu pin", given, also=ALWAYS)
        self._after.withdraw(_ON_GPU, "%gpu pin")
        if arguments.duration == ALWAYS:
            status = self._pins.start(self._pin)
            more = ", and renewed before it ends"
        else:
            status = self._pin(wanted_ms)
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


def _new_share(status: LeaseStatus) -> str:
    jax = " JAX read the limit when it was imported: restart the kernel for it to change there (that loses its variables)."
    restart = jax if "jax" in sys.modules else ""
    return f"Its share is {format_fraction(status.fraction_milli)} GPU, {format_memory(status.reserve_mib)} of device memory now.{restart}"
