"""The demonstration's course and results: it watches the broker, and shows a table for people and JSON for programs."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.terminal.layout import Style, fitted, line, table
from fractional_gpu.commands.terminal.words import describe_device
from fractional_gpu.core.units import format_fraction, format_gpus, format_memory, plural
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.names import state_words
from fractional_gpu.protocol.status import LeaseStatus

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoDevice:
    """The GPU that was shared. Memory in MiB."""

    name: str
    simulated: bool
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoKernel:
    """The result of one kernel. `state` is the lease's at the end; `moved_s` seconds its memory was on the move."""

    name: str
    kernelspec: str
    fraction_milli: int
    state: str
    suspends: int
    resumes: int
    moved_s: float
    compared_bytes: int
    state_intact: bool


def find_problems(kernels: Sequence[DemoKernel]) -> list[str]:
    """Return a sentence for each broken promise; an empty list is a success."""
    wrong = [f"{kernel.name} lost state" for kernel in kernels if not kernel.state_intact]
    still = [kernel for kernel in kernels if not kernel.suspends or not kernel.resumes]
    return wrong + [
        f"{kernel.name} was suspended {kernel.suspends} and resumed {plural(kernel.resumes, 'time')}: nothing was shown"
        for kernel in still
    ]


def report_as_json(device: DemoDevice, kernels: Sequence[DemoKernel]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "device": {"name": device.name, "simulated": device.simulated, "memory_mib": device.memory_mib},
        "kernels": [
            {
                "kernelspec": kernel.kernelspec,
                "fraction_milli": kernel.fraction_milli,
                "suspends": kernel.suspends,
                "resumes": kernel.resumes,
                "state_intact": kernel.state_intact,
            }
            for kernel in kernels
        ],
        "ok": not find_problems(kernels),
    }


def render_report(device: DemoDevice, kernels: Sequence[DemoKernel], width: int | None = None) -> "list[Text]":
    """Return the table and the conclusion. `width`: of the terminal, in characters."""
    header = ("KERNEL", "GPU", "STATE", "SUSPENDED", "RESUMED", "MOVING", "COMPARED", "INTACT")
    rows = [
        (
            kernel.name,
            format_fraction(kernel.fraction_milli),
            state_words(kernel.state),
            plural(kernel.suspends, "time"),
            plural(kernel.resumes, "time"),
            f"{kernel.moved_s:.1f} s",
            format_memory(kernel.compared_bytes // 2**20),
            "yes" if kernel.state_intact else ("NO", Style.WRONG),
        )
        for kernel in kernels
    ]
    wrong = find_problems(kernels)
    asked = sum(kernel.fraction_milli for kernel in kernels)
    good = f"Together they asked for {format_gpus(asked)}, and every byte is where it was."
    conclusion = line(("Something is wrong", Style.WRONG), f": {'; '.join(wrong)}.") if wrong else line(good)
    return [
        line(describe_device(device.name, device.memory_mib, simulated=device.simulated)),
        *table(header, rows, width=width),
        *fitted([conclusion], width),
    ]


# -- monitor -----------------------------------------------------------------------------------------------------------
# Follows leases while the demonstration runs: prints each change of state, and adds up how long their memory was on the move.
#
# `LeaseTracker` is pure: statuses of leases in, sentences out. `LeaseMonitor` feeds it from the broker in a thread of its own. A status
# says for how long a lease has been in its state, so the begin of each state is exact although the broker is polled.


INTERVAL_S = 0.05
_MOVING = frozenset({"suspending", "resuming"})


@dataclass(slots=True)
class _Seen:
    state: str
    entered_s: float
    moved_s: float = 0.0


class LeaseTracker:
    """Follows leases through their states. `names` maps kernel ids to names for people; other leases are ignored."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._seen: dict[str, _Seen] = {}

    def feed(self, now_s: float, leases: Sequence[LeaseStatus]) -> list[str]:
        """Take the leases at `now_s` (of any monotonic clock) and return a sentence for each change, oldest first."""
        changes: list[tuple[float, str]] = []
        for lease in leases:
            if lease.kernel_id not in self.names:
                continue
            entered_s = now_s - lease.age_ms / 1000
            seen = self._seen.get(lease.kernel_id)
            if seen is None:
                self._seen[lease.kernel_id] = _Seen(lease.state, entered_s)
            elif seen.state != lease.state:
                if seen.state in _MOVING:
                    seen.moved_s += max(0.0, entered_s - seen.entered_s)
                seen.state, seen.entered_s = lease.state, entered_s
                changes.append((entered_s, f"{self.names[lease.kernel_id]}: {_news(lease)}"))
        return [sentence for _, sentence in sorted(changes)]

    def moved_s(self, kernel_id: str) -> float:
        """Return how long the kernel's memory was on the move, seconds, as far as it was seen; a move that is under way does not count."""
        seen = self._seen.get(kernel_id)
        return seen.moved_s if seen is not None else 0.0


def _news(lease: LeaseStatus) -> str:
    """Return what just happened to a lease."""
    if lease.state == "suspended":
        return f"suspended, {format_memory(lease.lease.saved_mib)} now in host memory"
    return state_words(lease.state)


class LeaseMonitor:
    """Polls the broker in a thread until `stop`, or the end of the `with` block. `tell` gets each sentence, in that thread."""

    def __init__(self, socket: str, tracker: LeaseTracker, tell: Callable[[str], None]) -> None:
        self._socket = socket
        self._tracker = tracker
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-demo-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Tell nothing from now on. May be called twice."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        client = BrokerClient(self._socket)
        try:
            while not self._over.wait(INTERVAL_S):
                for sentence in self._tracker.feed(time.monotonic(), client.status().leases):
                    self._tell(sentence)
        except FractionalGPUError as error:
            self._tell(f"cannot watch any more: {error}")
        finally:
            client.close()
