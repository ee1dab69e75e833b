"""Asking the broker something from the thread that runs a cell: interruptible, and with a live line if it takes a while.

Rules:

- The call is made in a thread of its own; what the cell's thread waits for is a queue (see `waiting`), so an interrupt works at any
  moment, in asynchronous cells too. It hangs up, and for the broker a caller that hangs up has changed its mind.
- If the answer takes longer than a moment, a second connection follows what the broker says about this lease meanwhile.
- A broker that does not answer is said so within 5 s: on the live line, where there is one, else as an error.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from fractional_gpu.client.silence import SilenceWatch
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError, InternalBrokerError
from fractional_gpu.protocol.messages import LeaseStatus
from fractional_gpu_kernel.cells.acquire import INTERRUPTED
from fractional_gpu_kernel.cells.wait import LOOK_UP_S, QUIET_S, interrupts_to
from fractional_gpu_kernel.display.display import LiveLine
from fractional_gpu_kernel.settings import Settings

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient

__all__ = ["ask"]

_AGAIN_S = 0.2

T = TypeVar("T")
Describe = Callable[[LeaseStatus], str]


def ask(
    settings: Settings,
    call: Callable[["BrokerClient"], T],
    *,
    timeout_s: float = 30.0,
    revive: bool = False,
    line: LiveLine | None = None,
    describe: Describe | None = None,
) -> T:
    """Return what `call` returns. `revive`: start a broker first if none answers.

    With `line` and `describe`, an answer that takes a while is waited for with a live line.
    Raises FractionalGPUError, or KeyboardInterrupt when interrupted, which hangs up.
    """
    note: SimpleQueue[object] = SimpleQueue()
    question = _Question(settings, call, note.put, timeout_s=timeout_s, revive=revive)
    follower = _Follower(settings, note.put) if line is not None and describe is not None else None
    watch = SilenceWatch(settings.connect, note.put)
    with interrupts_to(note):
        try:
            question.start()
            _listen(note, watch, follower, line, describe)
        finally:
            watch.stop()
            question.hang_up()
            if follower is not None:
                follower.hang_up()
    return question.result()


def _listen(
    note: SimpleQueue[object],
    watch: SilenceWatch,
    follower: "_Follower | None",
    line: LiveLine | None,
    describe: Describe | None,
) -> None:
    """Show what is told until the answer is there.

    Raises KeyboardInterrupt, and BrokerUnavailableError where the broker does not answer and no line could say so.
    """
    loud_from = time.monotonic() + QUIET_S
    while True:
        try:
            news = note.get(timeout=max(0.0, min(LOOK_UP_S, loud_from - time.monotonic())) or LOOK_UP_S)
        except Empty:
            if time.monotonic() >= loud_from:
                watch.start()
                if follower is not None:
                    follower.start()
            continue
        if news == INTERRUPTED:
            raise KeyboardInterrupt
        if isinstance(news, _Question):
            return
        if isinstance(news, BrokerUnavailableError):
            if line is None:
                raise news
            line.show(
                f"{news}. It goes on by itself when the broker answers again. Interrupt the kernel to stop waiting."
            )
        if isinstance(news, LeaseStatus) and line is not None and describe is not None:
            line.show(describe(news))


class _Question(Generic[T]):
    """One call in a thread."""

    def __init__(
        self,
        settings: Settings,
        call: Callable[["BrokerClient"], T],
        tell: Callable[[object], None],
        *,
        timeout_s: float,
        revive: bool,
    ) -> None:
        self._settings = settings
        self._call = call
        self._tell = tell
        self._timeout_s = timeout_s
        self._revive = revive
        self._client: BrokerClient | None = None
        self._hung_up = False
        self._over = False
        self._values: list[T] = []
        self._error: FractionalGPUError = InternalBrokerError(
            "the thread that asks the GPU broker ended unexpectedly; the kernel's log says why"
        )

    def start(self) -> None:
        """Ask."""
        threading.Thread(target=self._run, name="gpu-ask", daemon=True).start()

    def hang_up(self) -> None:
        """Nobody waits for the answer any more."""
        self._hung_up = True
        if self._client is not None and not self._over:
            self._client.close()
            # The thread may just be opening its connection, which `close` then does not find: once more in a moment.
            again = threading.Timer(_AGAIN_S, self._client.close)
            again.daemon = True
            again.start()

    def result(self) -> T:
        """Return the answer. Raises FractionalGPUError."""
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
            self._over = True
            self._tell(self)


class _Follower:
    """Hears what the broker says about the lease while a question is open."""

    def __init__(self, settings: Settings, tell: Callable[[object], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._client: BrokerClient | None = None
        self._started = False
        self._hung_up = False

    def start(self) -> None:
        """Follow; a second call changes nothing."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="gpu-follow", daemon=True).start()

    def hang_up(self) -> None:
        """Stop following."""
        self._hung_up = True
        if self._client is not None:
            self._client.close()

    def _run(self) -> None:
        with suppress(FractionalGPUError):  # it only tells more: the question itself will have an answer
            self._client = client = self._settings.connect()
            for host in client.events():
                if self._hung_up:
                    client.close()
                    return
                for lease in host.leases:
                    if lease.lease_id == self._settings.lease_id:
                        self._tell(lease)
