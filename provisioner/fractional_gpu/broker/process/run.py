"""One life of a broker: `BrokerRun` makes its parts from the settings, the devices and the open ledger, serves, and shuts down.

`_make_parts` is the place that shows which part is made with which; `_background_work` lists what runs beside the API.
"""

import asyncio
import logging
import os
import signal
import socket as socket_module
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_unix_socket

from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.metrics_routes import listen
from fractional_gpu.broker.api.routes import make_server
from fractional_gpu.broker.api.server import PausingListener, Server, drain_claim_queries
from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.kernels.kernel import check_pools
from fractional_gpu.broker.lanes import ATTACHING, start_lanes
from fractional_gpu.broker.monitoring.host_memory import HostBudget, OomProtection
from fractional_gpu.broker.monitoring.sampler import Sampler
from fractional_gpu.broker.monitoring.watchdog import Watchdog
from fractional_gpu.broker.persistence.audit import AuditLog
from fractional_gpu.broker.persistence.lease_files import LeaseFiles, lease_folder
from fractional_gpu.broker.persistence.ledger_writer import (
    LedgerWriter,
    load_context_sizes,
    load_forecasts,
    save_forecasts,
    save_forecasts_periodically,
)
from fractional_gpu.broker.process.driver_start import Backend, DriverStart
from fractional_gpu.broker.process.repair import Repair
from fractional_gpu.broker.process.restarting import make_socket_folder
from fractional_gpu.broker.recovery.lost_leases import lost_kernels, lost_sentence, take_records
from fractional_gpu.broker.recovery.recovery import recover
from fractional_gpu.broker.services.revocation_notice import RevocationNotice
from fractional_gpu.broker.supervision.survivors import AbandonedLeases
from fractional_gpu.broker.swap.checkpointability import Checkpointability
from fractional_gpu.broker.swap.suspend import CheckpointCheck, SwapTimes
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.config import Settings
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import DeviceDrained, DeviceSeen, Event, HostMemorySeen, PoolConfigured
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.core.units import format_memory
from fractional_gpu.gpu.worker_link import WorkerClaim, WorkerLink
from fractional_gpu.host.accounts import ACCOUNTS
from fractional_gpu.host.claims import NameClaim
from fractional_gpu.host.threads import StartedThreads
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.errors import BrokerUnavailableError

log = logging.getLogger(__name__)

_DAY_S = 24 * 3600
_LIMIT_LOOK_S = 60.0
_THREADS = min(32, (os.cpu_count() or 1) + 4)  # for what blocks, as many as asyncio would start one by one
_SOCKET_MODE_OWN = 0o600
_SOCKET_MODE_SERVICE = 0o666  # a system service serves every user; peer credentials tell them apart


def is_service_socket(socket: str) -> bool:
    """Whether a broker on this socket serves every user of the machine, not only its own."""
    return os.getuid() == 0 and Path(socket).parent == Path("/run/jupyter-gpu")


def device_specs(settings: Settings, backend: Backend) -> tuple[DeviceSpec, ...]:
    everything = [
        DeviceSpec(
            device_id=one.device_id,
            name=one.name,
            memory_mib=one.memory_mib,
            overhead_mib=settings.overhead_mib(one.memory_mib, simulated=backend.simulated),
            why_not=one.why_not,
            why_no_move=one.why_no_move,
        )
        for one in backend.devices
    ]
    names = {spec.device_id: spec.name for spec in everything}
    check_pools(settings.pool_specs(everything), names, simulated=backend.simulated)
    return settings.managed(everything)


def make_arbiter(ledger: Ledger) -> Arbiter:
    """Return the arbiter of a broker: it goes on where the one before it stopped learning. Raises LedgerError."""
    return Arbiter(first_operation_id=ledger.next_operation_id(), forecasts=load_forecasts(ledger))


def configuration(
    settings: Settings, everything: Sequence[DeviceSpec], managed: Iterable[DeviceSpec], *, host_budget_mib: int
) -> Iterator[Event]:
    """Yield what gives a broker's arbiter its devices, its pools and its budget of host memory. `everything`: all of the machine."""
    at_ms = now_ms()
    for spec in managed:
        yield DeviceSeen(at_ms=at_ms, device=spec)
    for pool in settings.pool_specs(everything):
        yield PoolConfigured(at_ms=at_ms, pool=pool)
    # It holds until the sampler has measured the host's memory; with no budget, any saved state that is found would exceed it.
    yield HostMemorySeen(at_ms=at_ms, budget_mib=host_budget_mib)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    turn: WorkerClaim
    worker: WorkerLink
    driver: DriverStart
    swaps: Swaps
    broker: Broker
    sampler: Sampler
    files: LeaseFiles
    service: LeaseService
    server: Server
    repair: Repair

    def has_leases(self) -> bool:
        return bool(self.broker.kernels or self.service.seats.live() or lost_sentence(self.broker.lost))


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a broker's life ended. `is_repair`: it is to execute itself again, since files of it were deleted."""

    leases_live: bool  # their kernels do, too
    is_repair: bool
    lost_folder: bool


class BrokerRun:
    """One life of a broker. Once it serves, `serves` is called, and `ready` is closed: the process that started it waits for that."""

    def __init__(
        self,
        *,
        settings: Settings,
        backend: Backend,
        specs: tuple[DeviceSpec, ...],
        claims: list[NameClaim],
        ledger: Ledger,
        socket: str,
        ready: TextIO | None,
        serves: Callable[[], object] = lambda: None,
        everyone: bool,
        worker_socket: str | None = None,
    ) -> None:
        self._worker_socket = worker_socket
        self._settings = settings
        self._backend = backend
        self._claims = claims
        self._specs = {spec.device_id: spec for spec in specs}
        total_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
        self._host_total_mib = total_mib
        self._host_budget_mib = settings.host_budget_mib(total_mib)
        self._ledger = ledger
        self._socket = socket
        self._ready = ready
        self._serves = serves
        self._everyone = everyone
        self._stop = asyncio.Event()

    async def main(self) -> End:
        """Serve until SIGTERM, SIGINT, idle exit, or a deleted file.

        Raises OSError where the threads for what blocks cannot be started: later work never lacks one.
        """
        self._handle_signals()
        asyncio.get_running_loop().set_default_executor(StartedThreads(_THREADS, "broker"))
        start_lanes()
        for claim in self._claims:
            drain_claim_queries(claim)
        async with AsyncExitStack() as undo:  # what a start takes back that comes to nothing
            parts = await self._make_parts(undo)
            parts.server.add_socket(self._bind())
            parts.repair.begin()
            address = self._settings.metrics_address
            metrics_server = listen(parts.broker.metrics.full_registry, address) if address is not None else None
            self._report_ready()
            undo.pop_all()
        tasks = [asyncio.create_task(work) for work in self._background_work(parts)]
        try:
            with Watchdog.of(self._settings.hang_limit):
                await self._until_stopped(tasks)
        finally:
            leases_live = await self._shut_down(parts, metrics_server, tasks)
        log.info("stopped; %s", "leases live on" if leases_live else "no lease was left")
        # One that was told to end meanwhile ends: its ledger is written out, and the next broker makes the files.
        is_repair = parts.repair.is_due and not self._stop.is_set()
        return End(leases_live=leases_live, is_repair=is_repair, lost_folder=parts.repair.lost_folder)

    async def _make_parts(self, undo: AsyncExitStack) -> _Parts:
        """Make the parts of the broker, and restore the leases and seats that an earlier broker left. `undo` ends the worker."""
        settings, monitor, ledger = self._settings, self._backend.monitor, self._ledger
        ACCOUNTS.unknown = settings.account_of_unknown_uids

        # The checkpoint worker, and the operations that use it.
        turn = WorkerClaim.open(Path(f"{self._socket}.worker"))
        worker = WorkerLink(self._backend.name, claim=turn, service=self._worker_socket)
        undo.push_async_callback(worker.close)
        driver = DriverStart(worker, self._specs)
        off = await driver.begin()
        arbiter = make_arbiter(ledger)
        swaps = self._make_swaps(worker, Checkpointability(arbiter).refusal, off)

        # The broker: the arbiter with all that executes its effects.
        files = LeaseFiles(
            lease_folder(self._socket, simulated=self._backend.simulated), partial(make_socket_folder, self._socket)
        )
        broker = Broker(
            arbiter,
            monitor,
            swaps,
            LedgerWriter(ledger, limit_bytes=settings.ledger_limit * 2**20),
            devices={device.device_id: device for device in self._backend.devices if device.device_id in self._specs},
            files=files,
            context_sizes=load_context_sizes(ledger),
        )
        sampler = Sampler(broker, self._specs, HostBudget(self._host_budget_mib, self._host_total_mib))
        self._configure(broker)

        # Leases that live, whether the ledger knows them or not. A sample shows what they use before any request is answered.
        records = await asyncio.to_thread(take_records, files.folder, ledger)
        for record in records:
            log.warning("lease %s is not in the ledger: taken back from its second record", record.spec.lease_id[:8])
        uid = None if self._everyone else os.getuid()
        known = {record.spec.lease_id for record in records}
        broker.lost = await ATTACHING.run(lost_kernels, uid, self._socket, ledger, known)
        if sentence := lost_sentence(broker.lost):
            log.warning("%s", sentence)
        await recover(broker, swaps, ledger, records)
        broker.scans.kernels = broker.kernels
        await sampler.sample()
        await driver.try_checkpoint(broker, swaps)

        # The API.
        service = LeaseService(broker, settings, refresh=sampler.refresh)
        service.seats.recover(ledger)
        await service.audit.check()
        server = make_server(service, self._socket)
        repair = Repair(self._socket, broker.writer, is_needed=lambda: settings.idle_exit is None or parts.has_leases())
        parts = _Parts(
            turn=turn,
            worker=worker,
            driver=driver,
            swaps=swaps,
            broker=broker,
            sampler=sampler,
            files=files,
            service=service,
            server=server,
            repair=repair,
        )
        return parts

    def _background_work(self, parts: _Parts) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what runs for as long as the broker serves. The broker ends when one of these ends or fails."""
        broker, service = parts.broker, parts.service
        return (
            parts.sampler.run(),
            parts.repair.run(),
            broker.gpu_activity.run(),
            broker.metering.run(),
            parts.driver.run(broker, parts.swaps),
            OomProtection(broker, self._ledger.path.with_suffix(".oom.json")).run(),
            service.seats.run(),
            parts.files.run(),
            AbandonedLeases(broker).run(),
            self._stop_when_unused(broker),
            self._prune_history(broker, service.audit),
            save_forecasts_periodically(broker.arbiter, broker.contexts.sizes, broker.writer),
            broker.metrics.watch_loop(),
            *self._watch_of_revocation(broker),
        )

    def _watch_of_revocation(self, broker: Broker) -> tuple[Coroutine[Any, Any, None], ...]:
        source = self._settings.revocation_notice
        if source is None:
            return ()
        notice = RevocationNotice(
            broker, source, self._settings.revocation_deadline, drains=self._settings.revocation_drains
        )
        return (notice.run(),)

    @staticmethod
    async def _shut_down(parts: _Parts, metrics_server: HTTPServer | None, tasks: Sequence[asyncio.Task[None]]) -> bool:
        """Stop serving and close everything. Returns whether leases live on."""
        broker = parts.broker
        parts.server.stop()
        if metrics_server is not None:
            metrics_server.stop()
            await metrics_server.close_all_connections()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        parts.repair.remove_socket()
        broker.costs.release()
        await parts.server.close_all_connections()
        leases_live = parts.has_leases()
        save_forecasts(broker.arbiter, broker.contexts.sizes, broker.writer)
        await broker.close()
        await parts.worker.close()
        parts.turn.close()
        parts.service.audit.close()
        return leases_live

    def _make_swaps(self, worker: WorkerLink, check: CheckpointCheck, off: str) -> Swaps:
        times = SwapTimes(
            gate_s=self._settings.gate_timeout / 1000,
            lock_s=self._settings.lock_timeout / 1000,
            checkpoint_s=self._settings.checkpoint_deadline / 1000,
        )
        overhead_mib = {name: spec.overhead_mib for name, spec in self._specs.items()}
        return Swaps(self._backend.monitor, worker, times, overhead_mib, check=check, off=off)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the terminal that started the broker may close

    def _configure(self, broker: Broker) -> None:
        everything = [
            DeviceSpec(device_id=one.device_id, name=one.name, memory_mib=one.memory_mib)
            for one in self._backend.devices
        ]
        managed = self._specs.values()
        for event in configuration(self._settings, everything, managed, host_budget_mib=self._host_budget_mib):
            broker.dispatch(event)
        for spec in managed:
            log.info("device %s: %s, %s", spec.device_id, spec.name, format_memory(spec.memory_mib))
        deadlines, ahead_ms = self._ledger.drain_deadlines(), now_ms() - broker.deadlines.now_ms()
        for device_id, evict_busy in self._ledger.drained().items():
            if device_id in self._specs:
                deadline_ms = deadlines[device_id] + ahead_ms if device_id in deadlines else None
                event = DeviceDrained(
                    at_ms=now_ms(), device_id=device_id, evict_busy=evict_busy, deadline_ms=deadline_ms
                )
                broker.dispatch(event)
        broker.metering.begin(self._ledger, {pool.name: pool.tariff for pool in self._settings.pools})
        broker.habits.begin(self._ledger)

    def _bind(self) -> socket_module.socket:
        try:
            mode = _SOCKET_MODE_SERVICE if self._everyone else _SOCKET_MODE_OWN
            return PausingListener.of(bind_unix_socket(self._socket, mode=mode))
        except ValueError as error:
            raise BrokerUnavailableError(
                f"{self._socket} is there and is not a socket; move it away, or choose another place with --socket"
            ) from error

    def _report_ready(self) -> None:
        log.info("serving on %s", self._socket)
        self._serves()
        if self._ready is not None:
            self._ready.write("ready")
            self._ready.close()

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Return when the broker is to stop; raise what a task raised, since a broker without its sampler, say, must not go on."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            stop.cancel()

    @staticmethod
    async def _prune_history(broker: Broker, audit: AuditLog) -> None:
        """Remove old entries of the ledger and the audit log once a day, and of a ledger over its limit each minute, until cancelled."""
        writer, due_s = broker.writer, time.monotonic()
        while True:
            if is_due := time.monotonic() >= due_s:
                due_s += _DAY_S
                await audit.prune()
            try:
                if is_due or writer.size_bytes > writer.limit_bytes:
                    await writer.prune(wall_ms())
            except LedgerError as error:  # a full disk: what is left is deleted the next time
                log.error("the ledger's old entries were not deleted: %s", error)  # noqa: TRY400 - a full disk is no defect of ours
            await asyncio.sleep(_LIMIT_LOOK_S)

    async def _stop_when_unused(self, broker: Broker) -> None:
        limit_ms = self._settings.idle_exit
        if limit_ms is None:
            await asyncio.Event().wait()
            return
        while broker.kernels or (time.monotonic() - broker.last_use_s) * 1000 < limit_ms:
            left_s = limit_ms / 1000 - (time.monotonic() - broker.last_use_s)
            await asyncio.sleep(max(0.2, min(left_s, 5.0)))
        log.info("no lease and no request for %g s: the broker stops", limit_ms / 1000)
        self._stop.set()
