"""Serves Prometheus metrics on the broker's socket, and over TCP if an administrator has configured an address.

Any process that can connect to the socket may call `GET /v1/metrics`, and any host that can reach the address may call `GET /metrics`. Both
return totals without user names. If `c.GPUBroker.metrics_users` is set, administrators and clients of the TCP address also get totals by
user.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from tornado import iostream, web
from tornado.httpserver import HTTPServer

from fractional_gpu import __version__
from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.server import PausingListener, Server, close_if_unread
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.metrics import PREFIX, Metric
from fractional_gpu.broker.services.status import salvage_counts
from fractional_gpu.core.model import LeaseState

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 16
_SECONDS = 10.0  # per request, and per pause between requests
_MOST_BYTES = 8 * 1024
_MIB = 2**20
_DEVICE = ("device", "pool")
_Sample = tuple[tuple[str, ...], float]

BOOK_METRICS = (
    Metric("gauge", "build_info", "Always 1; labels: version, and whether devices are simulated", ("version", "simulated")),
    Metric("gauge", "device_info", "Always 1; labels: the device's index and name", ("device", "index", "name", "pool")),
    Metric("gauge", "device_memory_bytes", "Memory of the device", _DEVICE),
    Metric("gauge", "device_leasable_bytes", "Total memory available for leases", _DEVICE),
    Metric("gauge", "device_reserved_bytes", "Memory reserved by leases", _DEVICE),
    Metric("gauge", "device_resident_bytes", "Memory used by leases, as last measured", _DEVICE),
    Metric("gauge", "device_stranger_bytes", "Memory used by processes without a lease", _DEVICE),
    Metric("gauge", "device_free_bytes", "Memory that leases can still reserve", _DEVICE),
    Metric("gauge", "device_demand_ratio", "Demand of busy kernels; above 1 they slow each other down", _DEVICE),
    Metric("gauge", "device_draining", "1 while the device is drained", _DEVICE),
    Metric("gauge", "device_goes_away_seconds", "Time to the drain's deadline; 0 if it has passed", _DEVICE),
    Metric("gauge", "device_leases_saved_by_deadline", "Leases planned to be saved by the deadline", _DEVICE),
    Metric("gauge", "device_leases_lost_at_deadline", "Leases that cannot be saved by the deadline", _DEVICE),
    Metric("gauge", "device_lost", "1 while the device is not responding", _DEVICE),
    Metric("gauge", "device_over_committed", "1 while memory in use exceeds what is available for leases", _DEVICE),
    Metric("gauge", "leases", "Leases", ("pool", "state")),
    Metric("gauge", "queue_length", "Kernels waiting for the GPU", ("pool",)),
    Metric("gauge", "queue_longest_wait_seconds", "Longest current wait", ("pool",)),
    Metric("gauge", "queue_over_bound", "Kernels whose long wait is not explained by the turns of others", ("pool",)),
    Metric("gauge", "pool_wait_target_seconds", "The pool's wait_target", ("pool",)),
    Metric("gauge", "pool_wait_bound_ratio", "The pool's wait_bound", ("pool",)),
    Metric("gauge", "seats", "Seats of hub servers", ("pool",)),
    Metric("gauge", "seats_waiting", "Hub servers waiting for a seat", ("pool",)),
    Metric("gauge", "host_saved_bytes", "Host memory used by suspended kernels"),
    Metric("gauge", "host_reserved_bytes", "Host memory reserved for running suspends"),
    Metric("gauge", "host_budget_bytes", "Limit for saved and reserved host memory"),
    Metric("gauge", "host_goes_away_seconds", "Time until the host goes away, after a notice; 0 if it has passed"),
    Metric("gauge", "ledger_trouble", "1 while the broker cannot write its ledger"),
    Metric("gauge", "ledger_bytes", "Size of the ledger"),
    Metric("gauge", "ledger_limit_bytes", "The ledger's ledger_limit"),
    Metric("gauge", "connections", "Connections to the broker's socket", ("peer",)),
    Metric("counter", "forecasts", "Forecasts compared with what happened", ("what",)),
    Metric("gauge", "forecast_error_ratio", "Relative median error of the last 256 forecasts", ("what",)),
    Metric("gauge", "forecast_covered_ratio", "Share of the last 256 forecasts within their bounds; target: 0.8", ("what",)),
)  # fmt: skip


def register_collectors(service: LeaseService, server: Server) -> None:
    """Add collectors for the arbiter's state, the meter and the process to the broker's registry.

    If configured, also add metrics that contain user names to the full registry.
    """
    metrics, counters, terms = service.broker.metrics, service.broker.usage_counters, service.seats.forecasts.hub
    metrics.wait_target_ms = lambda pool: terms(pool).wait_target
    metrics.registry.register(BooksCollector(service, server.connections))
    metrics.registry.register(counters.pools)
    ProcessCollector(registry=metrics.registry)
    if service.settings.metrics_users:
        metrics.full_registry.register(counters.users)


class _ByTCP(web.RequestHandler):
    def initialize(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def get(self) -> None:
        if self.request.path != "/metrics":
            raise web.HTTPError(404)
        encode, content_type = choose_encoder(self.request.headers.get("Accept", ""))
        self.set_header("Content-Type", content_type)
        self.set_header("Server", "jupyter-fractional-gpu")
        connection: Any = self.request.connection
        close_if_unread(connection.stream, self.finish(encode(self._registry)), _SECONDS)

    def write_error(self, status_code: int, **_: Any) -> None:  # noqa: ANN401 - tornado's own
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish("metrics are at GET /metrics\n" if status_code < 500 else "the broker failed; see its log\n")


class _LimitedServer(HTTPServer):
    def initialize(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - tornado's own
        self._open: set[object] = set()
        super().initialize(*args, **kwargs)

    def handle_stream(self, stream: iostream.IOStream, address: tuple[Any, ...]) -> None:
        if len(self._open) >= _MOST_CONNECTIONS:
            stream.close()
            return
        self._open.add(stream)
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        self._open.discard(getattr(server_conn, "stream", None))
        super().on_close(server_conn)


def listen(registry: CollectorRegistry, address: tuple[str, int]) -> HTTPServer | None:
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
    except OSError as error:
        remedy = "free the port or change c.GPUBroker.metrics_address"
        log.error("cannot serve metrics on %s, port %d: %s; %s", host, port, error, remedy)  # noqa: TRY400 - a traceback adds nothing
        return None
    # Scrapes come every few seconds, so they are not logged.
    application = web.Application([(".*", _ByTCP, {"registry": registry})], log_function=lambda _handler: None)
    server = _LimitedServer(
        application,
        max_header_size=_MOST_BYTES,
        max_body_size=_MOST_BYTES,
        max_buffer_size=2 * _MOST_BYTES,
        idle_connection_timeout=_SECONDS,
        body_timeout=_SECONDS,
    )
    server.add_socket(PausingListener.of(listener))
    log.info("serving metrics on %s, port %d", host, port)
    return server


class BooksCollector(Collector):
    def __init__(self, service: LeaseService, connections: Callable[[], tuple[int, int]]) -> None:
        self._service = service
        self._connections = connections

    def describe(self) -> Iterable[Family]:
        return [_family(metric, []) for metric in BOOK_METRICS]

    def collect(self) -> Iterator[Family]:
        samples = {**self._host(), **self._devices(), **self._leases(), **self._forecasts()}
        for metric in BOOK_METRICS:
            yield _family(metric, samples[metric.name])

    def _host(self) -> dict[str, list[_Sample]]:
        arbiter = self._service.broker.arbiter
        users, administrators = self._connections()
        simulated = str(self._service.broker.monitor.kind == "simulated").lower()
        return {
            "build_info": [((__version__, simulated), 1)],
            "host_saved_bytes": [((), arbiter.host_saved_mib * _MIB)],
            "host_reserved_bytes": [((), arbiter.host_reserved_mib * _MIB)],
            "host_budget_bytes": [((), arbiter.host_budget_mib * _MIB)],
            "host_goes_away_seconds": []
            if (deadline_ms := self._service.broker.host_deadline_ms) is None
            else [((), max(0, deadline_ms - now_ms()) / 1000)],
            "ledger_trouble": [((), int(bool(self._service.broker.writer.trouble)))],
            "ledger_bytes": [((), self._service.broker.writer.size_bytes)],
            "ledger_limit_bytes": [((), self._service.broker.writer.limit_bytes)],
            "connections": [(("user",), users), (("administrator",), administrators)],
        }

    def _devices(self) -> dict[str, list[_Sample]]:
        found: dict[str, list[_Sample]] = {
            metric.name: [] for metric in BOOK_METRICS if metric.name.startswith("device_")
        }
        broker = self._service.broker
        salvage = salvage_counts(broker)
        for view in broker.arbiter.devices():
            info = broker.devices.get(view.device_id)
            if info is None:
                continue
            key = (view.device_id, view.pool or "")
            found["device_info"].append(((view.device_id, str(info.index), view.name, view.pool or ""), 1))
            used_mib = broker.used_mib.get(view.device_id, 0)
            free_mib = max(0, view.leasable_mib - view.reserved_mib - view.stranger_mib)
            values = {
                "device_memory_bytes": view.memory_mib * _MIB,
                "device_leasable_bytes": view.leasable_mib * _MIB,
                "device_reserved_bytes": view.reserved_mib * _MIB,
                "device_resident_bytes": max(0, used_mib - view.stranger_mib) * _MIB,
                "device_stranger_bytes": view.stranger_mib * _MIB,
                "device_free_bytes": 0 if view.lost or view.draining else free_mib * _MIB,
                "device_demand_ratio": view.demand_milli / 1000,
                "device_draining": int(view.draining),
                "device_lost": int(view.lost),
                "device_over_committed": int(view.over_committed),
            }
            if view.deadline_ms is not None:
                saved, lost = salvage.get(view.device_id, (0, 0))
                values["device_goes_away_seconds"] = max(0, view.deadline_ms - now_ms()) / 1000
                values["device_leases_saved_by_deadline"], values["device_leases_lost_at_deadline"] = saved, lost
            for name, value in values.items():
                found[name].append((key, value))
        return found

    def _leases(self) -> dict[str, list[_Sample]]:
        broker, pools = self._service.broker, sorted(self._service.broker.arbiter.pools())
        states = Counter((view.spec.pool, view.state) for view in broker.arbiter.leases())
        waiting, delays = broker.arbiter.queue_lengths(), broker.arbiter.queue_delays(now_ms())
        seats = self._service.seats.waiting()
        taken = Counter(seat.pool for seat in self._service.seats.live())
        terms = {pool: self._service.seats.forecasts.hub(pool) for pool in pools}
        living = [state for state in LeaseState if state is not LeaseState.ENDED]
        return {
            "leases": [((pool, state.value), states[pool, state]) for pool in pools for state in living],
            "queue_length": [((pool,), waiting.get(pool, 0)) for pool in pools],
            "queue_longest_wait_seconds": [((pool,), delays[pool].longest_ms / 1000) for pool in pools],
            "queue_over_bound": [((pool,), delays[pool].over_bound) for pool in pools],
            "pool_wait_target_seconds": [((pool,), terms[pool].wait_target / 1000) for pool in pools],
            "pool_wait_bound_ratio": [((pool,), terms[pool].wait_bound / 1000) for pool in pools],
            "seats": [((pool,), taken[pool]) for pool in pools],
            "seats_waiting": [((pool,), seats.get(pool, 0)) for pool in pools],
        }

    def _forecasts(self) -> dict[str, list[_Sample]]:
        errors = self._service.broker.arbiter.forecasts.errors()
        return {
            "forecasts": [((one.what,), one.count) for one in errors],
            "forecast_error_ratio": [((one.what,), one.median_error_permille / 1000) for one in errors],
            "forecast_covered_ratio": [((one.what,), one.covered_permille / 1000) for one in errors],
        }


def _family(metric: Metric, samples: Iterable[_Sample]) -> Family:
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(PREFIX + metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
