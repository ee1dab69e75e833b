"""Changes of the size of this kernel's lease: `%gpu resize`, and the burst of one cell (`%%gpu`).

Rules:

- A larger share is requested before the cell passes the gate, so that a cell that waits for room holds nothing that others need;
  frameworks are limited to the larger share once the broker has reserved it. A smaller one goes the other way round: first the frameworks
  are limited to it and give their caches back, then the broker may give the room away.
- Bursts may be nested, and may overlap in subshells: the lease has the largest requested share, and goes back to what it was before the
  first burst when the last one has ended.
- What cannot be given back (more is still in use, or no broker answers) is reported, and tried again at the end of each later cell.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.messages import LeaseStatus, ResizeRequest
from fractional_gpu_kernel.cells.acquire import RefusedError
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.display.lines import LiveLine, Sentence, publish, resizing
from fractional_gpu_kernel.magics.arguments import (
    ArgumentsError,
    HelpRequested,
    parse_burst,
    size,
)
from fractional_gpu_kernel.magics.broker_call import call_broker
from fractional_gpu_kernel.memory.limits import MEMORY, MemoryLimits
from fractional_gpu_kernel.memory.shrink import free_caches
from fractional_gpu_kernel.settings import Settings, explain

__all__ = ["CellBursts", "Resizer", "Size"]

_WAIT_MS = 3_600_000  # for room; an interrupt ends it at any moment
_GIVE_BACK_S = 10.0


class Size(NamedTuple):
    """A share: milli-GPU, and MiB (None: what the fraction stands for)."""

    milli: int
    memory_mib: int | None


class Resizer:
    """The size of one kernel's lease. For the threads that run cells."""

    def __init__(self, settings: Settings, gate: Gate, limits: MemoryLimits) -> None:
        self._settings = settings
        self._gate = gate
        self._limits = limits
        self._lock = threading.Lock()
        self._bursts: dict[object, Size] = {}
        self._own: Size | None = None  # what the lease is without bursts; None: no burst has changed it

    @property
    def is_owed(self) -> bool:
        """Whether a burst has ended and its share is not given back."""
        return self._own is not None and not self._bursts

    def change(
        self, milli: int | None, memory_mib: int | None, line: LiveLine | None, wait_ms: int = _WAIT_MS
    ) -> LeaseStatus:
        """Give the lease another size and wait until it has it. Raises FractionalGPUError, or KeyboardInterrupt: it is as it was."""
        status = self._resize(ResizeRequest(fraction_milli=milli, memory_mib=memory_mib, wait_ms=wait_ms), line)
        with self._lock:
            if self._own is not None:  # later bursts come back to this share
                self._own = Size(status.fraction_milli, status.reserve_mib)
        self._take(_limit_mib(status))
        return status

    def _take(self, memory_mib: int) -> None:
        """Hold this process to a limit."""
        self._gate.bind({MEMORY: str(memory_mib)})
        if self._limits.is_stale:
            self._limits.refresh()

    def begin(self, mark: object, wanted: Size, line: LiveLine | None) -> None:
        """Have at least `wanted` until `end` is called with the same mark. Raises FractionalGPUError or KeyboardInterrupt."""
        status = call_broker(self._settings, lambda client: client.lease(self._settings.lease_id), revive=True)
        if _holds(status, wanted):
            with self._lock:
                self._bursts[mark] = wanted
            return
        with self._lock:
            fresh = self._own is None
            self._own = self._own or Size(status.fraction_milli, status.reserve_mib)
        request = ResizeRequest(fraction_milli=wanted.milli, memory_mib=wanted.memory_mib, wait_ms=_WAIT_MS, burst=True)
        try:
            status = self._resize(request, line)
        except BrokerUnavailableError:
            raise  # it may have been granted all the same: `end` then gives the difference back
        except FractionalGPUError:
            with self._lock:
                if fresh and not self._bursts:
                    self._own = None
            raise
        with self._lock:
            self._bursts[mark] = Size(status.fraction_milli, status.reserve_mib)
        self._take(_limit_mib(status))

    def end(self, mark: object, show: Callable[[str], None]) -> None:
        """A cell has ended: give back what no other burst needs, and what is owed.

        If the mark's own burst cannot be given back, `show` gets the reason. Raises nothing of the broker's.
        """
        with self._lock:
            had_burst = self._bursts.pop(mark, None) is not None
            changed = self._own is not None
        if changed and (had_burst or self.is_owed):
            self._give_back(show if had_burst else None)

    def _give_back(self, show: Callable[[str], None] | None) -> None:
        """Go back to the largest share that is still requested; without `show`, quietly. An interrupt leaves it owed."""
        with self._lock:
            own = self._own
            if own is None:
                return
            target = max([own, *self._bursts.values()], key=lambda size: (size.milli, size.memory_mib or 0))
        if target.memory_mib is not None and target.memory_mib < (self._limits.cap_mib or 0):
            self._take(target.memory_mib)
        free_caches()
        burst = target != own  # another burst goes on: the broker must know that this share ends with this process
        request = ResizeRequest(fraction_milli=target.milli, memory_mib=target.memory_mib, wait_ms=0, burst=burst)
        failure = self._try(request)
        if not failure:
            with self._lock:
                if not self._bursts:
                    self._own = None
        elif show is not None:
            show(
                f"The larger share of this cell is not given back yet: {failure.rstrip('.')}. It is tried again at the end of each cell; "
                f"this kernel's own share is {format_fraction(target.milli)} GPU{_memory(target)}."
            )

    def _try(self, request: ResizeRequest) -> str:
        """Resize without waiting; returns "" or why not."""
        try:
            self._take(_limit_mib(self._resize(request, None, timeout_s=_GIVE_BACK_S, revive=False)))
        except BrokerUnavailableError as error:
            return str(error)
        except FractionalGPUError as error:
            return str(error)
        except KeyboardInterrupt:
            return "it was interrupted"
        return ""

    def _resize(
        self, request: ResizeRequest, line: LiveLine | None, *, timeout_s: float = 30.0, revive: bool = True
    ) -> LeaseStatus:
        lease_id = self._settings.lease_id
        return call_broker(
            self._settings,
            lambda client: client.resize(lease_id, request),
            timeout_s=timeout_s,
            revive=revive,
            line=line,
            describe=resizing,
        )


def _limit_mib(status: LeaseStatus) -> int:
    """Return what the kernel may use now: what is reserved for it, which a pool may let follow its use, else its cap."""
    return status.reserved_mib or status.reserve_mib


def _holds(status: LeaseStatus, wanted: Size) -> bool:
    """Whether the lease is at least as large as what is wanted."""
    memory_mib = wanted.memory_mib if wanted.memory_mib is not None else 0
    return status.fraction_milli >= wanted.milli and status.reserve_mib >= memory_mib


def _memory(size: Size) -> str:
    return f", {format_memory(size.memory_mib)}" if size.memory_mib is not None else ""


class CellBursts:
    """The bursts of one shell's cells."""

    def __init__(self, shell: Any, resizer: Resizer) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._resizer = resizer

    def begin(self, mark: object, text: str, line: LiveLine | None) -> None:
        """Have the share that `text` asks for until `end`. Raises RefusedError or KeyboardInterrupt."""
        try:
            arguments = parse_burst(text)
            milli, memory_mib = size("%%gpu", arguments.fraction, arguments.memory)
            self._resizer.begin(mark, Size(milli or 0, memory_mib), line)
        except ArgumentsError as error:
            raise RefusedError(str(error)) from None
        except HelpRequested as text_asked:
            raise RefusedError(f"It asked for help:\n{text_asked}") from None
        except FractionalGPUError as error:
            raise RefusedError(explain(error)) from None

    def end(self, mark: object, *, silent: bool) -> None:
        """A cell has ended: give back its burst, and what earlier ones still owe."""

        def show(sentence: str) -> None:
            if not silent:
                publish(self._shell, Sentence(sentence))

        self._resizer.end(mark, show)
