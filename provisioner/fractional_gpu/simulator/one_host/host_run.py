"""One host: what is asked of it, and how it carries out what its arbiter decides."""

from collections.abc import Callable, Sequence
from functools import partial

from fractional_gpu.core.effects import (
    Effect,
    Granted,
    LeaseEnded,
    LeaseRefused,
    Resized,
    Resume,
    Shrink,
    StateChanged,
    Suspend,
    WakeAt,
)
from fractional_gpu.core.events import DeviceSeen, HostMemorySeen, PoolConfigured, Shrunk, Tick
from fractional_gpu.core.forecasts.estimators import ErrorView
from fractional_gpu.core.forecasts.track_record import Judged
from fractional_gpu.core.model import HOLDING, LeaseSpec
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.one_host.kernel import Kernel
from fractional_gpu.simulator.one_host.leaving import LeavingDevices
from fractional_gpu.simulator.one_host.sessions import Sessions
from fractional_gpu.simulator.one_host.state import HostState, RunState
from fractional_gpu.simulator.one_host.swaps import Swaps
from fractional_gpu.simulator.traces import Session

_REFUSED_BY_LIMIT = frozenset({"user-limit", "group-limit"})  # the user has too many already: the session never runs


class HostRun:
    """One host of a run: its arbiter, and the sessions that live there. `leaving` takes its devices away."""

    def __init__(self, number: int, host: Host, run: RunState) -> None:
        self._state = HostState(number, host, run, self._execute)
        self._sessions = Sessions(self._state)
        self._cells = self._sessions.cells
        self._swaps = Swaps(self._state, self._cells)
        self.leaving = LeavingDevices(self._state, self._sessions)
        self._wake_version = 0

    @property
    def device_ids(self) -> tuple[str, ...]:
        """All devices of this host."""
        return tuple(self._state.devices)

    @property
    def over(self) -> int:
        """How many of its sessions are over."""
        return self._state.over

    @property
    def closed_ms(self) -> int:
        """When the last of its sessions closed."""
        return self._state.closed_ms

    def begin(self) -> None:
        """Show the arbiter its machine."""
        self._state.send(HostMemorySeen(at_ms=0, budget_mib=self._state.host.host_memory_mib))
        for device in self._state.host.devices:
            self._state.send(DeviceSeen(at_ms=0, device=device))
        for pool in self._state.host.pools:
            self._state.send(PoolConfigured(at_ms=0, pool=pool))

    def validate(self) -> None:
        """Check the whole state of the arbiter."""
        self._state.arbiter.validate()

    def open(self, session: Session, lease: LeaseSpec, ended: Callable[[], None]) -> None:
        """Begin a session here; `ended` is called when it is over."""
        self._sessions.open(session, lease, ended)

    def show_forecasts(self, judged: Callable[[Judged], None] | None) -> None:
        """Have this host's forecasts seen that are compared with what happened."""
        self._state.arbiter.forecasts.record.watch = judged

    def forecast_errors(self) -> Sequence[ErrorView]:
        """Return how far off this host's forecasts were."""
        return self._state.arbiter.forecasts.errors()

    # -- effects of the arbiter ----------------------------------------------------------------------------------------

    def _execute(self, effect: Effect) -> None:
        match effect:
            case StateChanged():
                self._changed(self._state.kernels[effect.lease_id], effect)
            case Granted():
                self._cells.granted(self._state.kernels[effect.lease_id], effect)
            case Suspend():
                self._swaps.suspend(self._state.kernels[effect.lease_id], effect)
            case Resume():
                self._swaps.resume(self._state.kernels[effect.lease_id], effect)
            case Shrink():  # a simulated kernel has no caches
                kernel = self._state.kernels[effect.lease_id]
                self._state.send(
                    Shrunk(
                        at_ms=self._state.now_ms,
                        lease_id=effect.lease_id,
                        generation=effect.generation,
                        used_mib=kernel.total_mib,
                    )
                )
            case Resized():
                self._cells.resized(self._state.kernels[effect.lease_id], effect)
            case WakeAt(at_ms=at_ms):
                self._wake_version += 1
                if at_ms is not None:
                    self._state.at(at_ms, partial(self._wake, self._wake_version))
            case LeaseEnded(lease_id=lease_id, reason=reason) if reason != "released":
                self._state.result.lost += 1
                self._state.count_over(self._state.kernels[lease_id])
            case LeaseRefused(lease_id=lease_id, reason=reason) if reason in _REFUSED_BY_LIMIT:
                self._state.result.lost += 1
                self._state.count_over(self._state.kernels[lease_id])
            case LeaseRefused(lease_id=lease_id, sentence=sentence):
                raise SimulationError(f"session {lease_id!r} was refused: {sentence}")

    def _wake(self, version: int) -> None:
        if version == self._wake_version:
            self._state.send(Tick(at_ms=self._state.now_ms))

    def _changed(self, kernel: Kernel, change: StateChanged) -> None:
        if kernel.state in HOLDING:
            self._state.accounts.let_go(self._state.number, kernel.device_ids)
        if change.new in HOLDING and change.device_id is not None:
            kernel.device_ids = self._devices_of(kernel, change.device_id)
            self._state.accounts.hold(self._state.number, kernel.device_ids)
        kernel.state = change.new

    def _devices_of(self, kernel: Kernel, device_id: str) -> tuple[str, ...]:
        if kernel.spec.devices == 1:
            return (device_id,)
        view = self._state.arbiter.lease(kernel.spec.lease_id)
        return view.device_ids if view is not None else kernel.device_ids
