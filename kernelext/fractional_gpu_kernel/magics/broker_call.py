"""Makes `%gpu`'s calls to the broker, either immediately or after the cell has ended.

`call_broker` makes a call immediately. A separate thread makes the call while the cell's thread waits on a queue, so it can be interrupted
at any time. An interrupt closes the connection, and the broker withdraws the request unless it has already started it. If the broker does
not answer, the user finds out within 5 s, on the live line if there is one, otherwise through an error.

`AfterCell` makes calls after the cell has ended, because the broker only suspends or moves idle kernels. The command first shows a note.
Once the cell has ended and its event loop has moved on, a thread makes the call, and the result replaces the note. A subshell has its own
loop, so a command there does not wait for the main shell, where a cell may be at a breakpoint. The later of two conflicting commands wins.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fractional_gpu.client.client import SilenceWatch
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError, InternalBrokerError
from fractional_gpu.protocol.status import LeaseStatus
from fractional_gpu_kernel.cells.acquire import INTERRUPTED, POLL_S, QUIET_S, interrupts_to
from fractional_gpu_kernel.display.lines import LiveLine, resizing
from fractional_gpu_kernel.settings import Settings, explain

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient

_AGAIN_S = 0.2
T = TypeVar("T")


def call_broker(
    settings: Settings,
    call: Callable[["BrokerClient"], T],
    *,
    timeout_s: float = 30.0,
    revive: bool = False,
    line: LiveLine | None = None,
) -> T:
    """Make a call and return its result. If `revive` is set and no broker answers, start one first.

    If the answer takes more than a moment, `line` shows this kernel's wait for its new share. Raises FractionalGPUError or
    KeyboardInterrupt. After an interrupt, the connection is closed.
    """
    notes: SimpleQueue[object] = SimpleQueue()

    def follow(client: "BrokerClient") -> None:
        for host in client.events():
            for lease in host.leases:
                if lease.lease_id == settings.lease_id:
                    notes.put(lease)

    asked = _PendingCall(settings, call, notes.put, timeout_s=timeout_s, revive=revive)
    follower = _PendingCall(settings, follow, lambda _: None)  # a failure affects only the line
    silence = SilenceWatch(settings.connect, notes.put)
    with interrupts_to(notes):
        try:
            asked.start()
            loud_from = time.monotonic() + QUIET_S
            news: object = None
            while news is not asked:
                quiet_s = loud_from - time.monotonic()  # only a slow answer justifies two more connections
                if quiet_s <= 0:
                    silence.start()
                    if line is not None:
                        follower.start()
                try:
                    news = notes.get(timeout=quiet_s if quiet_s > 0 else POLL_S)
                except Empty:
                    continue
                if news == INTERRUPTED:
                    raise KeyboardInterrupt
                if isinstance(news, BrokerUnavailableError):
                    if line is None:
                        raise news
                    line.show(
                        f"{news}. It continues once the broker is responding again. Interrupt the kernel to stop waiting."
                    )
                elif isinstance(news, LeaseStatus) and line is not None:
                    line.show(resizing(news))
        finally:
            silence.stop()
            asked.hang_up()
            follower.hang_up()
    return asked.result()


class _PendingCall(Generic[T]):
    def __init__(
        self,
        settings: Settings,
        call: Callable[["BrokerClient"], T],
        notify: Callable[[object], None],
        *,
        timeout_s: float = 30.0,
        revive: bool = False,
    ) -> None:
        self._settings = settings
        self._call = call
        self._notify = notify
        self._timeout_s = timeout_s
        self._revive = revive
        self._client: BrokerClient | None = None
        self._is_started = self._is_over = self._hung_up = False
        self._values: list[T] = []
        self._error: FractionalGPUError = InternalBrokerError(
            "the thread that calls the GPU broker ended unexpectedly; see the kernel's log"
        )

    def start(self) -> None:
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, name="gpu-ask", daemon=True).start()

    def hang_up(self) -> None:
        self._hung_up = True
        if self._client is not None and not self._is_over:
            close_soon(self._client)

    def result(self) -> T:
        if not self._values:
            raise self._error
        return self._values[0]

    def _run(self) -> None:
        try:
            if self._revive:
                self._settings.revive()
            with self._settings.connect(self._timeout_s) as self._client:
                if not self._hung_up:
                    self._values.append(self._call(self._client))
        except FractionalGPUError as error:
            self._error = error
        finally:
            self._is_over = True
            self._notify(self)


def close_soon(client: "BrokerClient") -> None:
    """Close the client now, then again shortly afterwards, in case its thread is opening a connection that the first `close` misses."""
    client.close()
    again = threading.Timer(_AGAIN_S, client.close)
    again.daemon = True
    again.start()


Call = Callable[["BrokerClient"], str]  # the sentence that the last call returns is shown


class AfterCell:
    def __init__(self, shell: Any, settings: Settings) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._settings = settings
        self._newest: dict[str, _DeferredRequest] = {}

    def request(self, kind: str, *calls: Call, note: str, failed: str, command: str) -> None:
        """Show `note`, and make the calls once the cell has ended. Withdraw any earlier request of the same kind.

        The sentence returned by the last call then replaces the note. If a call fails, `failed` and the reason replace it.
        """
        self.withdraw(kind, command)
        self._newest[kind] = _DeferredRequest(
            self._shell, self._settings, calls, note=note, failed=failed, command=command
        )

    def withdraw(self, kind: str, command: str) -> None:
        """Withdraw the request that conflicts with `command`, unless the broker has already started it."""
        request = self._newest.pop(kind, None)
        if request is not None:
            request.withdraw(command)


class _DeferredRequest:
    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - as above
        settings: Settings,
        calls: Sequence[Call],
        *,
        note: str,
        failed: str,
        command: str,
    ) -> None:
        self._shell = shell
        self._settings = settings
        self._calls = calls
        self._failed = failed
        self._command = command
        self._lock = threading.Lock()
        self._withdrawn = self._is_over = False
        self._client: BrokerClient | None = None
        self._line = LiveLine(shell)
        self._line.show(note)
        self._context = contextvars.copy_context()  # so that the result appears in this cell
        # The thread of the cell, or None if it does not run in the event loop of a shell.
        self._shell_thread = None if _running_loop() is None else threading.get_ident()
        shell.events.register("post_execute", self._after_cell)

    def withdraw(self, command: str) -> None:
        with self._lock:
            if self._is_over or self._withdrawn:
                return
            self._withdrawn = True
            if self._client is not None:
                close_soon(self._client)
        self._context.copy().run(self._line.show, f"{self._failed}{command} came later and replaces this command.")

    def _after_cell(self) -> None:
        if self._shell_thread not in (None, threading.get_ident()):
            return  # a cell in another shell has ended
        with suppress(ValueError):  # this is registered for each request, and another call may have removed it
            self._shell.events.unregister("post_execute", self._after_cell)
        if self._withdrawn:
            return
        thread = threading.Thread(
            target=self._context.run, args=(self._make_calls,), name="gpu-after-cell", daemon=True
        )
        loop = _running_loop()
        if loop is None:
            thread.start()
        else:
            loop.call_soon(
                thread.start
            )  # not now, because the kernel is busy until its loop continues, and the broker would refuse

    def _make_calls(self) -> None:
        try:
            self._settings.revive()
            with self._settings.connect() as client:
                client.because_of(f"`{self._command}`")
                for call in self._calls:
                    with self._lock:
                        if self._withdrawn:
                            return
                        self._client = client
                    sentence = call(client)
        except FractionalGPUError as error:
            sentence = f"{self._failed}{explain(error)}"
        with self._lock:
            self._is_over = True
            if self._withdrawn:
                return
        self._line.show(sentence)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return this thread's event loop, or None in a terminal or in a thread started by a cell."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
