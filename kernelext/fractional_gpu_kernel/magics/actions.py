"""The actions behind `%gpu`'s commands, including resizing with `%gpu` and `%%gpu`.

A command is answered within its cell, unless it needs an idle kernel: `suspend`, `release` and `resize --later` are requested after the
cell has ended (`broker_call.AfterCell`).

`%gpu pin always` keeps renewing a pin until the pool refuses (`StandingPin`). Each pin is short, so little of the user's budget is wasted
when the kernel ends. If the broker does not answer, it is not suspending kernels either, so the renewal is retried. If it refuses, renewing
stops and a notice is shown.
"""

import argparse
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fractional_gpu.core.units import format_fraction, format_memory, format_rough
from fractional_gpu.protocol.errors import BrokerUnavailableError, ConflictError, FractionalGPUError
from fractional_gpu.protocol.messages import PinRequest, ResizeRequest
from fractional_gpu.protocol.routes import NOTE, NoteRequest
from fractional_gpu.protocol.status import LeaseStatus
from fractional_gpu_kernel.cells.acquire import RefusedError
from fractional_gpu_kernel.display.chart import HistoryView
from fractional_gpu_kernel.display.lines import LiveLine, Sentence, publish
from fractional_gpu_kernel.display.views import StatusView, StoryView, TopView
from fractional_gpu_kernel.magics.arguments import (
    ALWAYS,
    ArgumentsError,
    HelpRequested,
    duration_ms,
    overview,
    parse_burst,
    size,
)
from fractional_gpu_kernel.magics.broker_call import AfterCell, call_broker
from fractional_gpu_kernel.memory import MEMORY, free_caches
from fractional_gpu_kernel.settings import Settings, explain

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient
    from fractional_gpu_kernel.extension import LeasedKernel

# Resizes: `%gpu resize`, and the burst of one cell (`%%gpu`).
#
# - A larger share is requested before the cell passes the gate, so that a waiting cell holds nothing that others need. Frameworks may use
#   the share after the broker has reserved it. For a smaller share, frameworks first empty their caches and get the lower limit.
# - Bursts may be nested, or overlap in subshells. The lease has the largest requested share until the last burst ends, and then its old
#   share.
# - If a share cannot be given back, because more memory is in use or the broker does not answer, this is reported, and retried at the end
#   of each later cell.

_WAIT_MS = 3_600_000  # how long to wait for room; an interrupt ends the wait at any time
_GIVE_BACK_S = 10.0


class Size(NamedTuple):
    """A share in milli-GPU and its memory in MiB. If the memory is None, `milli` determines it."""

    milli: int
    memory_mib: int | None


class Resizer:
    def __init__(self, kernel: "LeasedKernel") -> None:
        self._kernel = kernel
        self._settings = kernel.settings
        self._limits = kernel.limits
        self._lock = threading.Lock()
        self._bursts: dict[object, Size] = {}
        self._own: Size | None = None  # the share without bursts, or None if no burst has changed it

    def change(self, milli: int | None, memory_mib: int | None, line: LiveLine | None) -> LeaseStatus:
        """Resize the lease and wait for the new share. Nothing changes if this raises FractionalGPUError or KeyboardInterrupt."""
        status = self._resize(ResizeRequest(fraction_milli=milli, memory_mib=memory_mib, wait_ms=_WAIT_MS), line)
        with self._lock:
            if self._own is not None:  # after later bursts, the lease returns to this share
                self._own = Size(status.spec.fraction_milli, status.spec.reserve_mib)
        self._take(_limit_mib(status))
        return status

    def _take(self, memory_mib: int) -> None:
        self._kernel.gate.bind({MEMORY: str(memory_mib)})
        if self._limits.is_stale:
            self._limits.refresh()

    def begin(self, mark: object, text: str, line: LiveLine | None) -> None:
        """Get at least the share given in `text`, until `end` is called with the same `mark`. Raises RefusedError or KeyboardInterrupt."""
        try:
            arguments = parse_burst(text)
            milli, memory_mib = size("%%gpu", arguments.fraction, arguments.memory)
            self._begin(mark, Size(milli or 0, memory_mib), line)
        except ArgumentsError as error:
            raise RefusedError(str(error)) from None
        except HelpRequested as text_asked:
            raise RefusedError(f"It asked for help:\n{text_asked}") from None
        except FractionalGPUError as error:
            raise RefusedError(explain(error)) from None

    def _begin(self, mark: object, wanted: Size, line: LiveLine | None) -> None:
        status = call_broker(self._settings, lambda client: client.lease(self._settings.lease_id), revive=True)
        if status.spec.fraction_milli >= wanted.milli and status.spec.reserve_mib >= (wanted.memory_mib or 0):
            with self._lock:
                self._bursts[mark] = wanted
            return
        with self._lock:
            fresh = self._own is None
            self._own = self._own or Size(status.spec.fraction_milli, status.spec.reserve_mib)
        request = ResizeRequest(fraction_milli=wanted.milli, memory_mib=wanted.memory_mib, wait_ms=_WAIT_MS, burst=True)
        try:
            status = self._resize(request, line)
        except BrokerUnavailableError:
            raise  # the share may have been granted, in which case `end` gives the difference back
        except FractionalGPUError:
            with self._lock:
                if fresh and not self._bursts:
                    self._own = None
            raise
        with self._lock:
            self._bursts[mark] = Size(status.spec.fraction_milli, status.spec.reserve_mib)
        self._take(_limit_mib(status))

    def end(self, mark: object, *, silent: bool) -> None:
        """End this cell's request, and shrink the lease to the largest share that is still needed. Never raises broker errors."""
        with self._lock:
            had_burst = self._bursts.pop(mark, None) is not None
            is_owed = self._own is not None and (had_burst or not self._bursts)
        if is_owed:
            self._give_back(shows=had_burst and not silent)

    def _give_back(self, *, shows: bool) -> None:
        """Shrink the lease to the largest share still needed, and show any failure. After an interrupt, the next `end` tries again."""
        with self._lock:
            own = self._own
            if own is None:
                return
            target = max([own, *self._bursts.values()], key=lambda size: (size.milli, size.memory_mib or 0))
        if target.memory_mib is not None and target.memory_mib < (self._limits.cap_mib or 0):
            self._take(target.memory_mib)
        free_caches()
        burst = target != own  # another burst continues, so the broker must know that this share ends with this process
        request = ResizeRequest(fraction_milli=target.milli, memory_mib=target.memory_mib, wait_ms=0, burst=burst)
        try:
            self._take(_limit_mib(self._resize(request, None, timeout_s=_GIVE_BACK_S, revive=False)))
        except (FractionalGPUError, KeyboardInterrupt) as error:
            failure = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error).rstrip(".")
            memory = f", {format_memory(target.memory_mib)}" if target.memory_mib is not None else ""
            text = (
                f"This cell's larger share could not be given back yet: {failure}. The kernel tries again after each cell; this "
                f"kernel's own share is {format_fraction(target.milli)} GPU{memory}."
            )
            if shows:
                publish(self._kernel.shell, Sentence(text))
            return
        with self._lock:
            if not self._bursts:
                self._own = None

    def _resize(
        self, request: ResizeRequest, line: LiveLine | None, *, timeout_s: float = 30.0, revive: bool = True
    ) -> LeaseStatus:
        return call_broker(
            self._settings,
            lambda client: client.resize(self._settings.lease_id, request),
            timeout_s=timeout_s,
            revive=revive,
            line=line,
        )


def _limit_mib(status: LeaseStatus) -> int:
    """Return how many MiB the kernel may use now: its current reservation, or its cap if nothing is reserved."""
    return status.lease.reserved_mib or status.spec.reserve_mib


_READ_S = 5.0
_DEFAULT_PIN_MS = 1_800_000
_DEFAULT_LINES = 20
# The kinds of requests after a cell. A new request replaces an older one of the same kind.
_ON_GPU, _SHARE = "on the GPU", "share"
_LATER_MS = 60_000  # how long `resize --later` waits for room
_SUSPENDED = "Suspended: this kernel's GPU memory is saved in host memory. The next cell restores it."
_RELEASED = "Released: no GPU memory is reserved for this kernel. The next cell that needs the GPU requests it again."
TOO_LONG = "pin-too-long"
_DURATIONS_MS = (1_800_000, 900_000, 300_000, 60_000)  # the first one that the pool allows is used
_RENEW_AT = 0.75  # the part of a pin's time after which it is renewed
_RETRY_S = 30.0


class StandingPin:
    def __init__(self, settings: Settings, notify: Callable[[str], None]) -> None:
        self._settings = settings
        self._notify = notify
        self._stop: threading.Event | None = None

    def start(self, pin: Callable[[int], LeaseStatus]) -> LeaseStatus:
        """Pin the kernel now with `pin(duration_ms)`, and keep renewing the pin until `stop` is called. Raises FractionalGPUError."""
        for length_ms in _DURATIONS_MS:
            try:
                status = pin(length_ms)
                break
            except ConflictError as error:
                if error.reason != TOO_LONG or length_ms == _DURATIONS_MS[-1]:
                    raise
        self.stop()
        self._stop = stop = threading.Event()
        threading.Thread(target=self._renew, args=(stop, length_ms), name="gpu-pin", daemon=True).start()
        return status

    def stop(self) -> None:
        """Stop renewing. The current pin stays in place."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _renew(self, stop: threading.Event, length_ms: int) -> None:
        pause_s = length_ms / 1000 * _RENEW_AT
        while not stop.wait(pause_s):
            pause_s = length_ms / 1000 * _RENEW_AT
            try:
                with self._settings.connect() as client:
                    client.pin(self._settings.lease_id, PinRequest(duration_ms=length_ms))
            except BrokerUnavailableError:
                pause_s = min(pause_s, _RETRY_S)
            except FractionalGPUError as error:
                self._notify(f"This kernel's pin is no longer being renewed: {error}")
                return


class Actions:
    """The actions, one method per command. The methods raise ArgumentsError, HelpRequested, FractionalGPUError or RefusedError."""

    def __init__(self, kernel: "LeasedKernel") -> None:
        self._shell = kernel.shell
        self._settings = kernel.settings
        self._gate = kernel.gate
        self._acquirer = kernel.acquirer
        self._resizer = kernel.magics.resizer
        self._pins = StandingPin(kernel.settings, kernel.notices.add)
        self._after = AfterCell(kernel.shell, kernel.settings)

    def stop(self) -> None:
        self._pins.stop()

    def _say(self, sentence: str) -> None:
        publish(self._shell, Sentence(sentence))

    def help(self, _: argparse.Namespace) -> None:
        raise HelpRequested(overview())

    def status(self, _: argparse.Namespace) -> None:
        try:
            status = self._read(lambda client: client.lease(self._settings.lease_id, fresh=True))
        except BrokerUnavailableError as error:
            without = "is not on the GPU; the next cell will restart the broker"
            now = "is on the GPU and keeps working" if self._gate.is_open else without
            self._say(f"{error}. This kernel {now}.")
        else:
            publish(self._shell, StatusView(status))

    def top(self, _: argparse.Namespace) -> None:
        publish(self._shell, TopView(self._read(lambda client: client.status(fresh=True)), self._settings.lease_id))

    def history(self, arguments: argparse.Namespace) -> None:
        last_ms = None if arguments.last is None else duration_ms("%gpu history", arguments.last)
        history = self._read(lambda client: client.history(self._settings.lease_id))
        publish(self._shell, HistoryView(history, last_ms))

    def cost(self, _: argparse.Namespace) -> None:
        from fractional_gpu_kernel.display.cost import CostView  # noqa: PLC0415 - few kernels use this

        try:
            cost = self._read(lambda client: client.cost(self._settings.lease_id))
        except BrokerUnavailableError as error:
            self._say(f"{error}. Costs can be shown once the broker is running again.")
        else:
            publish(self._shell, CostView(cost))

    def explain(self, arguments: argparse.Namespace) -> None:
        lines = str(_DEFAULT_LINES) if arguments.lines is None else arguments.lines
        if not (lines.isascii() and lines.isdigit() and 0 < len(lines) < 7 and int(lines)):
            raise ArgumentsError(f"%gpu explain: --lines {lines[:50]!r} is invalid; expected a number from 1 to 999999")
        story = self._read(lambda client: client.story(self._settings.lease_id))
        publish(self._shell, StoryView(story, int(lines)))

    def request(self, arguments: argparse.Namespace) -> None:
        milli, memory_mib = size("%gpu request", arguments.fraction, arguments.memory)
        if (pool := arguments.pool) is not None:
            own = self._read(lambda client: client.lease(self._settings.lease_id)).spec.pool
            if pool != own:
                raise ArgumentsError(
                    f"%gpu request: this kernel is in pool {own!r}, and a running kernel cannot move to {pool[:50]!r}; restart it "
                    f"with a kernel of that pool (`jupyter gpu kernels install --pool {pool[:50]}` adds one to the launcher)"
                )
        self._after.withdraw(_ON_GPU, "%gpu request")
        self._after.withdraw(_SHARE, "%gpu request")
        line = LiveLine(self._shell)
        status = self._resizer.change(milli, memory_mib, line)
        if not self._gate.is_open:
            self._acquirer.wait_for_gpu(line)
        line.show(f"This kernel is on the GPU. {_new_share(status)}")

    def resize(self, arguments: argparse.Namespace) -> None:
        milli, memory_mib = size("%gpu resize", arguments.fraction, arguments.memory)
        if milli is None and memory_mib is None:
            raise ArgumentsError("%gpu resize: give a FRACTION, --memory SIZE, or both, such as %gpu resize 1/2")
        self._after.withdraw(_SHARE, "%gpu resize")
        if not arguments.later:
            line = LiveLine(self._shell)
            line.show(_new_share(self._resizer.change(milli, memory_mib, line)))
            return
        request = ResizeRequest(fraction_milli=milli, memory_mib=memory_mib, wait_ms=_LATER_MS)
        self._after.request(
            _SHARE,
            # The new limit for frameworks arrives as a command from the broker.
            lambda client: _new_share(client.resize(self._settings.lease_id, request)),
            note="This kernel will request its new share when this cell ends.",
            failed="Not resized: ",
            command="%gpu resize",
        )

    def resume(self, _: argparse.Namespace) -> None:
        self._after.withdraw(_ON_GPU, "%gpu resume")
        line = LiveLine(self._shell)
        if not self._gate.is_open:
            self._acquirer.wait_for_gpu(line)
        line.show("This kernel is on the GPU.")

    def suspend(self, _: argparse.Namespace) -> None:
        self._after.request(
            _ON_GPU,
            lambda client: self._suspend(client, _SUSPENDED),
            note="This kernel will be suspended when this cell ends.",
            failed="Not suspended: ",
            command="%gpu suspend",
        )

    def release(self, _: argparse.Namespace) -> None:
        self._pins.stop()
        self._after.request(
            _ON_GPU,
            lambda client: client.unpin(self._settings.lease_id).sentence,
            lambda client: self._suspend(client, _RELEASED),
            note="This kernel will release the GPU when this cell ends.",
            failed="Not released: ",
            command="%gpu release",
        )

    def _suspend(self, client: "BrokerClient", done: str) -> str:
        saved_mib = client.suspend(self._settings.lease_id).lease.saved_mib
        return f"{done} {format_memory(saved_mib)} is in host memory." if saved_mib else done

    def pin(self, arguments: argparse.Namespace) -> None:
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
        where = "" if status.state == "resident" else " It takes effect when the kernel is on the GPU: %gpu resume."
        pinned = f"Pinned for {format_rough(status.pinned_ms)}{more}: this kernel will not be suspended for being idle or to make room."
        self._say(f"{pinned} %gpu unpin ends it.{where}")

    def unpin(self, _: argparse.Namespace) -> None:
        self._pins.stop()
        self._steer(lambda client: client.because_of("`%gpu unpin`").unpin(self._settings.lease_id))
        self._say("Not pinned: this kernel can be suspended when it is idle.")

    def note(self, arguments: argparse.Namespace) -> None:
        lease_id, text = self._settings.lease_id, "" if arguments.clear else arguments.text
        if text is None:
            status = self._read(lambda client: client.lease(lease_id))
        else:
            request = NoteRequest(note=text)
            status = self._steer(lambda client: client.because_of("`%gpu note`").call(NOTE, request, lease_id))
        none = "This kernel has no note; %gpu note TEXT adds one."
        self._say(f"This kernel's note: {status.note}" if status.note else none)

    def _pin(self, duration_ms: int) -> LeaseStatus:
        request = PinRequest(duration_ms=duration_ms)
        return self._steer(lambda client: client.pin(self._settings.lease_id, request))

    def _steer(self, call: Callable[["BrokerClient"], LeaseStatus]) -> LeaseStatus:
        return call_broker(self._settings, call, revive=True)

    def _read(self, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - any result of the call
        return call_broker(self._settings, call, timeout_s=_READ_S)


def _new_share(status: LeaseStatus) -> str:
    jax = " JAX read its limit when it was imported: to change it, restart the kernel (this loses its variables)."
    restart = jax if "jax" in sys.modules else ""
    fraction, memory = format_fraction(status.spec.fraction_milli), format_memory(status.spec.reserve_mib)
    return f"Its share is now {fraction} GPU, {memory} of device memory.{restart}"
