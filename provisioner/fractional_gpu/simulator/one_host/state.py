"""What the parts of one host share: its arbiter and the way to it, its kernels and devices, and where figures are counted."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Event
from fractional_gpu.core.model import HOLDING, LeaseSpec, LeaseState
from fractional_gpu.simulator.felt import Felt
from fractional_gpu.simulator.hosts import Moments, Recorder
from fractional_gpu.simulator.machine import Host, SharedDevice
from fractional_gpu.simulator.metering.run_meter import RunMeter
from fractional_gpu.simulator.one_host.kernel import Kernel
from fractional_gpu.simulator.result import Accounts, Result

Watch = Callable[[Event, Sequence[Effect]], None]


@dataclass(slots=True, kw_only=True)
class RunState:
    """What the hosts of a run share. `over` is told of the end of a session's lease."""

    moments: Moments
    result: Result
    accounts: Accounts
    felt: Felt
    watch: Watch | None
    record: Recorder | None
    meter: RunMeter | None
    over: Callable[[int, LeaseSpec], None]


class HostState:
    """One host of a run, as its parts see it. `execute` carries an effect of the arbiter out."""

    def __init__(self, number: int, host: Host, run: RunState, execute: Callable[[Effect], None]) -> None:
        self.number, self.host = number, host
        self.result, self.accounts, self.felt = run.result, run.accounts, run.felt
        self.meter = run.meter.hosts[number] if run.meter is not None else None
        self.arbiter = Arbiter(parallel_swaps=host.parallel_swaps)
        self.kernels: dict[str, Kernel] = {}
        self.devices = {device.device_id: SharedDevice(slowdown=host.slowdown) for device in host.devices}
        self.closed_ms = self.over = 0  # when the last of its sessions closed, and how many are over
        self._moments, self._watch, self._record, self._lease_over = run.moments, run.watch, run.record, run.over
        self._execute = execute
        self._events: deque[Event] = deque()

    @property
    def now_ms(self) -> int:
        """The time of the run."""
        return self._moments.now_ms

    def at(self, at_ms: int, act: Callable[[], None]) -> None:
        """Plan what happens then."""
        self._moments.at(at_ms, act)

    def after(self, wait_ms: int, act: Callable[[], None]) -> None:
        """Plan what happens so much later than now."""
        self._moments.at(self.now_ms + wait_ms, act)

    def send(self, event: Event) -> None:
        """Send an event to the arbiter and execute its effects; events that arise on the way follow."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            effects = self.arbiter.handle(self._events[0])
            if self._watch is not None:
                self._watch(self._events[0], effects)
            if self._record is not None:
                self._record.event(self.number, self._events[0], effects)
            if self.meter is not None:
                self.meter.saw(self.now_ms, self.arbiter, self._events[0], effects)
            for effect in effects:
                self._execute(effect)
            self._events.popleft()

    def note(self, kind: str, kernel: Kernel, **about: object) -> None:
        """Write a moment of the world to the record, if there is one."""
        if self._record is not None:
            self._record.moment(self.number, kind, self.now_ms, kernel.session.session_id, **about)

    def use(self, kernel: Kernel, device_ids: tuple[str, ...], mib: int) -> None:
        """Count `mib` more used on each of the devices; negative: given back."""
        self.accounts.use(self.number, device_ids, mib)
        if mib:
            self.note("memory", kernel, device_ids=device_ids, mib=mib)

    def drop_memory(self, kernel: Kernel) -> None:
        """Count no more what a kernel holds on devices and in the host's memory."""
        if kernel.state in HOLDING and not (kernel.state is LeaseState.RESUMING and kernel.resume_fails):
            self.use(kernel, kernel.device_ids, -kernel.memory_mib)
        if kernel.state is LeaseState.SUSPENDED or kernel.state is LeaseState.RESUMING:
            self.note("dropped", kernel, mib=kernel.total_mib)
            self.accounts.drop_saved(self.number, kernel.total_mib)

    def count_vain(self, kernel: Kernel) -> None:
        """Count what a kernel was brought back with if no cell has followed."""
        self.result.vain_mib += kernel.early_mib
        kernel.early_mib = 0

    def count_over(self, kernel: Kernel) -> None:
        """Count the session's lease no more."""
        if not kernel.over:
            kernel.over = True
            self.over += 1
            self._lease_over(self.number, kernel.spec)
