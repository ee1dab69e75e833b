"""Pins, resizes and describes leases, and drains devices. Each method implements one route, including its checks."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel, Request
from fractional_gpu.broker.kernels.process_inspector import members_of
from fractional_gpu.broker.kernels.request_validation import cap_mib, guaranteed_mib
from fractional_gpu.broker.lanes import QUESTIONS
from fractional_gpu.broker.services.status import device_status, full_lease_status, view_of
from fractional_gpu.core.events import DeviceDrained, DeviceUndrained, PinRequested, ResizeRequested, UnpinRequested
from fractional_gpu.core.model import LeaseState, Sign
from fractional_gpu.core.units import format_duration, format_fraction, format_memory
from fractional_gpu.gpu.interface import DeviceUse, DeviceUtilisation, GPUError, ProcessKind
from fractional_gpu.host.clock import since_boot_us
from fractional_gpu.host.process import Snapshot
from fractional_gpu.protocol.errors import BadRequestError, ConflictError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME, MAX_WAIT_S
from fractional_gpu.protocol.messages import DrainRequest, ExpectRequest, PinRequest, ResizeRequest
from fractional_gpu.protocol.status import DeviceStatus, History, LeaseStatus, Story

log = logging.getLogger(__name__)

_MOVING = (LeaseState.SUSPENDING, LeaseState.RESUMING)
_LINES = 200
_LONGEST_SIGN_MS = 600_000
_SIGNS = frozenset(str(sign) for sign in Sign if sign is not Sign.RHYTHM)  # the arbiter detects a rhythm itself
_POINTS = 1000
_MOST_AGE_S = 1.0  # of the process list, so that requests can share one scan
LONGEST_DEADLINE_MS = 7 * 86_400_000
"""How far in the future a drain's deadline may be, in ms."""


async def begin_drain(broker: Broker, device_id: str, *, evict_busy: bool, deadline_in_ms: int | None) -> None:
    """Drain a device. It stays drained when the broker restarts. Raises LedgerError.

    If this call is cancelled, the ledger may contain a drain that the arbiter does not know about.
    """
    at_ms = now_ms()
    deadline_ms = 0 if deadline_in_ms is None else broker.deadlines.now_ms() + deadline_in_ms
    write = partial(broker.writer.ledger.set_drained, device_id, evict_busy=evict_busy, deadline_ms=deadline_ms)
    await broker.writer.run(write)
    event = DeviceDrained(
        at_ms=now_ms(),
        device_id=device_id,
        evict_busy=evict_busy,
        deadline_ms=None if deadline_in_ms is None else at_ms + deadline_in_ms,
    )
    broker.dispatch(event)


async def end_drain(broker: Broker, device_id: str) -> None:
    await broker.writer.run(partial(broker.writer.ledger.set_undrained, device_id))
    broker.dispatch(DeviceUndrained(at_ms=now_ms(), device_id=device_id))


class LeaseControl:
    def __init__(self, broker: Broker, check: Callable[[Kernel, int, int], None]) -> None:
        self._broker = broker
        self._check = check  # raises an error if the kernel's seat has no room for the size

    async def pin(self, kernel: Kernel, request: PinRequest) -> LeaseStatus:
        if request.duration_ms < 1:
            raise BadRequestError(
                f"duration_ms is {request.duration_ms}; expected 1 or more (there is a separate route to unpin)"
            )
        event = PinRequested(at_ms=now_ms(), lease_id=kernel.lease_id, duration_ms=request.duration_ms)
        if (declined := self._broker.ask(event, "pin")) is not None:
            raise ConflictError(declined.sentence, reason=declined.reason)
        await self._broker.writer.flushed()
        return full_lease_status(self._broker, kernel)

    def expect(self, kernel: Kernel, request: ExpectRequest) -> None:
        if request.sign not in _SIGNS:
            raise BadRequestError(f"sign is {request.sign[:50]!r}; expected one of: {', '.join(sorted(_SIGNS))}")
        for name, value, most in (
            ("within_ms", request.within_ms, _LONGEST_SIGN_MS),
            ("confidence_milli", request.confidence_milli, 1000),
        ):
            if not 1 <= value <= most:
                raise BadRequestError(f"{name} is {value}; expected 1 to {most}")
        self._broker.expect_cell(kernel, Sign(request.sign), request.within_ms, request.confidence_milli)

    async def unpin(self, kernel: Kernel, by: str) -> LeaseStatus:
        self._broker.dispatch(UnpinRequested(at_ms=now_ms(), lease_id=kernel.lease_id, by=by))
        await self._broker.writer.flushed()
        return full_lease_status(self._broker, kernel)

    async def resize(self, kernel: Kernel, request: ResizeRequest) -> LeaseStatus:
        """Change the lease's size, waiting for room if the lease grows.

        Raises ConflictError if the size can't change. If this call is cancelled, the size stays the same unless it has already changed.
        """
        event = self._wanted(kernel, request)
        if self._has(kernel, event):
            if not request.burst:
                await self._is_own_size(kernel)
            return full_lease_status(self._broker, kernel)
        self._check(kernel, event.fraction_milli, event.reserve_mib)
        if event.reserve_mib < view_of(self._broker, kernel).spec.reserve_mib:
            await self._measured(kernel)
        if kernel.requests.resize is not None:  # only the newest request waits
            self._stay(kernel)
        mine = kernel.requests.resize = Request()
        own_size = kernel.requests.size_before_burst
        if request.burst:  # first, so that the ledger never contains only the burst size
            kernel.requests.size_before_burst = own_size or self._size_now(kernel)
        wait_s = max(0.0, min(request.wait_ms / 1000, MAX_WAIT_S))
        try:
            self._broker.dispatch(event)
            await kernel.until(lambda: self._resized(kernel, event, mine), wait_s)
            if not self._has(kernel, event):  # a running swap may give it the new size
                await kernel.until(lambda: view_of(self._broker, kernel).state not in _MOVING)
            if not self._has(kernel, event):
                ticket = self._broker.ticket(kernel.lease_id)
                raise ConflictError(
                    f"there was no room for {format_fraction(event.fraction_milli)} of a GPU and "
                    f"{format_memory(event.reserve_mib)} within {format_duration(int(wait_s * 1000))}"
                    f"{f' ({ticket.sentence})' if ticket is not None else ''}: the kernel is unchanged; try again later, or request less",
                    reason="timeout",
                )
        finally:
            if kernel.requests.resize is mine:
                self._end_request(kernel, event, mine, own_size)
        if not request.burst:
            await self._is_own_size(kernel)
        await self._broker.writer.flushed()
        return full_lease_status(self._broker, kernel)

    async def _is_own_size(self, kernel: Kernel) -> None:
        if kernel.requests.size_before_burst is not None:
            kernel.requests.size_before_burst = None
            self._broker.records.save(kernel)
            await self._broker.writer.flushed()

    def _wanted(self, kernel: Kernel, request: ResizeRequest) -> ResizeRequested:
        spec = view_of(self._broker, kernel).spec
        if spec.devices > 1:
            raise BadRequestError(
                f"this kernel has {spec.devices} whole devices, and that number cannot change while it runs; "
                "restart it with a different number"
            )
        fraction_milli = spec.fraction_milli if request.fraction_milli is None else request.fraction_milli
        if not 1 <= fraction_milli <= 1000:
            raise BadRequestError(f"fraction_milli is {fraction_milli}; expected 1 to 1000", reason="bad-fraction")
        arbiter = self._broker.arbiter
        pool = arbiter.pools().get(spec.pool)
        if pool is None:
            raise ConflictError(
                f"pool {spec.pool!r} is no longer configured, so this kernel keeps its size; ask the administrator",
                reason="unknown-pool",
            )
        reserve_mib = spec.reserve_mib
        if request.fraction_milli is not None or request.memory_mib is not None:
            reserve_mib = cap_mib(arbiter, pool, fraction_milli, request.memory_mib)
        return ResizeRequested(
            at_ms=now_ms(),
            lease_id=kernel.lease_id,
            fraction_milli=fraction_milli,
            reserve_mib=reserve_mib,
            request_mib=guaranteed_mib(arbiter, pool, fraction_milli, reserve_mib, None),
        )

    def _resized(self, kernel: Kernel, event: ResizeRequested, mine: Request) -> bool:
        if kernel.requests.resize is not mine:
            raise ConflictError("a newer resize request replaced this one", reason="replaced")
        if not self._has(kernel, event) and mine.declined is not None:
            reason, sentence = mine.declined
            raise ConflictError(sentence, reason=reason)
        return self._has(kernel, event)

    async def _measured(self, kernel: Kernel) -> None:
        try:
            await self._broker.measure(kernel)
        except GPUError as error:
            raise ConflictError(
                f"cannot measure what the kernel uses right now ({error}); try again in a moment", reason="not-measured"
            ) from error

    def _has(self, kernel: Kernel, event: ResizeRequested) -> bool:
        spec = view_of(self._broker, kernel).spec
        return (spec.fraction_milli, spec.reserve_mib) == (event.fraction_milli, event.reserve_mib)

    def _end_request(
        self, kernel: Kernel, event: ResizeRequested, mine: Request, own_size: ResizeRequested | None
    ) -> None:
        kernel.requests.resize = None
        if kernel.lease_id in self._broker.kernels and not self._has(kernel, event):
            kernel.requests.size_before_burst = own_size
            if mine.declined is None:
                self._stay(kernel)

    def _stay(self, kernel: Kernel) -> None:
        """Withdraw the waiting resize by requesting the current size. This works because the arbiter acts only on the newest request."""
        kernel.requests.resize = None
        self._broker.dispatch(self._size_now(kernel))
        kernel.notify()

    def _size_now(self, kernel: Kernel) -> ResizeRequested:
        spec = view_of(self._broker, kernel).spec
        return ResizeRequested(
            at_ms=now_ms(),
            lease_id=kernel.lease_id,
            fraction_milli=spec.fraction_milli,
            reserve_mib=spec.reserve_mib,
            request_mib=spec.request_mib,
        )

    async def story(self, kernel: Kernel) -> Story:
        ledger, slowdown = self._broker.writer.ledger, self._broker.arbiter.slowdown(kernel.lease_id)

        def read() -> Story:
            lines = ledger.story(kernel.lease_id, _LINES)
            return Story(
                lease_id=kernel.lease_id,
                lines=lines,
                omitted=ledger.story_length(kernel.lease_id) - len(lines),
                slowdown=slowdown,
            )

        return await self._broker.writer.read(read)

    async def history(self, kernel: Kernel) -> History:
        view = view_of(self._broker, kernel)
        self._broker.history.note(view)
        points = await self._broker.writer.read(partial(self._broker.writer.ledger.points, kernel.lease_id, _POINTS))
        return History(
            lease_id=kernel.lease_id,
            cap_mib=view.spec.reserve_mib,
            points=points,
        )

    async def drain(self, device: str, request: DrainRequest) -> DeviceStatus:
        device_id = self.device(device)
        left_ms = request.deadline_in_ms
        if left_ms is not None and not 1 <= left_ms <= LONGEST_DEADLINE_MS:
            raise BadRequestError(
                f"deadline_in_ms is {left_ms}; expected 1 to {LONGEST_DEADLINE_MS} (a week), or leave it out"
            )
        await begin_drain(self._broker, device_id, evict_busy=request.evict_busy, deadline_in_ms=left_ms)
        return device_status(self._broker, device_id)

    async def undrain(self, device: str) -> DeviceStatus:
        device_id = self.device(device)
        await end_drain(self._broker, device_id)
        return device_status(self._broker, device_id)

    def device(self, device: str) -> str:
        devices = self._broker.devices
        found = [name for name, info in devices.items() if device in (name, str(info.index))]
        found = found or [name for name in devices if name.startswith(device)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(
            f"{info.index} {name}" for name, info in sorted(devices.items(), key=lambda one: one[1].index)
        )
        problem = "matches more than one device" if found else "is not a device of this broker"
        raise NotFoundError(f"{device[:MAX_NAME]!r} {problem}; devices: {there}", reason="unknown-device")


async def others_use_milli(broker: Broker, kernels: Sequence[Kernel], last_ms: int) -> int | None:
    """Return how many thousandths of the first kernel's device were recently used by processes outside `kernels`, or None if unknown."""
    view = broker.arbiter.lease(kernels[0].lease_id)
    if view is None or view.device_id is None or len(view.device_ids) > 1:
        return None
    reading = await QUESTIONS.run(_read, broker, view.device_id, since_boot_us() - last_ms * 1000)
    if reading is None:
        return None
    use, utilisation, snapshot = reading
    roots = broker.roots()
    ours = {
        member.pid
        for kernel in kernels
        if kernel.identity is not None
        for member in [kernel.identity, *members_of(kernel, kernel.identity, snapshot, roots)]
    }
    there = [one for one in use.processes if one.kind is not ProcessKind.GRAPHICS]
    # MPS clients compute under the server's pid, so their use cannot be told apart.
    if utilisation.by_pid is None or any(one.kind is ProcessKind.MPS for one in there):
        return None
    return sum(utilisation.by_pid.get(one.pid, 0) for one in there if one.pid not in ours)


def _read(broker: Broker, device_id: str, since_us: int) -> tuple[DeviceUse, DeviceUtilisation, Snapshot] | None:
    """Read the device's use and utilisation. Return None if it can't be read or reports no utilisation. Blocks."""
    try:
        use, utilisation = broker.monitor.use(device_id), broker.monitor.utilisation(device_id, since_us)
    except GPUError as error:  # the memory sampler detects a lost device
        log.debug("cannot read what processes use of device %s: %s", device_id, error)
        return None
    return None if utilisation is None else (use, utilisation, broker.scans.take(_MOST_AGE_S))
