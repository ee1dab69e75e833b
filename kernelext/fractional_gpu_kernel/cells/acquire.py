"""Asking the broker for the GPU: one ticket for a kernel, however many cells wait.

Rules:

- The first cell that waits starts a thread that asks; the others listen to the same stream; when the last one leaves, the thread's
  connection is hung up, which withdraws the ticket.
- Where a cell may overlap with the resume, it leaves the ticket behind: the stream goes on without a listener until it opens the gate.
- Listeners are told through a queue each, so a waiting main thread stays interruptible: what blocks in the socket is our thread.
- A process that cannot call the broker any more (no descriptors, another user) waits as long as the gate's line stands: the broker sees
  a busy kernel that does not ask, asks in its place, and opens the gate.
- A broker that dies meanwhile is started again and asked again. Only a broker that fails several times without a word in between, or
  that cannot be started, is an answer.
- A broker that is there and does not answer is waited for, and the listeners are told so (see `fractional_gpu.client.silence`).

What can go wrong in this process, not at the broker, when our threads speak to the broker.

A cell may do to its process what it likes: replace functions of the standard library, use up the descriptors, change the user. Our threads
keep references of their own to what they need and go on trying. What still fails is one of these errors, and is told as such: starting
the broker again, or the kernel, would not help.
"""

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.settings import Settings

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient
    from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
    from fractional_gpu.protocol.messages import Progress

__all__ = [
    "INTERRUPTED",
    "LOCAL_FAILURES",
    "OPENED",
    "Acquirer",
    "Refusal",
    "Waiter",
    "describe",
    "explain",
    "is_local",
]

MAX_FRUITLESS = 5  # attempts in a row in which the broker said nothing before it broke
LONGEST_PAUSE_S = 5.0
ASK_AGAIN = frozenset({"timeout"})  # reasons of a refusal that only says: this call has waited long enough
DEAF = (
    "This kernel cannot reach the GPU broker any more ({why}). What it has on the GPU is kept. Undo what causes this, or begin the cell "
    "with %%cpu: it then runs at once, and its calls of the GPU wait until the broker has brought its memory back."
)
SPOKEN_FOR = (
    "This kernel cannot ask for the GPU ({why}). The broker sees that the cell waits, and lets it in in its turn."
)
_CALL_AGAIN_S = 1.0  # of a process that cannot call the broker
REVIVING = "The GPU broker does not answer; it is being started again."
OPENED = "opened"
INTERRUPTED = "interrupted"


class Refusal:
    """The GPU will not come; `sentence` says why and what to do."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence


Waiter = SimpleQueue["str | Refusal | Progress"]


class _Attempt:
    """One thread's work. `client` is what `abandon` hangs up."""

    def __init__(self) -> None:
        self._abandoned = threading.Event()
        self.client: BrokerClient | None = None
        self.last: Progress | None = None  # what the broker said last; None: nothing on this connection

    def is_abandoned(self) -> bool:
        """Whether nobody waits any more."""
        return self._abandoned.is_set()

    def pause(self, seconds: float) -> None:
        """Do nothing for `seconds`, or until nobody waits any more."""
        self._abandoned.wait(seconds)

    def abandon(self) -> None:
        """Hang up."""
        # Set before the connection is closed: a thread that is just about to open one sees the flag at the broker's first line.
        self._abandoned.set()
        if self.client is not None:
            self.client.close()


class Acquirer:
    """Holds the ticket of one kernel while somebody waits."""

    def __init__(self, settings: Settings, gate: Gate, is_heard: Callable[[], bool] = bool) -> None:
        self._settings = settings
        self._gate = gate
        self._is_heard = is_heard
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self._attempt: _Attempt | None = None

    def join(self, waiter: Waiter) -> None:
        """Tell `waiter` how it goes: `Progress` while it waits, then OPENED (by the gate) or a `Refusal`. Never blocks."""
        with self._lock:
            self._waiters.append(waiter)
            if self._attempt is not None:
                if self._attempt.last is not None:
                    waiter.put(self._attempt.last)
                return
            self._attempt = attempt = _Attempt()
        threading.Thread(target=self._run, args=(attempt,), name="gpu-acquire", daemon=True).start()

    def leave(self, waiter: Waiter, *, keep: bool = False) -> None:
        """Stop telling `waiter`; the last one to leave withdraws the ticket, unless it is to `keep` it.

        Never blocks, and may be called twice.
        """
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if self._waiters or self._attempt is None or keep:
                return
            attempt, self._attempt = self._attempt, None
        attempt.abandon()

    def become_inert(self) -> None:
        """For a forked child: forget everything without touching the parent's connections."""
        self._lock = threading.Lock()
        self._waiters = []
        self._attempt = None

    def _run(self, attempt: _Attempt) -> None:
        from fractional_gpu.client.silence import SilenceWatch  # noqa: PLC0415 - off the kernel's start

        refusal = Refusal(
            "The thread that asks the GPU broker ended unexpectedly; the kernel's log says why. Run the cell again."
        )
        watch = SilenceWatch(self._settings.connect, partial(self._tell_silence, attempt))
        watch.start()
        try:
            answer = self._pursue(attempt)
            if answer is None:
                return
            refusal = answer
        finally:
            watch.stop()
            with self._lock:
                if self._attempt is attempt:
                    self._attempt = None
                    waiters, self._waiters = self._waiters, []
                else:
                    waiters = []
            if not self._gate.is_open:
                for waiter in waiters:
                    waiter.put(refusal)

    def _pursue(self, attempt: _Attempt) -> Refusal | None:
        """Ask until there is an answer. None: granted (the gate is open) or abandoned."""
        from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        breaks = fruitless = 0
        while not attempt.is_abandoned():
            attempt.last = None
            try:
                return self._ask_if_heard(attempt)
            except BrokerUnavailableError as error:
                breaks, fruitless = breaks + 1, 0 if attempt.last is not None else fruitless + 1
                if attempt.is_abandoned():
                    return None
                if fruitless >= MAX_FRUITLESS:
                    return Refusal(str(error))
            try:
                self._tell(attempt, _waiting("broker-starting", REVIVING))
                self._settings.revive()
            except FractionalGPUError as error:
                if error.reason != "timeout":  # else a broker is there: it is asked again for as long as it takes
                    return Refusal(str(error))
                fruitless = 0
            if breaks > 1:  # a broker that breaks each time it is asked is not hammered
                attempt.pause(min(0.1 * 2**breaks, LONGEST_PAUSE_S))
        return None

    def _ask_if_heard(self, attempt: _Attempt) -> Refusal | None:
        """Ask; where this process cannot, wait until it can, or until the broker opens the gate. Raises BrokerUnavailableError."""
        from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError  # noqa: PLC0415 - off the kernel's start

        while not attempt.is_abandoned():
            try:
                return self._ask(attempt)
            except FractionalGPUError as error:
                if not is_local(error):
                    if isinstance(error, BrokerUnavailableError):
                        raise
                    return Refusal(explain(error))
                why = describe(error)
            except LOCAL_FAILURES as error:
                why = describe(error)
            if not self._is_heard():
                return Refusal(DEAF.format(why=why))
            self._tell(attempt, _waiting("cannot-ask", SPOKEN_FOR.format(why=why)))
            attempt.pause(_CALL_AGAIN_S)
        return None

    def _ask(self, attempt: _Attempt) -> Refusal | None:
        """One acquire call; again when it only waited long enough. Raises FractionalGPUError."""
        from fractional_gpu.protocol.messages import AcquireRequest, ProgressKind  # noqa: PLC0415 - off the kernel's start

        client = attempt.client = self._settings.connect()
        try:
            while True:
                for progress in client.acquire(self._settings.lease_id, AcquireRequest()):
                    if attempt.is_abandoned():
                        return None
                    if progress.kind == ProgressKind.GRANTED:
                        self._gate.open(progress.environment, lambda: not attempt.is_abandoned())
                        return None
                    if progress.kind == ProgressKind.REFUSED:
                        if progress.reason in ASK_AGAIN:
                            break
                        return Refusal(
                            progress.sentence or f"The GPU broker refused ({progress.reason or 'it gave no reason'})."
                        )
                    if progress.overlap:
                        self._gate.bind(progress.environment)
                    attempt.last = progress
                    self._tell(attempt, progress)
        finally:
            client.close()

    def _tell_silence(self, attempt: _Attempt, error: "BrokerUnavailableError | None") -> None:
        """Tell that the broker does not answer, or, when it does again, what it said last."""
        if error is not None:
            self._tell(attempt, _silent(str(error)))
        elif attempt.last is not None:
            self._tell(attempt, attempt.last)

    def _tell(self, attempt: _Attempt, progress: "Progress") -> None:
        with self._lock:
            if self._attempt is attempt:
                for waiter in self._waiters:
                    waiter.put(progress)


def explain(error: "FractionalGPUError") -> str:
    """What an error of the broker means to the person at this kernel."""
    if error.reason == "unknown-lease":
        from fractional_gpu.protocol.errors import RESTART  # noqa: PLC0415 - off the kernel's start

        return f"The lease of this kernel was ended (by an administrator, or by a command): for another one {RESTART}."
    return str(error)


def _waiting(reason: str, sentence: str) -> "Progress":
    from fractional_gpu.protocol.messages import Progress, ProgressKind  # noqa: PLC0415 - off the kernel's start

    return Progress(kind=ProgressKind.WAITING, reason=reason, sentence=sentence)


def _silent(sentence: str) -> "Progress":
    from fractional_gpu.protocol.messages import Progress, ProgressKind  # noqa: PLC0415 - off the kernel's start

    return Progress(kind=ProgressKind.WAITING, reason="broker-silent", sentence=sentence)


LOCAL_FAILURES: tuple[type[Exception], ...] = (
    AttributeError,  # a module of the standard library with other functions
    ImportError,  # of what we import late: `sys.path` was changed, or its files are gone
    LookupError,
    MemoryError,
    OSError,  # no descriptors, no access
    RuntimeError,  # no threads; also what packages raise that forbid sockets
    TypeError,  # a function that was replaced by something else
    ValueError,  # a descriptor that was closed
)
_REASONS = frozenset({"no-descriptor", "no-access"})


def is_local(error: Exception) -> bool:
    """Return whether this process cannot reach the broker, whatever the broker does."""
    return getattr(error, "reason", None) in _REASONS or isinstance(error, LOCAL_FAILURES)


def describe(error: Exception) -> str:
    """Return what went wrong, for people."""
    return str(error) if hasattr(error, "reason") else f"{type(error).__name__}: {error}"
