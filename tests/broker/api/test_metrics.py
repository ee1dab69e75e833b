"""Each metric moves when the event it counts happens, in Prometheus's format; none names a user unless configured to."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fractional_gpu.broker.accounting.counters import POOL_METRICS
from fractional_gpu.broker.api.metrics_routes import BOOK_METRICS, listen
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.metrics import COUNTED, PREFIX, Metrics
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import CapBreached, LeaseRefused, Resume, StateChanged, Suspend
from fractional_gpu.core.events import ResumeFinished, ResumeOutcome, SuspendFinished, SuspendOutcome, Tick
from fractional_gpu.core.model import Breach, LeaseState
from fractional_gpu.protocol.messages import AcquireRequest, DrainRequest, ProgressKind
from fractional_gpu.protocol.seats import SeatRequest
from tests.broker.live import BECOME_NOBODY, DEADLINE_S, LiveBroker, _Connection, live_broker, started_for
from tests.support.ports import free_port
from tests.support.world import until

pytestmark = pytest.mark.promise("metrics")

Values = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
TICK = Tick(at_ms=0)


def text_of(live: LiveBroker, accept: str = "text/plain") -> str:
    connection = _Connection(live.socket)
    try:
        connection.request("GET", "/v1/metrics", headers={"Accept": accept})
        reply = connection.getresponse()
        text = reply.read().decode()
        assert reply.status == 200, text
        return text
    finally:
        connection.close()


def values_of(text: str) -> Values:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def value(values: Values, name: str, **labels: str) -> float:
    """Return a sample; a metric that was never counted is missing."""
    return values.get((PREFIX + name, frozenset(labels.items())), 0.0)


def device(values: Values, name: str) -> float:
    (found,) = [one for (known, _), one in values.items() if known == PREFIX + name]
    return found


@pytest.fixture
def fresh() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


def test_a_day_in_the_life_of_a_kernel_is_counted(fresh: LiveBroker) -> None:
    with started_for_lease(fresh) as (lease_id, client):
        before = values_of(text_of(fresh))
        assert value(before, "leases", pool="default", state="unarmed") == 1
        list(client.acquire(lease_id, AcquireRequest(wait_ms=10_000)))
        after = values_of(text_of(fresh))
        assert value(after, "grants_total", pool="default") == 1
        assert value(after, "leases", pool="default", state="resident") == 1
        assert value(after, "leases", pool="default", state="unarmed") == 0
        assert device(after, "device_reserved_bytes") == 256 * 2**20
        assert device(after, "device_free_bytes") == device(after, "device_leasable_bytes") - 256 * 2**20
        list(client.acquire(lease_id, AcquireRequest(wait_ms=10_000)))
        again = values_of(text_of(fresh))
        assert value(again, "wait_seconds_count", pool="default") == 2
        assert value(again, "wait_seconds_bucket", pool="default", le="0.1") >= 1, "who is there already waits no time"
        client.release(lease_id)
    over = values_of(text_of(fresh))
    assert value(over, "leases_admitted_total", pool="default") == 1
    assert value(over, "leases_ended_total", reason="released") == 1
    assert value(over, "ledger_write_seconds_count") > value(before, "ledger_write_seconds_count") > 0


class started_for_lease:  # noqa: N801 - a context manager
    """A lease with an attached process, and a client with its token."""

    def __init__(self, live: LiveBroker) -> None:
        self._live = live
        self._lease = live.lease()
        self._started = started_for(self._lease.lease_id)
        self._client = BrokerClient(live.socket, token=self._lease.token)

    def __enter__(self) -> tuple[str, BrokerClient]:
        process = self._started.__enter__()
        attached = self._live.call(
            "POST", f"/v1/leases/{self._lease.lease_id}/attach", process, token=self._lease.token
        )
        assert attached.status == 200, attached
        return self._lease.lease_id, self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._started.__exit__(None, None, None)


def test_who_waits_is_in_the_queue_and_who_gives_up_is_counted(fresh: LiveBroker) -> None:
    fresh.call("POST", "/v1/devices/0/drain", {})
    with started_for_lease(fresh) as (lease_id, client):
        lines = client.acquire(lease_id, AcquireRequest(wait_ms=600_000))
        assert next(lines).kind == ProgressKind.WAITING
        during = values_of(text_of(fresh))
        assert value(during, "queue_length", pool="default") == 1
        assert device(during, "device_draining") == 1
        assert device(during, "device_free_bytes") == 0
        assert isinstance(lines, Generator)
        lines.close()  # hangs up
        until(lambda: value(values_of(text_of(fresh)), "queue_length", pool="default") == 0, "its ticket is withdrawn")
    after = values_of(text_of(fresh))
    assert value(after, "waits_abandoned_total", pool="default") == 1
    assert value(after, "wait_seconds_count", pool="default") == 0


def test_a_deadline_is_there_while_a_device_or_the_host_goes_away(fresh: LiveBroker) -> None:
    absent = ("device_goes_away_seconds", "device_leases_saved_by_deadline", "device_leases_lost_at_deadline")
    names = [f"jupyter_gpu_{name}{{" for name in absent] + ["\njupyter_gpu_host_goes_away_seconds "]
    assert not any(name in text_of(fresh) for name in names)
    fresh.call("POST", "/v1/devices/0/drain", {"deadline_in_ms": 600_000})
    fresh.broker.host_deadline_ms = now_ms() + 30_000
    during = values_of(text_of(fresh))
    assert 0 < device(during, "device_goes_away_seconds") <= 600
    assert (device(during, "device_leases_saved_by_deadline"), device(during, "device_leases_lost_at_deadline")) == (
        0,
        0,
    )
    assert 0 < value(during, "host_goes_away_seconds") <= 30
    fresh.call("POST", "/v1/devices/0/undrain", {})
    fresh.broker.host_deadline_ms = None
    assert not any(name in text_of(fresh) for name in names)


def test_a_declined_request_is_counted_by_its_reason(fresh: LiveBroker) -> None:
    lease = fresh.lease()
    with started_for(lease.lease_id) as process:
        fresh.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
        fresh.call("POST", f"/v1/leases/{lease.lease_id}/pin", {"duration_ms": 5 * 3_600_000})
    (found,) = [
        (dict(labels)["about"], count)
        for (name, labels), count in values_of(text_of(fresh)).items()
        if name == PREFIX + "declined_total"
    ]
    assert found == ("pin", 1)


def test_no_label_says_who_anybody_is(fresh: LiveBroker) -> None:
    lease = fresh.lease(kernel_id="secret-kernel", label="secret.ipynb")
    with SeatClient(fresh.socket, acting_for="secret-boss") as client:
        list(
            client.take_seat(
                SeatRequest(owner="secret-ada", server="secret-server", pool="default", fraction_milli=250)
            )
        )
        client.drain("0", DrainRequest())
    text = text_of(fresh)
    assert "secret" not in text
    assert lease.lease_id not in text
    assert "root" not in text
    assert fresh.socket.rpartition("/")[0] not in text


_AS_NOBODY = (
    "import socket, sys\n"
    + BECOME_NOBODY
    + """
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    line.sendall(b"GET /v1/metrics HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
    while part := line.recv(65536):
        sys.stdout.buffer.write(part)
"""
)


def test_users_are_named_where_that_is_configured_to_administrators_alone() -> None:
    with live_broker(metrics_users=True) as live, SeatClient(live.socket) as client:
        seat = list(client.take_seat(SeatRequest(owner="secret-ada", pool="default", fraction_milli=250)))[-1]
        lease = live.call("POST", "/v1/leases", {"fraction_milli": 250, "seat": seat.seat_id}, token=seat.token).body
        with started_for(lease["lease_id"]) as process:
            attached = live.call("POST", f"/v1/leases/{lease['lease_id']}/attach", process, token=lease["token"])
            assert attached.status == 200, attached
            text = text_of(live)
            whom = {"pool": "default", "account": "hub", "user": "secret-ada"}
            assert value(values_of(text), "user_reserved_gpu_seconds_total", **whom) > 0
            as_nobody = subprocess.run([sys.executable, "-c", _AS_NOBODY, live.socket], capture_output=True, check=True)
            seen = as_nobody.stdout.decode()
    assert seen.startswith("HTTP/1.1 200 "), seen
    assert f"{PREFIX}reserved_gpu_seconds_total{{" in seen
    assert "secret" not in seen
    assert f"{PREFIX}user_" not in seen


def test_a_ledger_that_cannot_be_written_is_told(fresh: LiveBroker) -> None:
    assert value(values_of(text_of(fresh)), "ledger_trouble") == 0
    fresh.disk.full = True
    assert fresh.call("POST", "/v1/leases", {"fraction_milli": 250}).error["reason"] == "ledger"
    assert value(values_of(text_of(fresh)), "ledger_trouble") == 1
    fresh.disk.full = False
    fresh.lease()
    assert value(values_of(text_of(fresh)), "ledger_trouble") == 0


def test_the_ledgers_size_and_limit_are_told(fresh: LiveBroker) -> None:
    fresh.lease()
    values = values_of(text_of(fresh))
    assert value(values, "ledger_bytes") == fresh.disk.size_bytes() > 0
    assert value(values, "ledger_limit_bytes") == 4 * 2**30


def test_a_wait_over_the_pools_target_is_counted() -> None:
    with live_broker(pools={"default": {"wait_target": "1ms", "wait_bound": "2%"}}) as live:
        live.call("POST", "/v1/devices/0/drain", {})
        with started_for_lease(live) as (lease_id, client):
            lines = client.acquire(lease_id, AcquireRequest(wait_ms=600_000))
            assert next(lines).kind == ProgressKind.WAITING
            until(
                lambda: value(values_of(text_of(live)), "queue_longest_wait_seconds", pool="default") > 0.001,
                "the cell has waited longer than a millisecond",
            )
            live.call("POST", "/v1/devices/0/undrain", {})
            assert list(lines)[-1].kind == ProgressKind.GRANTED
            list(client.acquire(lease_id, AcquireRequest(wait_ms=10_000)))
        values = values_of(text_of(live))
    assert value(values, "waits_over_target_total", pool="default") == 1
    assert value(values, "wait_seconds_count", pool="default") == 2
    assert value(values, "pool_wait_target_seconds", pool="default") == 0.001
    assert value(values, "pool_wait_bound_ratio", pool="default") == 0.02


# -- what the arbiter says, one by one --------------------------------------------------------------------------------------


def counted(*steps: Callable[[Metrics], None]) -> Values:
    metrics = Metrics(Arbiter())
    for step in steps:
        step(metrics)
    return values_of(generate_latest(metrics.registry).decode())


def suspend(operation_id: int, *, preempt: bool = False) -> Suspend:
    return Suspend(
        lease_id="x", operation_id=operation_id, generation=1, device_ids=("d",), host_mib=1, preempt=preempt
    )


def suspended(operation_id: int, outcome: SuspendOutcome, saved_mib: int = 0) -> SuspendFinished:
    return SuspendFinished(
        at_ms=0, lease_id="x", operation_id=operation_id, generation=1, outcome=outcome, saved_mib=saved_mib
    )


def test_swaps_are_counted_by_what_became_of_them() -> None:
    def resume(operation_id: int, source: str) -> Resume:
        return Resume(
            lease_id="x",
            operation_id=operation_id,
            generation=1,
            device_ids=("d",),
            from_device_ids=(source,),
            reserve_mib=1,
        )

    def resumed(operation_id: int, outcome: ResumeOutcome) -> ResumeFinished:
        return ResumeFinished(at_ms=0, lease_id="x", operation_id=operation_id, generation=1, outcome=outcome)

    values = counted(
        lambda metrics: metrics.saw(
            TICK, [suspend(1, preempt=True), suspend(2), resume(3, "d"), resume(4, "e"), resume(5, "e")]
        ),
        lambda metrics: metrics.saw(suspended(1, SuspendOutcome.SAVED, 100), []),
        lambda metrics: metrics.saw(suspended(2, SuspendOutcome.ABORTED), []),
        lambda metrics: metrics.saw(resumed(3, ResumeOutcome.RESTORED), []),
        lambda metrics: metrics.saw(resumed(4, ResumeOutcome.RESTORED), []),
        lambda metrics: metrics.saw(resumed(5, ResumeOutcome.UNKNOWN), []),
        lambda metrics: metrics.saw(suspended(99, SuspendOutcome.SAVED, 100), []),
    )
    assert [value(values, "swap_seconds_count", kind=kind) for kind in ("suspend", "resume", "move")] == [1, 1, 1]
    assert value(values, "swap_bytes_total", kind="suspend") == 100 * 2**20
    assert value(values, "swap_failures_total", kind="suspend", outcome="aborted") == 1
    assert value(values, "swap_failures_total", kind="move", outcome="unknown") == 1
    assert value(values, "preemptions_total", pool="") == 1


def test_quarantines_refusals_and_breaches_are_counted() -> None:
    def change(new: LeaseState) -> StateChanged:
        return StateChanged(lease_id="x", old=LeaseState.RESIDENT, new=new, generation=1, device_id=None, saved_mib=0)

    refusal = LeaseRefused(lease_id="x", reason="full", sentence="no")
    breach = CapBreached(lease_id="x", action=Breach.KILL, sentence="too much")
    values = counted(
        lambda metrics: metrics.saw(
            TICK, [change(LeaseState.QUARANTINED), change(LeaseState.SUSPENDED), refusal, breach]
        )
    )
    assert value(values, "quarantines_total", pool="") == 1
    assert value(values, "leases_refused_total", reason="full") == 1
    assert value(values, "cap_breaches_total", action=Breach.KILL.value) == 1


async def test_a_loop_that_is_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, seen = Metrics(Arbiter()), asyncio.Event()
    monkeypatch.setattr("fractional_gpu.broker.metrics._LAG_INTERVAL_S", 0.001)
    histogram = metrics._metrics["loop_lag_seconds"]
    observe = histogram.observe

    def noting(lag_s: float) -> None:
        observe(lag_s)
        seen.set()

    monkeypatch.setattr(histogram, "observe", noting)
    task = asyncio.create_task(metrics.watch_loop())
    async with asyncio.timeout(DEADLINE_S):
        await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- the form ---------------------------------------------------------------------------------------------------------------


def test_everything_that_is_documented_is_there_and_nothing_else(fresh: LiveBroker) -> None:
    families = {one.name: one for one in text_string_to_metric_families(text_of(fresh)) if one.name.startswith(PREFIX)}
    documented = {PREFIX + metric.name: metric for metric in (*COUNTED, *BOOK_METRICS, *POOL_METRICS)}
    created = {name for name in families if name.endswith("_created")}
    assert set(families) - created == set(documented)
    for name, metric in documented.items():
        assert (families[name].type, families[name].documentation) == (metric.kind, metric.help)
        assert all(set(sample.labels) - {"le"} == set(metric.labels) for sample in families[name].samples), name


# -- by TCP -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def port(fresh: LiveBroker) -> Iterator[int]:
    number = free_port()

    async def begin() -> Any:  # noqa: ANN401 - a server
        return listen(fresh.broker.metrics.registry, ("127.0.0.1", number))

    server = fresh.on_loop(begin)
    assert server is not None
    yield number

    async def end() -> None:
        server.stop()
        await server.close_all_connections()

    fresh.on_loop(end)


def ask(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as line:
        line.sendall(request)
        answer = b""
        while part := line.recv(65536):
            answer += part
    return answer


def test_prometheus_reads_it_by_tcp(port: int) -> None:
    answer = ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").decode()
    head, _, text = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "Content-Type: text/plain; version=" in head
    assert value(values_of(text), "queue_length", pool="default") == 0
    assert (PREFIX + "queue_length", frozenset({("pool", "default")})) in values_of(text)


def test_an_address_that_is_taken_is_said_and_the_broker_goes_on(
    fresh: LiveBroker, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def begin() -> Any:  # noqa: ANN401 - a server
        return listen(fresh.broker.metrics.registry, ("127.0.0.1", port))

    assert fresh.on_loop(begin) is None
    assert f"cannot serve metrics on 127.0.0.1, port {port}: " in caplog.text
    assert fresh.is_alive()


# -- the page ---------------------------------------------------------------------------------------------------------------
