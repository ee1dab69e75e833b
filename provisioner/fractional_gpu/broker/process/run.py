"""One run of a broker. `BrokerRun` creates its parts from the settings, the devices and the ledger, answers requests, and shuts down."""

import asyncio
import logging
import os
import signal
import socket as socket_module
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
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
from fractional_gpu.broker.monitoring.host_memory import OomProtection, host_budget_mib
from fractional_gpu.broker.monitoring.sampler import Sampler
from fractional_gpu.broker.monitoring.watchdog import notify_systemd, watchdog
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
from fractional_gpu.broker.services.culling import Culler, CullRule
from fractional_gpu.broker.services.paging import Pager
from fractional_gpu.broker.services.revocation_notice import RevocationNotice
from fractional_gpu.broker.services.yielders import Yielder
from fractional_gpu.broker.supervision.survivors import AbandonedLeases
from fractional_gpu.broker.swap.checkpointability import why_not_checkpointable
from fractional_gpu.broker.swap.suspend import SwapTimes
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.config import Settings
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import DeviceDrained, DeviceSeen, Event, HostMemorySeen, PoolConfigured
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.core.units import format_memory, host_capacity
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
_THREADS = min(32, (os.cpu_count() or 1) + 4)  # for blocking work; asyncio's default
_SOCKET_MODE_OWN = 0o600
_SOCKET_MODE_SERVICE = 0o666  # a system service serves every user, and peer credentials distinguish them


def device_specs(settings: Settings, backend: Backend) -> tuple[DeviceSpec, ...]:
    everything = [
        DeviceSpec(
            device_id=one.device_id,
            name=one.name,
            memory_mib=one.memory_mib,
            overhead_mib=settings.overhead_mib(simulated=backend.simulated),
            why_not=one.why_not,
            why_no_move=one.why_no_move,
        )
        for one in backend.devices
    ]
    names = {spec.device_id: spec.name for spec in everything}
    check_pools(settings.pool_specs(everything), names, simulated=backend.simulated)
    return settings.managed(everything)


def configuration(
    settings: Settings, everything: Sequence[DeviceSpec], managed: Iterable[DeviceSpec], *, host_budget_mib: int
) -> Iterator[Event]:
    """Yield the events that tell the arbiter about devices, pools and the host budget. `everything` lists all of the machine's devices."""
    at_ms = now_ms()
    for spec in managed:
        yield DeviceSeen(at_ms=at_ms, device=spec)
    for pool in settings.pool_specs(everything):
        yield PoolConfigured(at_ms=at_ms, pool=pool)
    # This budget applies until the sampler has measured the host's memory. Without a budget, any saved state that is found would exceed it.
    yield HostMemorySeen(at_ms=at_ms, budget_mib=host_budget_mib)


@dataclass(kw_only=True)
class BrokerRun:
    """One run of a broker. Once it accepts connections, it calls `serves` and reports to the starting program through `ready`."""

    settings: Settings
    backend: Backend
    specs: tuple[DeviceSpec, ...]
    claims: list[NameClaim]
    ledger: Ledger
    socket: str
    ready: TextIO | None
    everyone: bool
    serves: Callable[[], object] = lambda: None
    worker_socket: str | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    leases_live: bool = False  # whether leases, and so their kernels, live when it ends
    broker: Broker = field(init=False)
    service: LeaseService = field(init=False)
    server: Server = field(init=False)
    repair: Repair = field(init=False)
    metrics_server: HTTPServer | None = None

    async def main(self) -> None:
        """Run until SIGTERM, SIGINT, the idle exit, or the deletion of one of the broker's files.

        Raises OSError if the broker cannot start all the threads it will need.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the terminal that started the broker may close
        loop.set_default_executor(StartedThreads(_THREADS, "broker"))
        start_lanes()
        for claim in self.claims:
            drain_claim_queries(claim)
        async with AsyncExitStack() as worker:
            work = await self._make_parts(worker)
            tasks = [asyncio.create_task(one) for one in (*work, self.stop.wait())]
            try:
                log.info("serving on %s", self.socket)
                self.serves()
                if self.ready is not None:
                    self.ready.write("ready")
                    self.ready.close()
                with watchdog(self.settings.hang_limit):
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()  # raise its error: a broker without its sampler, for example, must not continue
            finally:
                await self._shut_down(tasks)
        log.info("stopped; %s", "leases continue" if self.leases_live else "no leases remain")

    def has_leases(self) -> bool:
        return bool(self.broker.kernels or self.service.seats.live() or lost_sentence(self.broker.lost))

    async def _make_parts(self, end: AsyncExitStack) -> list[Coroutine[Any, Any, object]]:
        """Restore leases and seats, and return the broker's tasks. The broker ends when one of the tasks ends or fails."""
        settings, ledger = self.settings, self.ledger
        ACCOUNTS.unknown = settings.account_of_unknown_uids
        specs = {spec.device_id: spec for spec in self.specs}
        files = LeaseFiles(
            lease_folder(self.socket, simulated=self.backend.simulated), partial(make_socket_folder, self.socket)
        )
        driver, swaps = await self._make_broker(specs, files, end)
        broker = self.broker
        total_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
        budget_mib = settings.host_budget_mib(total_mib)
        after_ms = settings.page_out_after
        pager = None if after_ms is None else Pager(broker, after_ms)

        def budget(saved_mib: int) -> int:
            in_swap_mib = 0 if pager is None else pager.swapped_mib
            return host_budget_mib(budget_mib + in_swap_mib, total_mib, saved_mib)

        sampler = Sampler(broker, specs, budget)
        broker.operations.sample = sampler.refresh
        self._configure(budget_mib)
        capacity = host_capacity(
            budget_mib, max((spec.memory_mib for spec in self.specs), default=0), settings.first_fraction
        )
        log.info("suspended kernels may use up to %s of host memory: %s", format_memory(budget_mib), capacity)
        await self._take_back_leases(files, swaps)
        await sampler.sample()  # so that leases' use is known before any request is answered
        await driver.try_checkpoint(broker, swaps)
        await broker.hard_caps.recall()

        # The API.
        service = self.service = LeaseService(broker, settings, refresh=sampler.refresh)
        service.seats.recover(ledger)
        await service.audit.check()
        self.server = make_server(service, self.socket)
        self.repair = Repair(
            self.socket, broker.writer, is_needed=lambda: settings.idle_exit is None or self.has_leases()
        )
        self.server.add_socket(self._bind())
        self.repair.begin()
        if settings.metrics_address is not None:
            self.metrics_server = listen(broker.metrics.full_registry, settings.metrics_address)

        # Background tasks.
        work: list[Coroutine[Any, Any, object]] = [
            sampler.run(),
            self.repair.run(),
            broker.gpu_activity.run(),
            broker.metering.run(),
            broker.hard_caps.run(),
            driver.run(broker, swaps),
            OomProtection(broker, ledger.path.with_suffix(".oom.json")).run(),
            service.seats.run(),
            files.run(),
            AbandonedLeases(broker).run(),
            self._prune_history(broker, service.audit),
            save_forecasts_periodically(broker.arbiter, broker.contexts.sizes, broker.writer),
            broker.metrics.watch_loop(),
            notify_systemd(),
        ]
        if pager is not None:
            work.append(pager.run())
        if settings.idle_exit is not None:
            work.append(self._stop_when_unused(settings.idle_exit / 1000))
        if (source := settings.revocation_notice) is not None:
            deadline_ms, drains = settings.revocation_deadline, settings.revocation_drains
            work.append(RevocationNotice(broker, source, deadline_ms, drains=drains).run())
        broker.culls_idle = settings.culls_idle
        if settings.culls_idle:
            rule = CullRule(
                after_ms=settings.cull_idle_after, above_percent=settings.cull_above, warning_ms=settings.cull_warning
            )
            work.append(Culler(broker, rule, partial(service.end_kernel, "The GPU broker")).run())
        everyone = settings.yield_for_everyone
        asks = (Yielder(broker, one, everyone=everyone, refresh=sampler.refresh) for one in settings.yielders)
        return [*work, *(one.run() for one in asks)]

    async def _make_broker(
        self, specs: dict[str, DeviceSpec], files: LeaseFiles, end: AsyncExitStack
    ) -> tuple[DriverStart, Swaps]:
        settings, ledger = self.settings, self.ledger
        turn = WorkerClaim(Path(f"{self.socket}.worker"))
        end.callback(turn.close)
        worker = WorkerLink(self.backend.name, claim=turn, service=self.worker_socket)
        end.push_async_callback(worker.close)
        driver = DriverStart(worker, specs)
        off = await driver.begin()
        arbiter = Arbiter(forecasts=load_forecasts(ledger))
        times = SwapTimes(
            gate_s=settings.gate_timeout / 1000,
            lock_s=settings.lock_timeout / 1000,
            checkpoint_s=settings.checkpoint_deadline / 1000,
        )
        overhead_mib = {name: spec.overhead_mib for name, spec in specs.items()}
        check = partial(why_not_checkpointable, arbiter)
        swaps = Swaps(self.backend.monitor, worker, times, overhead_mib, check=check, off=off)
        self.broker = Broker(
            arbiter,
            self.backend.monitor,
            swaps,
            LedgerWriter(ledger, limit_bytes=settings.ledger_limit * 2**20),
            devices={device.device_id: device for device in self.backend.devices if device.device_id in specs},
            files=files,
            context_sizes=load_context_sizes(ledger),
        )
        return driver, swaps

    async def _take_back_leases(self, files: LeaseFiles, swaps: Swaps) -> None:
        broker, ledger = self.broker, self.ledger
        records = await asyncio.to_thread(take_records, files.folder, ledger)
        for record in records:
            log.warning("the ledger has no lease %s: restored it from its backup record", record.spec.lease_id[:8])
        uid = None if self.everyone else os.getuid()
        known = {record.spec.lease_id for record in records}
        broker.lost = await ATTACHING.run(lost_kernels, uid, self.socket, ledger, known)
        if sentence := lost_sentence(broker.lost):
            log.warning("%s", sentence)
        await recover(broker, swaps, ledger, records)
        broker.scans.kernels = broker.kernels

    async def _shut_down(self, tasks: Sequence[asyncio.Task[object]]) -> None:
        broker = self.broker
        self.server.stop()
        if self.metrics_server is not None:
            self.metrics_server.stop()
            await self.metrics_server.close_all_connections()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.repair.remove_socket()
        broker.costs.release()
        await self.server.close_all_connections()
        self.leases_live = self.has_leases()
        save_forecasts(broker.arbiter, broker.contexts.sizes, broker.writer)
        await broker.close()
        self.service.audit.close()

    def _configure(self, host_budget_mib: int) -> None:
        broker, ledger, specs = self.broker, self.ledger, {spec.device_id for spec in self.specs}
        everything = [
            DeviceSpec(device_id=one.device_id, name=one.name, memory_mib=one.memory_mib)
            for one in self.backend.devices
        ]
        for event in configuration(self.settings, everything, self.specs, host_budget_mib=host_budget_mib):
            broker.dispatch(event)
        for spec in self.specs:
            log.info("device %s: %s, %s", spec.device_id, spec.name, format_memory(spec.memory_mib))
        deadlines, ahead_ms = ledger.drain_deadlines(), now_ms() - broker.deadlines.now_ms()
        for device_id, evict in ledger.drained().items():
            if device_id in specs:
                deadline_ms = deadlines[device_id] + ahead_ms if device_id in deadlines else None
                broker.dispatch(
                    DeviceDrained(at_ms=now_ms(), device_id=device_id, evict_busy=evict, deadline_ms=deadline_ms)
                )
        broker.metering.begin(ledger, {pool.name: pool.tariff for pool in self.settings.pools})
        broker.habits.begin(ledger)

    def _bind(self) -> socket_module.socket:
        try:
            mode = _SOCKET_MODE_SERVICE if self.everyone else _SOCKET_MODE_OWN
            return PausingListener.of(bind_unix_socket(self.socket, mode=mode))
        except ValueError as error:
            raise BrokerUnavailableError(
                f"{self.socket} exists but is not a socket; move it away, or choose another path with --socket"
            ) from error

    @staticmethod
    async def _prune_history(broker: Broker, audit: AuditLog) -> None:
        writer, due_s = broker.writer, time.monotonic()
        while True:
            if is_due := time.monotonic() >= due_s:
                due_s += _DAY_S
                await audit.prune()
            try:
                if is_due or writer.size_bytes > writer.limit_bytes:
                    await writer.prune(wall_ms())
            except LedgerError as error:  # such as a full disk; the rest is deleted the next time
                log.error("cannot delete the ledger's old entries: %s", error)  # noqa: TRY400 - a full disk is no defect of ours
            await asyncio.sleep(_LIMIT_LOOK_S)

    async def _stop_when_unused(self, limit_s: float) -> None:
        while self.broker.kernels or time.monotonic() - self.broker.last_use_s < limit_s:
            left_s = limit_s - (time.monotonic() - self.broker.last_use_s)
            await asyncio.sleep(max(0.2, min(left_s, 5.0)))
        log.info("no leases and no requests for %g s: stopping the broker", limit_s)
