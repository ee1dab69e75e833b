"""The gate: may cells run, and does one? State under one lock, no I/O.

Rules:

- Shut until the broker has granted the GPU once; the broker shuts and opens it after that.
- A cell that runs, or that waits for the gate, answers a `close` with "busy": the broker then knows that the GPU is in use or
  wanted, whatever order the two connections deliver their lines in. Otherwise the gate shuts and answers "closed", in one step.
- A preemption shuts the gate although a cell runs. That cell goes on (what it asks of the GPU blocks until its state is back); when
  it ends the gate stays shut, and the next cell asks.
- Where the pool lets a cell overlap with its kernel's resume, it enters a shut gate, which opens beneath it.
- A cell that waits for input keeps nobody out: it is paused, the gate may shut, and it enters anew when the input is there.
- Nor does a cell that is barred: it goes on behind a shut gate, for it cannot reach the GPU (see `barrier`), and runs again from the moment
  in which the gate opens.
- An open gate costs a cell two uncontended lock operations and no round trip.
- In a forked child the gate is inert: the lease, the connections and the threads are the parent's.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

__all__ = ["Gate", "Mark"]


class Mark:
    """One cell, and the id of the request that it belongs to."""

    __slots__ = ("request",)

    def __init__(self, request: str) -> None:
        self.request = request


def _ignore(_marks: AbstractSet[object]) -> None:
    pass


class Gate:
    """One kernel's gate. `apply` takes the variables that bind the process to its device; it is called before the gate opens."""

    def __init__(self, apply: Callable[[Mapping[str, str]], None]) -> None:
        self._apply = apply
        self._lock = threading.Lock()
        self._open = False
        self._running: set[object] = set()  # one mark a cell: leaving twice, or without having entered, does no harm
        self._paused: set[object] = set()  # of cells that wait for input
        self._barred: set[object] = set()  # of cells that cannot reach the GPU
        self._waiting: list[Callable[[], None]] = []
        self._inert = False
        self.on_bar: Callable[[AbstractSet[object]], None] = _ignore
        """Called with all barred marks when others are barred than before, with the lock held: it must only leave a note."""

    def __repr__(self) -> str:
        return f"<Gate {'open' if self._open else 'shut'}, running {len(self._running)}, waiting {len(self._waiting)}>"

    @property
    def is_open(self) -> bool:
        """Whether a cell would run at once."""
        return self._open

    @property
    def is_inert(self) -> bool:
        """Whether this process is a forked child, which has no lease of its own."""
        return self._inert

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether a cell runs."""
        return bool(self._running)

    @property
    def is_barred(self) -> bool:
        """Whether cells run behind the shut gate because they cannot reach the GPU."""
        with self._lock:
            return bool(self._barred)

    def runs_beside(self, mark: object) -> bool:
        """Whether another cell than the marked one runs: one around it, or one of another subshell."""
        return any(one is not mark for one in list(self._running))

    def enter(self, mark: object) -> bool:
        """Mark a cell as running if the gate is open, and say whether it is."""
        with self._lock:
            if self._open:
                self._running.add(mark)
            return self._open

    def leave(self, mark: object) -> None:
        """The cell is over. A mark that never entered is ignored."""
        with self._lock:
            self._running.discard(mark)
            self._paused.discard(mark)
            if self._barred:
                self._set_barred(self._barred - {mark})

    def pause(self, marks: Iterable[object]) -> None:
        """These cells wait for input. Marks that do not run are ignored."""
        with self._lock:
            paused = (self._running | self._barred).intersection(marks)
            self._running -= paused
            self._paused |= paused
            self._set_barred(self._barred - paused)

    def bar(self, may: Callable[[], bool]) -> bool:
        """Let the cells that run go on behind the gate, if it is shut and they `may`; return whether any is barred."""
        with self._lock:
            if self._open or not self._running or not may():
                return False
            barred, self._running = self._barred | self._running, set()
            self._set_barred(barred)
            return True

    def pass_barrier(self, note: Callable[[], None]) -> bool:
        """Return whether this process may use the GPU as far as barred cells are concerned; `note` it in the same step if so."""
        with self._lock:
            if not self._barred:
                note()
            return not self._barred

    def _set_barred(self, marks: set[object]) -> None:
        if marks != self._barred:
            self._barred = marks
            self.on_bar(marks)

    def try_to_go_on(self, marks: Iterable[object]) -> bool:
        """Mark paused cells as running if the gate is open, and say whether it is."""
        with self._lock:
            if self._open:
                self._go_on(marks)
            return self._open

    def go_on(self, marks: Iterable[object]) -> None:
        """Mark paused cells as running whatever the gate is. Others are ignored."""
        with self._lock:
            self._go_on(marks)

    def _go_on(self, marks: Iterable[object]) -> None:
        paused = self._paused.intersection(marks)
        self._paused -= paused
        self._running |= paused

    def start_waiting(self, on_open: Callable[[], None]) -> None:
        """Somebody waits. `on_open` is called at each opening, from any thread, with the lock held: it must only leave a note."""
        with self._lock:
            self._waiting.append(on_open)
            if self._open:
                on_open()

    def stop_waiting(self, on_open: Callable[[], None], mark: object | None, *, overlap: bool = False) -> bool:
        """The wait is over; return whether the gate is open, or `overlap` says that this does not matter.

        A mark that is given enters in the same step if so, so that no `close` comes between. A `preempt` may have come.
        """
        with self._lock:
            self._waiting.remove(on_open)
            may_enter = self._open or overlap
            if mark is not None and may_enter:
                self._running.add(mark)
            return may_enter

    def close(self) -> str:
        """Shut the gate and return "closed", or return "busy" and change nothing."""
        with self._lock:
            if self._running or self._waiting:
                return "busy"
            self._open = False
            return "closed"

    def preempt(self) -> str:
        """Shut the gate for the next cell, whatever runs or waits; return "closed"."""
        with self._lock:
            self._open = self._inert
            return "closed"

    def bind(self, environment: Mapping[str, str]) -> None:
        """Take variables of the lease that have changed while the gate stays as it is."""
        with self._lock:
            if not self._inert:
                self._apply(environment)

    def open(self, environment: Mapping[str, str], still_wanted: Callable[[], bool] | None = None) -> bool:
        """Bind the process to its device and let cells run; returns whether it did.

        `still_wanted` is asked with the lock held. A grant passes it, because it comes on another connection than the commands: one
        that is acted on late could otherwise open a gate that has been shut since.
        """
        with self._lock:
            if self._inert or (still_wanted is not None and not still_wanted()):
                return False
            self._apply(environment)
            self._open = True
            self._running |= self._barred
            self._set_barred(set())
            for on_open in self._waiting:
                on_open()
            return True

    def become_inert(self) -> None:
        """For a forked child: another thread of the parent may have held the lock, so it is replaced."""
        self._lock = threading.Lock()
        self._inert = True
        self._open = True
        self._paused = set()
        self._barred = set()
        self._waiting = []
