"""What the broker keeps in memory about each lease beside the arbiter's view: the process, its Jupyter line, its extension."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from fractional_gpu.broker.kernels.gate import GateLink
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.core.events import ResizeRequested
from fractional_gpu.host.process import ProcessIdentity, open_pidfd

__all__ = ["Kernel", "Request", "Survivor"]


@dataclass(eq=False, slots=True)
class Request:
    """A client's request to suspend or to resize a lease, from its event to its reply.

    `declined` is the arbiter's refusal (reason, sentence). It is kept here, not on the lease: another request about the same lease may
    be under way.
    """

    declined: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A process of a kernel that has ended. Memory in MiB; 0: no device counts it, or it is saved on the host."""

    identity: ProcessIdentity
    used_mib: int
    name: str  # of its program, as anybody may see it
    command: str  # with its arguments, for its owner and for administrators


@dataclass(eq=False, kw_only=True)
class Kernel:
    """One lease's world. Everything here is rebuilt from the ledger, /proc and the driver when a broker starts."""

    lease_id: str
    uid: int
    token_sha256: str
    kernel_id: str = ""
    created_ms: int = 0  # wall clock
    suspends: int = 0
    resumes: int = 0
    changes: int = 0  # of its state, as far as this broker saw them
    identity: ProcessIdentity | None = None
    gated: bool = False  # its extension is expected to connect
    homes: tuple[str, ...] = ()  # the devices its processes last had their memory on: what a checkpoint is of
    members: frozenset[ProcessIdentity] = frozenset()  # processes beside the kernel itself that were seen in its tree
    users_on_disk: frozenset[ProcessIdentity] = frozenset()  # those that use a device and were written into the ledger
    left: tuple[Survivor, ...] = ()  # the kernel has ended, and these of its processes have device memory
    root: ProcessIdentity | None = None  # the last process that was the kernel itself
    ending: "asyncio.Task[None] | None" = None  # finds out what the kernel's process left behind
    measured: tuple[int, bool] | None = None  # MiB in use, and whether a device is; what the arbiter was told last
    grew: bool = False  # that was more than before, where its reservation follows its use
    released: bool = False  # its kernel is over for good: the lease ends with what it left behind
    release_reason: str = "released"  # of its end then
    server: ProcessIdentity | None = None  # the only process that starts its kernel; None: unknown
    had_process: bool = False  # a process was attached: while there is none, it has ended
    token_file: str = ""  # as the environment of the kernel's process names it
    seen_on: frozenset[str] = frozenset()  # the devices on which its processes were last seen to have memory
    checkpointed: Mapping[ProcessIdentity, int] = field(default_factory=dict)  # MiB that our last suspend was to save
    needs_driver: bool = False  # found in the middle of a swap, or saved, while the driver could not be asked
    started_on: tuple[str, ...] = ()  # the devices that the reply to its request bound a kernel without a gate to
    reserved_on_disk: tuple[str, ...] = ()  # the devices whose reservation the ledger holds for certain
    unreserved_saves: int = 0  # how often the ledger was told that there is none
    save_due: bool = False  # the ledger could not be written and is tried again
    connection: str = field(default="", repr=False)  # the checked connection contents, JSON
    language: str = ""
    ipykernel: bool = True
    watch: IOPubWatch | None = None
    link: GateLink | None = None
    waiting: int = 0  # open acquire streams
    suspend_requests: list[Request] = field(default_factory=list)  # that the arbiter has not answered yet
    resizing: Request | None = None  # the request for another size that waits
    asked_of_seat: tuple[int, int] = (0, 0)  # fraction and memory of the resize that waits
    own_size: ResizeRequested | None = None  # during a burst: what the lease goes back to if the process ends in it
    wanted_by_broker: bool = False  # we filed the ticket because of IOPub or silence
    executing_since_s: float | None = None
    idle_us: int | None = None  # idle by its messages since then, microseconds since boot
    worked_us: int = 0  # its processes were last seen at work on the device since then; 0: not yet
    working: bool = False  # they are, or nobody knows yet, though no cell runs
    notices: list[str] = field(default_factory=list)  # to be shown by the next extension that connects
    unsaveable: str = ""  # why its process cannot be checkpointed, as its extension knows, a sentence
    stopped: str = ""  # that its process is stopped, and what to do, a sentence; empty: it runs
    suspend_wishes: int = 0  # people who wait for its suspend
    evictions: int = 0  # administrators who are ending it
    _pidfd: int | None = None
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> asyncio.Event:
        """Return the event of the next change. Take it before looking at the state, then wait for it: no change is missed."""
        return self._change

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._change.set()
        self._change = asyncio.Event()

    async def until_linked(self, patience_s: float) -> None:
        """Wait, but not longer than the patience, for an extension that is expected and not there (yet)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.gated and self.link is None:
                    await self.change().wait()

    @property
    def checkpointed_mib(self) -> int:
        """What the last suspend was to save, MiB; 0 if it saved nothing, or was an earlier broker's."""
        return sum(self.checkpointed.values())

    @property
    def home(self) -> str | None:
        """The first of its homes."""
        return self.homes[0] if self.homes else None

    def watch_process(self, identity: ProcessIdentity, exited: Callable[[], None]) -> None:
        """Hold the process's pidfd and call `exited` on the loop when it ends. Raises ProcessLookupError if it has ended already."""
        self.forget_process()
        pidfd = open_pidfd(identity)
        self.identity, self._pidfd = identity, pidfd
        asyncio.get_running_loop().add_reader(pidfd, exited)

    def forget_process(self) -> None:
        """Give up the pidfd, the IOPub subscription and the extension's line of a process that is gone or replaced."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if self.link is not None:
            self.link.close()
            self.link = None
        self.identity = None
        self.connection = ""
        self.executing_since_s = None
        self.wanted_by_broker = False
        self.unsaveable = self.stopped = ""
        self.idle_us, self.worked_us, self.working = None, 0, False

    @property
    def busy(self) -> bool:
        """Whether the kernel uses, or may be about to use, the GPU: by its messages, or by the device's counters."""
        return self.in_use or (self.identity is not None and self.working and not self.suspend_wishes)

    @property
    def in_use(self) -> bool:
        """Whether it is busy by its messages. A live kernel nobody watches is in doubt, hence busy."""
        if self.identity is None:
            return self.ending is not None
        return self.waiting > 0 or self.watch is None or (self.watch.busy and not self._only_waits_for_input)

    @property
    def executing(self) -> bool:
        """Whether a message that counts as use is being handled for certain, and does not wait for input."""
        return self.watch is not None and self.watch.executing and not self._only_waits_for_input

    @property
    def _only_waits_for_input(self) -> bool:
        """Whether all that is being handled waits for input. A kernel in doubt may handle more."""
        inputs = self.link.inputs if self.link is not None else None
        if not inputs or self.watch is None or not self.watch.executing:
            return False
        return self.watch.is_certain and not self.watch.handles_other_than(inputs)
