"""Keeps a running command's lease: says that the command needs the GPU, prints what the broker tells it, and outlives brokers.

Two threads beside the main one, which waits for the command:

- one follows the lease (its state, and notices for the user);
- one looks for signs (`signs`), and while a connection is open, or after another sign, has a third one wait for the GPU.

A broker that ended is started again only when the command needs the GPU, as a kernel does: on the GPU a command needs no broker. None of
the threads ends the command. All are daemons, and `close` does not wait for a broker that does not answer.
"""

import sys
import threading
import time
from collections.abc import Collection
from contextlib import closing, suppress
from typing import Final

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.commands.run.signs import LOOK_S, CpuWatch, Ports, cpu_us
from fractional_gpu.commands.terminal.output import say as write
from fractional_gpu.commands.terminal.progress import WaitLine
from fractional_gpu.jupyter.kernel_lease import KernelLease
from fractional_gpu.protocol.errors import (
    BrokerUnavailableError,
    FractionalGPUError,
    InternalBrokerError,
    TooManyRequestsError,
)
from fractional_gpu.protocol.messages import AcquireRequest, Progress, ProgressKind

PORT_LOOK_S: Final = 0.1  # while it is suspended
_RESIDENT_PORT_LOOK_S: Final = 0.5
_LINGER_S: Final = 1.0  # the lease stays in use for so long after the last connection: a browser opens several in a row
_RESIDENT_LOOK_S: Final = 1.0
_RETRY_S: Final = 1.0
_RESIDENT: Final = "resident"
_SUSPENDED: Final = "suspended"
_GONE: Final = "unattached"
_NOTICE_S: Final = 1.0  # for the broker to say why the command was killed
_PASSING: Final = (BrokerUnavailableError, InternalBrokerError, TooManyRequestsError)
"""Errors that say nothing about the lease: the broker cannot answer now."""


def say(sentence: str) -> None:
    """Print a line of ours among what the command prints on standard error."""
    with suppress(OSError):  # closed, or a terminal that is gone
        write(f"jupyter gpu run: {sentence}", sys.stderr, flush=True)


class _Want:
    """One wish for the GPU: a thread that waits for it and, with `hold`, keeps the lease in use until `end`."""

    def __init__(self, lease: KernelLease, *, hold: bool) -> None:
        self._lease = lease
        self._hold = hold
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._client: BrokerClient | None = None
        self._refused = ""
        self._line = WaitLine(lambda text: say(f"the command waits for the GPU: {text}"))
        threading.Thread(target=self._run, name="gpu-want", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it was ended, or has the GPU and does not hold it."""
        return self._over.is_set()

    def end(self) -> None:
        """Give the place in the queue up, or the lease free. May be called again."""
        with self._lock:
            self._over.set()
            if self._client is not None:
                self._client.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._wait()
            except BrokerUnavailableError:
                pass  # it ended, or hangs; or `end` has hung up
            except FractionalGPUError as error:
                self._refuse(str(error))
            self._line.stop()
            self._over.wait(_RETRY_S)

    def _wait(self) -> None:
        """Return when the GPU was had or refused; with `hold`, when the lease is in use no more. Raises FractionalGPUError."""
        with ensure_broker(self._lease.socket, token=self._lease.token) as client:
            with self._lock:
                self._client = client
                if self._over.is_set():
                    return
            stream = client.hold if self._hold else client.acquire
            with closing(stream(self._lease.lease_id, AcquireRequest())) as lines:
                for progress in lines:
                    self._take(progress)
                    if self._over.is_set():  # `end` may have come before the stream
                        return

    def _take(self, progress: Progress) -> None:
        if progress.kind == ProgressKind.WAITING:
            self._line.update(progress)
            return
        self._line.stop()
        if progress.kind == ProgressKind.REFUSED:
            self._refuse(progress.sentence)
        elif not self._hold:
            self._over.set()

    def _refuse(self, sentence: str) -> None:
        if sentence != self._refused and not self._over.is_set():
            self._refused = sentence
            say(f"the command does not get the GPU: {sentence}")


class Holder:
    """Has the GPU for a command when it needs it. For any thread."""

    def __init__(self, lease: KernelLease) -> None:
        self._lease = lease
        self._lock = threading.Lock()
        self._want: _Want | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether it waits, or keeps the lease in use."""
        return self._want is not None and not self._want.is_over

    def begin(self, *, hold: bool) -> None:
        """Have the GPU for the command; with `hold`, keep the lease in use until `end`. Returns at once; does nothing while it waits."""
        with self._lock:
            if not self.is_wanted:
                self._want = _Want(self._lease, hold=hold)

    def end(self) -> None:
        """Give the place in the queue up, or the lease free. May be called again."""
        with self._lock:
            if self._want is not None:
                self._want.end()
                self._want = None


class Supervisor:
    """Follows one lease and looks for signs of one command until `close`."""

    def __init__(self, lease: KernelLease, pid: int, ports: Collection[int]) -> None:
        self._lease = lease
        self._pid = pid
        self._ports = Ports(pid, ports) if ports else None
        self._holder = Holder(lease)
        self._cpu = CpuWatch()
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._state, self._worked = "", False
        self._is_ending = False
        self._client: BrokerClient | None = None

    def start(self) -> None:
        """Start the threads."""
        looks = self._look_at_ports if self._ports is not None else self._look_at_cpu
        for target in (self._follow, looks):
            threading.Thread(target=target, name=f"gpu-{target.__name__.strip('_')}", daemon=True).start()

    def wake(self, *, ending: bool = False) -> None:
        """Bring a suspended command back, for a signal that it could not handle where it waits. For any thread; returns at once.

        `ending`: the signal asks it to end. A server then keeps its place, as nothing would bring it back for what it does at its end.
        """
        if ending and self._ports is not None:
            self._is_ending = True
            self._holder.end()
            self._holder.begin(hold=True)
        elif self._state != _RESIDENT:
            self._cpu.woken()
            self._holder.begin(hold=False)

    def close(self, *, was_killed: bool) -> None:
        """Stop. `was_killed`: give the broker a moment to say why."""
        if was_killed:
            with self._changed:
                self._changed.wait_for(lambda: self._state == _GONE, _NOTICE_S)
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        self._holder.end()
        if self._client is not None:
            self._client.close()

    # -- following ----------------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                with BrokerClient(self._lease.socket, token=self._lease.token) as self._client:
                    for news in self._client.follow(self._lease.lease_id):
                        if news.notice:
                            say(news.notice)
                        else:
                            self._note(news.state, worked=news.worked)
            except _PASSING:
                pass  # another broker may be started, by this command's next sign or by anything else
            except FractionalGPUError as error:
                if not self._over.is_set():
                    say(f"the command goes on without a GPU lease: {error}")
                return
            else:
                self._note(_GONE, worked=False)
                return
            self._over.wait(_RETRY_S)

    def _note(self, state: str, *, worked: bool) -> None:
        with self._changed:
            self._state, self._worked = state, worked
            self._changed.notify_all()

    # -- signs --------------------------------------------------------------------------------------------------------------------

    def _look_at_ports(self) -> None:
        last_s: float | None = None
        while self._ports is not None and not self._over.is_set():
            state, now_s = self._state, time.monotonic()
            if self._ports.open(now_s):
                last_s = now_s
                self._holder.begin(hold=True)
            elif last_s is not None and now_s - last_s >= _LINGER_S and not self._is_ending:
                last_s = None
                self._holder.end()
            self._wait_for_other(state, _RESIDENT_PORT_LOOK_S if state == _RESIDENT else PORT_LOOK_S)

    def _look_at_cpu(self) -> None:
        before = ""
        while not self._over.is_set():
            state, used_us, now_s = self._state, cpu_us(self._pid), time.monotonic()
            if state == _SUSPENDED:
                if before != _SUSPENDED:
                    self._cpu.suspended(used_us, now_s, worked=self._worked)
                elif not self._holder.is_wanted and self._cpu.look(used_us, now_s):
                    self._holder.begin(hold=False)
            elif _RESIDENT in (state, before):
                self._cpu.resident(used_us)
            before = state
            self._wait_for_other(state, LOOK_S if state == _SUSPENDED else _RESIDENT_LOOK_S)

    def _wait_for_other(self, state: str, longest_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._state != state or self._over.is_set(), longest_s)
