"""What Prometheus is told of the books as they are: read off when it asks, never kept."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from fractional_gpu import __version__
from fractional_gpu.broker.api.lease_service import Service
from fractional_gpu.broker.metrics import PREFIX, Metric
from fractional_gpu.core.model import LeaseState

__all__ = ["SEEN", "View"]

_MIB = 2**20
_DEVICE = ("device", "pool")
_Sample = tuple[tuple[str, ...], float]

SEEN = (
    Metric("gauge", "build_info", "1; which version serves, and whether its devices are simulated", ("version", "simulated")),
    Metric("gauge", "device_info", "1; which device is which", ("device", "index", "name", "pool")),
    Metric("gauge", "device_memory_bytes", "Memory of the device", _DEVICE),
    Metric("gauge", "device_leasable_bytes", "What leases may have of it together", _DEVICE),
    Metric("gauge", "device_reserved_bytes", "Reserved by leases", _DEVICE),
    Metric("gauge", "device_resident_bytes", "In use by the processes of leases, as last measured", _DEVICE),
    Metric("gauge", "device_stranger_bytes", "In use by processes of no lease", _DEVICE),
    Metric("gauge", "device_free_bytes", "What a lease can still reserve", _DEVICE),
    Metric("gauge", "device_draining", "1 while an administrator has it emptied", _DEVICE),
    Metric("gauge", "device_lost", "1 while it does not answer", _DEVICE),
    Metric("gauge", "device_over_committed", "1 while reservations and strangers exceed what may be leased", _DEVICE),
    Metric("gauge", "leases", "Leases", ("pool", "state")),
    Metric("gauge", "queue_length", "Kernels that wait for the GPU", ("pool",)),
    Metric("gauge", "seats", "Seats of hub servers", ("pool",)),
    Metric("gauge", "seats_waiting", "Hub servers that wait for a seat", ("pool",)),
    Metric("gauge", "host_saved_bytes", "Host memory that suspended kernels take"),
    Metric("gauge", "host_reserved_bytes", "Host memory reserved for suspends under way"),
    Metric("gauge", "host_budget_bytes", "Host memory that both together may take"),
    Metric("gauge", "connections", "Connections to the broker's socket", ("peer",)),
    Metric("counter", "forecasts", "Forecasts that were compared with what happened", ("what",)),
    Metric("gauge", "forecast_error_ratio", "Median error of the last 256, as a share of what happened", ("what",)),
    Metric("gauge", "forecast_covered_ratio", "Share of the last 256 that lay between their bounds; 0.8 is what these promise", ("what",)),
)  # fmt: skip


class View(Collector):
    """Collects all of `SEEN`. `connections` says how many there are, of users and of administrators. On the broker's loop only."""

    def __init__(self, service: Service, connections: Callable[[], tuple[int, int]]) -> None:
        self._service = service
        self._connections = connections

    def describe(self) -> Iterable[Family]:
        """Return what there is without asking the books."""
        return [_family(metric, []) for metric in SEEN]

    def collect(self) -> Iterator[Family]:
        """Yield everything as it is now."""
        samples = {**self._host(), **self._devices(), **self._leases(), **self._forecasts()}
        for metric in SEEN:
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
            "connections": [(("user",), users), (("administrator",), administrators)],
        }

    def _devices(self) -> dict[str, list[_Sample]]:
        found: dict[str, list[_Sample]] = {metric.name: [] for metric in SEEN if metric.name.startswith("device_")}
        broker = self._service.broker
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
                "device_draining": int(view.draining),
                "device_lost": int(view.lost),
                "device_over_committed": int(view.over_committed),
            }
            for name, value in values.items():
                found[name].append((key, value))
        return found

    def _leases(self) -> dict[str, list[_Sample]]:
        broker, pools = self._service.broker, sorted(self._service.broker.arbiter.pools())
        states = Counter((view.spec.pool, view.state) for view in broker.arbiter.leases())
        waiting = broker.arbiter.queue_lengths()
        seats = self._service.seats.waiting()
        taken = Counter(seat.pool for seat in self._service.seats.live())
        living = [state for state in LeaseState if state is not LeaseState.ENDED]
        return {
            "leases": [((pool, state.value), states[pool, state]) for pool in pools for state in living],
            "queue_length": [((pool,), waiting.get(pool, 0)) for pool in pools],
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
