"""Waits for the GPU, with one ticket for all of a kernel's waiting cells, and handles the first grant after the kernel starts.

Two threads take part in a wait:

- The thread that will run the cell (`Acquirer.wait_for_gpu`) blocks on a queue of notes, never on a socket, so it can be interrupted: on
  the main thread, SIGINT puts a note into the queue. Subshell threads receive no signals, so they wait for the broker's answer.
- The ticket's thread (`gpu-acquire`) reads the broker's `acquire` stream and puts each line into every waiting cell's queue. The first
  waiting cell starts the thread, and later cells join. The last cell to leave closes the connection, which withdraws the ticket.

If a connection breaks or a call fails, the broker is restarted and the call is repeated. After `MAX_FRUITLESS` failures in a row without a
line from the broker, the request is refused. If this process can no longer make calls (`is_local`), it keeps waiting while the broker's
commands still arrive. The broker then sees a busy kernel without a ticket, files one for it, and opens the gate when its turn comes.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.display.lines import CellLine, LiveLine, Notices, wait_bundle, wait_text
from fractional_gpu_kernel.memory import ImportHooks, mapped_files
from fractional_gpu_kernel.settings import LOCAL_FAILURES, Settings, describe, explain, is_local

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient
    from fractional_gpu.protocol.errors import BrokerUnavailableError, InternalBrokerError
    from fractional_gpu.protocol.messages import Progress
    from fractional_gpu_kernel.extension import LeasedKernel

QUIET_S = 0.15
POLL_S = 0.5
MAX_FRUITLESS = 5
LONGEST_PAUSE_S = 5.0
_CALL_AGAIN_S = 1.0  # the pause of a process that cannot call the broker

# The notes in a waiter's queue, in addition to `Progress` and RefusedError:
OPENED = "opened"  # the grant or a command from the broker opened the gate
INTERRUPTED = "interrupted"
FREE = "free"  # the main loop runs again, which ends a wait of `LoopWatch`
REVIVING = "The GPU broker is not responding; restarting it."
_CANNOT_ASK = "This kernel cannot request the GPU ({why}). The broker knows that the cell is waiting, and will grant it the GPU in turn."
_UNREACHABLE = (
    "This kernel can no longer reach the GPU broker ({why}). Its GPU memory is kept. Fix the cause, or start the cell with %%cpu: it "
    "then runs at once, and its GPU calls wait until the broker has restored the memory."
)
_THREAD_ENDED = "The thread that requests the GPU ended unexpectedly; see the kernel's log. Run the cell again."


class RefusedError(Exception):
    """Raised if the GPU is refused. The message says why and what to do."""


Waiter = SimpleQueue["str | RefusedError | Progress"]


class _Ticket:
    """A ticket, shared by its thread and the waiting cells. The cells close `client` to withdraw the ticket."""

    def __init__(self) -> None:
        self.withdrawn = threading.Event()
        self.client: BrokerClient | None = None
        self.last: Progress | None = None  # the broker's last line on this connection
        self.breaks = 0  # how many connections broke
        self.fruitless = 0  # how many connections in a row broke without a line

    def withdraw(self) -> None:
        # Set the flag before closing the connection. A thread that is just opening a connection sees the flag at the first line.
        self.withdrawn.set()
        if self.client is not None:
            self.client.close()


class Acquirer:
    """Holds a kernel's ticket while cells wait. `is_reachable` returns whether the broker's commands reach this process."""

    _watch = False

    def __init__(self, settings: Settings, gate: Gate, is_reachable: Callable[[], bool] = bool) -> None:
        self._settings = settings
        self._gate = gate
        self._is_reachable = is_reachable
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self._ticket: _Ticket | None = None

    def wait_for_gpu(self, line: LiveLine | None, mark: object | None = None) -> None:
        """Wait until the gate is open, and register the cell `mark` as running in the same step. If `line` is None, show nothing.

        Raises RefusedError or KeyboardInterrupt. After an interrupt, the caller must remove `mark`, because it may already be registered.
        """
        waiter: Waiter = SimpleQueue()
        on_open = partial(waiter.put, OPENED)
        entered = False
        with interrupts_to(waiter):
            while not entered:  # repeat this if a preemption shut the gate before this thread entered
                opened = overlaps = False
                # Do this before the ticket is filed. From now on the gate answers "busy" to a close, and no opening is missed.
                self._gate.start_waiting(on_open)
                try:
                    self.join(waiter)
                    overlaps = _follow(waiter, line, self._gate, may_overlap=mark is not None)
                    opened = True
                finally:
                    self.leave(waiter, keep=overlaps)
                    entered = self._gate.stop_waiting(on_open, mark if opened else None, overlap=overlaps)
                    entered = entered or mark is None

    def hold(self, waiter: Waiter) -> None:
        """Hold a ticket until the gate opens, the GPU is refused, or another thread puts the note FREE into `waiter`."""
        on_open = partial(waiter.put, OPENED)
        self._gate.start_waiting(on_open)
        try:
            self.join(waiter)
            while not isinstance(waiter.get(), str | RefusedError):
                pass
        finally:
            self.leave(waiter)
            self._gate.stop_waiting(on_open, None)

    def join(self, waiter: Waiter) -> None:
        """Start sending notes to `waiter`, beginning with the last `Progress`. Never blocks."""
        with self._lock:
            self._waiters.append(waiter)
            if self._ticket is not None:
                if self._ticket.last is not None:
                    waiter.put(self._ticket.last)
                return
            self._ticket = ticket = _Ticket()
        threading.Thread(target=self._run, args=(ticket,), name="gpu-acquire", daemon=True).start()

    def leave(self, waiter: Waiter, *, keep: bool = False) -> None:
        """Stop sending notes to `waiter`. When the last waiter leaves, the ticket is withdrawn unless `keep` is set. Never blocks."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if self._waiters or self._ticket is None or keep:
                return
            ticket, self._ticket = self._ticket, None
        ticket.withdraw()

    def become_inert(self) -> None:
        """Reset the state in a forked child without touching the parent's connections."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._waiters = []
        self._ticket = None

    def _run(self, ticket: _Ticket) -> None:
        refusal: RefusedError | None = RefusedError(_THREAD_ENDED)  # in case an unexpected error ends the thread
        silence: Any = None
        try:
            with contextlib.suppress(*LOCAL_FAILURES):  # a process that cannot start the watch cannot make calls either
                from fractional_gpu.client.client import SilenceWatch  # noqa: PLC0415 - off the kernel's start

                silence = SilenceWatch(self._settings.connect, partial(self._report_silence, ticket))
                silence.start()
            refusal = self._acquire(ticket)
        finally:
            if silence is not None:
                silence.stop()
            with self._lock:
                waiters = []
                if self._ticket is ticket:
                    self._ticket, waiters, self._waiters = None, self._waiters, []
            if refusal is not None and (self._watch or not self._gate.is_open):
                for waiter in waiters:
                    waiter.put(refusal)

    def _acquire(self, ticket: _Ticket) -> RefusedError | None:
        """Call `acquire` until the broker answers. Return the refusal, or None after a grant or if the ticket was withdrawn."""
        # The line for the wait needs `units`. Import it now, because later the process may have no descriptor left for an import.
        from fractional_gpu.core import units  # noqa: F401, PLC0415 - off the kernel's start
        from fractional_gpu.protocol.errors import (  # noqa: PLC0415 - as above
            BrokerUnavailableError,
            FractionalGPUError,
            InternalBrokerError,
            TooManyRequestsError,
        )

        while not ticket.withdrawn.is_set():
            try:
                return self._call(ticket)
            except FractionalGPUError as error:
                failure: Exception = error
            except LOCAL_FAILURES as error:
                failure = error
            if is_local(failure):
                why = describe(failure)
                if not self._is_reachable():
                    return RefusedError(_UNREACHABLE.format(why=why))
                self._notify(ticket, _waiting("cannot-ask", _CANNOT_ASK.format(why=why)))
                ticket.withdrawn.wait(_CALL_AGAIN_S)  # in the meantime the broker may open the gate
            elif isinstance(failure, TooManyRequestsError):  # this concerns all programs of the user, not the lease
                self._notify(ticket, _waiting("broker-silent", str(failure)))
                ticket.withdrawn.wait(failure.retry_s)
            elif not isinstance(failure, BrokerUnavailableError | InternalBrokerError):
                return RefusedError(explain(failure))
            elif (refusal := self._revive(ticket, failure)) is not None:
                return refusal
        return None

    def _call(self, ticket: _Ticket) -> RefusedError | None:
        """Call `acquire`. Repeat the call if the broker only ended it because it had lasted too long."""
        from fractional_gpu.protocol.messages import AcquireRequest, ProgressKind  # noqa: PLC0415 - off the kernel's start

        client = ticket.client = self._settings.connect()
        try:
            while True:
                for progress in client.acquire(self._settings.lease_id, AcquireRequest(watch=self._watch)):
                    if ticket.withdrawn.is_set():
                        return None
                    if progress.kind == ProgressKind.GRANTED and self._watch:
                        return RefusedError("the cell still has the GPU, or has it back")
                    if progress.kind == ProgressKind.GRANTED:
                        # A grant after a withdrawal is late. If the gate was shut in the meantime, it must stay shut.
                        self._gate.open(progress.environment, lambda: not ticket.withdrawn.is_set())
                        return None
                    if progress.kind == ProgressKind.REFUSED:
                        if progress.reason == "timeout":
                            break
                        why = f"The GPU broker refused the request ({progress.reason or 'no reason given'})."
                        return RefusedError(progress.sentence or why)
                    if progress.overlap:
                        self._gate.bind(progress.environment)
                    ticket.last = progress
                    self._notify(ticket, progress)
        finally:
            client.close()

    def _revive(self, ticket: _Ticket, failure: "BrokerUnavailableError | InternalBrokerError") -> RefusedError | None:
        """Start the broker after a broken connection or failed call, or refuse after too many in a row. Return the refusal, if any."""
        from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError, TooManyRequestsError  # noqa: PLC0415 - off the kernel's start

        ticket.breaks += 1
        ticket.fruitless = 0 if ticket.last is not None else ticket.fruitless + 1
        if ticket.withdrawn.is_set():
            return None
        if ticket.fruitless >= MAX_FRUITLESS:
            return RefusedError(str(failure))
        is_gone = isinstance(failure, BrokerUnavailableError)
        news = _waiting("broker-starting", REVIVING) if is_gone else _waiting("broker-silent", str(failure))
        self._notify(ticket, news)
        try:
            self._settings.revive()
        except TooManyRequestsError:
            ticket.fruitless = 0  # a broker is running, and the next call waits for it
        except FractionalGPUError as error:
            if error.reason != "timeout":
                return RefusedError(str(error))
            ticket.fruitless = 0  # a broker is running but does not answer, so the cell keeps waiting
        if ticket.breaks > 1:  # a broker that fails at each call is called less often
            ticket.withdrawn.wait(min(0.1 * 2**ticket.breaks, LONGEST_PAUSE_S))
        ticket.last = None
        return None

    def _report_silence(self, ticket: _Ticket, error: "BrokerUnavailableError | None") -> None:
        if error is not None:
            self._notify(ticket, _waiting("broker-silent", str(error)))
        elif ticket.last is not None:
            self._notify(ticket, ticket.last)

    def _notify(self, ticket: _Ticket, progress: "Progress") -> None:
        with self._lock:
            if self._ticket is ticket:
                for waiter in self._waiters:
                    waiter.put(progress)


class Turns(Acquirer):
    """Shows, on a line below a preempted cell, how its wait is going. The broker has already filed a ticket for the cell."""

    _watch = True

    def __init__(self, settings: Settings, gate: Gate, notices: Notices) -> None:
        super().__init__(settings, gate)
        self._notices = notices

    def show(self) -> None:
        if self._waiters or not (self._gate.is_running and self._gate.is_shut_again):
            return
        if (line := self._notices.line_in_cell()) is not None:
            threading.Thread(target=self._show, args=(line,), name="gpu-turn", daemon=True).start()

    def _show(self, line: CellLine) -> None:
        waiter: Waiter = SimpleQueue()
        try:
            self.join(waiter)
            with contextlib.suppress(RefusedError, *LOCAL_FAILURES):
                _follow(waiter, line, self._gate, may_overlap=False)
        finally:
            self.leave(waiter)
            line.close()


# A task or timer in a notebook can outlive its cell. If it uses the GPU while the kernel is suspended, its call blocks in the driver and
# blocks the main loop, too. The kernel then looks idle, no cell reaches the gate, and interrupts have no effect. So at each keep-alive from
# the broker (every `PULSE_S` seconds while suspended) the watch gives a callback to the main loop. If the callback has not run by the next
# keep-alive and no cell occupies the loop, the watch requests the GPU. A task that computes for that long looks the same, and causes an
# unnecessary resume.

BLOCKED = (
    "A task of this notebook is blocking the kernel, perhaps in a GPU call while the kernel is not on the GPU. The kernel is now "
    "requesting the GPU; cells can run once the task lets them."
)


class LoopWatch:
    def __init__(self, kernel: "LeasedKernel") -> None:
        self._kernel = kernel
        self._notes: Waiter | None = None  # the callback on the main loop puts FREE here

    def look(self) -> None:
        """Request the GPU if the main loop is blocked while the gate is shut.

        Never blocks. Raises RuntimeError if no thread starts.
        """
        notes, self._notes = self._notes, None
        if not self._kernel.gate.is_shut_again or self._kernel.is_held():
            return
        if notes is None or not notes.empty():
            notes = SimpleQueue()
            if self._kernel.on_main_loop(partial(notes.put, FREE)):
                self._notes = notes
            return
        threading.Thread(target=self._kernel.acquirer.hold, args=(notes,), name="gpu-loop", daemon=True).start()
        self._kernel.notices.add(BLOCKED)


def _follow(waiter: Waiter, line: LiveLine | CellLine | None, gate: Gate, *, may_overlap: bool) -> bool:
    """Show the broker's messages about the wait. Return False once the gate opens, or True if the cell may run before it opens.

    Raises RefusedError or KeyboardInterrupt.
    """
    begun_s = time.monotonic()
    last: Progress | None = None
    last_s = begun_s
    preempted = isinstance(line, CellLine)
    while not preempted or (gate.is_running and gate.is_shut_again):
        now_s = time.monotonic()
        quiet_s = begun_s + QUIET_S - now_s
        if line is not None and last is not None and quiet_s <= 0:
            waited_s, age_s = now_s - begun_s, now_s - last_s
            text = wait_text(last, waited_s=waited_s, age_s=age_s, preempted=preempted)
            line.show(text, wait_bundle(last, waited_s=waited_s, age_s=age_s))
        # Wake up regularly, because the line counts down, and a signal that is delivered to another thread does not wake this thread.
        patience_s = min(quiet_s, POLL_S) if last is not None and quiet_s > 0 else POLL_S
        try:
            note = waiter.get(timeout=patience_s)
        except Empty:
            continue
        if note == OPENED:
            return False
        if note == INTERRUPTED:
            raise KeyboardInterrupt
        if isinstance(note, RefusedError):
            raise RefusedError(str(note))  # a new exception, because other threads get the same note
        if not isinstance(note, str):
            if note.overlap and may_overlap:
                return True
            last, last_s = note, time.monotonic()
    return False


@contextlib.contextmanager
def interrupts_to(waiter: "SimpleQueue[Any]") -> Iterator[None]:
    """Make SIGINT put INTERRUPTED into the queue during the block. If a SIGINT arrives, raise KeyboardInterrupt after the block.

    This only has an effect in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def put_note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        waiter.put(INTERRUPTED)

    previous = signal.signal(signal.SIGINT, put_note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
    if interrupted:
        raise KeyboardInterrupt


def _waiting(reason: str, sentence: str) -> "Progress":
    from fractional_gpu.protocol.messages import Progress, ProgressKind  # noqa: PLC0415 - off the kernel's start

    return Progress(kind=ProgressKind.WAITING, reason=reason, sentence=sentence)


# Before its first grant a kernel sees no device (`CUDA_VISIBLE_DEVICES` is empty). A `%%cpu` cell or start-up code that looks for a GPU
# finds none. The driver keeps this answer after `cuInit`, and torch keeps it after counting the devices once. Therefore:
#
# - torch's two calls to the driver (`torch._C._cuda_getDeviceCount` and `_cuda_init`) are replaced until the grant, and answer "no device".
# - Before the first cell with the GPU, we check whether other code has started the driver, and report that. `cuDeviceGetCount` does not
#   start CUDA. `cuInit` would start it, so we call it only after a framework has searched for a GPU; it then repeats its first answer.

Function = Callable[[], Any]

VISIBLE = "CUDA_VISIBLE_DEVICES"
SIMULATED = "JUPYTER_GPU_SIMULATED_DEVICE"
NO_DEVICE_KEPT = (
    "Restart the kernel to use the GPU: a %%cpu cell or start-up code started CUDA before the kernel had a GPU, and the driver "
    "reports “no device” until the process ends. A restart loses the variables: first save what you need, in %%cpu cells."
)
_NOT_YET = (
    "CUDA cannot be used yet: this code runs before the kernel has its GPU (in a %%cpu cell, or at start-up). "
    "Run it in an ordinary cell."
)
_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED, _NO_DEVICE = 3, 100  # CUDA_ERROR_...


class FirstGrant:
    """Keeps torch from looking for devices before the first grant. Call `bind` under the gate's lock, and `check` on a cell's thread."""

    def __init__(self, hooks: ImportHooks, environment: Mapping[str, str] = os.environ) -> None:
        self._hooks = hooks
        self._held: list[tuple[Any, str, Function, Function]] = []  # module, name, stand-in, original
        self.is_awaited = environment.get(VISIBLE) == ""  # the process is not yet bound to a device
        self.is_due = False  # the process is bound, but `check` has not been called

    def install(self) -> None:
        if self.is_awaited:
            self._hooks.after("torch", self._hold)

    def bind(self, environment: Mapping[str, str]) -> None:
        """Let torch reach the driver once the environment variables name a device. This is fast and can be called repeatedly."""
        if self.is_awaited and (environment.get(VISIBLE) or environment.get(SIMULATED)):
            self.is_due = True
            self.release()

    def release(self) -> None:
        self.is_awaited = False
        for core, name, stand_in, original in self._held:
            if getattr(core, name, None) is stand_in:
                setattr(core, name, original)
        self._held = []

    def check(self) -> str:
        """Return a message for the user if this process will never find a device. Return "" otherwise."""
        self.is_due = False
        return NO_DEVICE_KEPT if _answer() == _NO_DEVICE else ""

    def _hold(self, torch: ModuleType) -> None:
        core = getattr(torch, "_C", None)
        if not hasattr(core, "_cuda_getDeviceCount"):
            return  # this torch has no CUDA support
        for name, answer in (("_cuda_getDeviceCount", int), ("_cuda_init", _not_yet)):
            original: Function | None = getattr(core, name, None)
            if self.is_awaited and original is not None:
                # The grant may come while torch is being imported.
                def stand_in(answer: Function = answer, original: Function = original) -> Any:  # noqa: ANN401 - as in torch
                    return answer() if self.is_awaited else original()

                self._held.append((core, name, stand_in, original))
                setattr(core, name, stand_in)


def _not_yet() -> None:
    raise RuntimeError(_NOT_YET)


def _answer() -> int:
    """Ask CUDA how many devices there are. Return the error code, which is 0 on success and if no driver is loaded."""
    if not any(name.startswith("libcuda.so.") for name in mapped_files()):
        return 0
    import ctypes  # noqa: PLC0415 - off the kernel's start

    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return 0  # this is another library with a similar name
    answer = int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
    return int(driver.cuInit(0)) if answer == _NOT_INITIALIZED and _has_searched() else answer


def _has_searched() -> bool:
    numba = getattr(sys.modules.get("numba.cuda.cudadrv.driver"), "driver", None)
    jax = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None)
    tensorflow = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    return (
        getattr(numba, "initialization_error", None) is not None
        or bool(jax and "cuda" not in jax)
        or getattr(tensorflow, "_physical_devices", None) is not None
    )
