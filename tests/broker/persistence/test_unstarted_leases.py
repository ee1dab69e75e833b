"""A lease that never had a process leaves only a count in the ledger; a lease that had one keeps its history."""

import os
from collections.abc import Iterator

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.messages import AcquireRequest, LeaseRequest
from tests.broker.live import LiveBroker, live_broker, started_for
from tests.support.world import until

pytestmark = pytest.mark.promise("unstarted")


@pytest.fixture
def fresh() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


def written(live: LiveBroker) -> tuple[dict[str, int], int]:
    """Return the rows of each table and the file's pages, once everything is written."""
    live.on_loop(live.broker.writer.flushed)
    tables = [str(row["name"]) for row in live.disk._read("SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows = {table: live.disk._read(f"SELECT count(*) FROM {table}")[0][0] for table in tables}  # noqa: S608 - our own names
    return rows, live.disk._pragma("page_count")


def test_leases_that_never_start_leave_a_count_by_user_and_hour_and_nothing_else(fresh: LiveBroker) -> None:
    """With or without room kept for their start, and with further requests during their life."""
    with BrokerClient(fresh.socket) as client:
        rows, pages = written(fresh)
        for number in range(300):
            request = LeaseRequest(
                fraction_milli=250, label=f"{number:0200}", kernel_id="k" * 200, gated=number % 2 > 0
            )
            lease = client.create_lease(request)
            if number % 100 == 1:
                with BrokerClient(fresh.socket, token=lease.token) as owner:
                    list(owner.acquire(lease.lease_id, AcquireRequest(wait_ms=0)))
            client.release(lease.lease_id)
    after, pages_after = written(fresh)
    counted = after.pop("unstarted", 0) - rows.pop("unstarted", 0)
    del rows["sqlite_sequence"], after["sqlite_sequence"]
    assert after == rows
    assert pages_after <= pages + 16, "300 leases take more than 100 pages if each keeps its rows"
    assert counted <= 2, "the test lasted for less than an hour"
    ((uid, leases),) = fresh.disk._read("SELECT uid, sum(leases) FROM unstarted GROUP BY uid")
    assert (uid, leases) == (os.getuid(), 300)


def test_a_refused_lease_leaves_nothing(fresh: LiveBroker) -> None:
    rows, _ = written(fresh)
    for _ in range(20):
        assert fresh.call("POST", "/v1/leases", {"fraction_milli": 333}).status == 409
    assert written(fresh)[0] == rows


def test_a_lease_that_had_a_process_keeps_its_history(fresh: LiveBroker) -> None:
    lease = fresh.lease()
    with started_for(lease.lease_id) as process:
        fresh.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
    until(lambda: fresh.state(lease.lease_id) == "unattached", "its process has ended")
    fresh.call("DELETE", f"/v1/leases/{lease.lease_id}", token=lease.token)
    rows, _ = written(fresh)
    assert (rows["leases"], rows.get("unstarted", 0)) == (1, 0)
    reasons = [line.reason for line in fresh.disk.story(lease.lease_id)]
    assert reasons == ["lease.admitted", "attached", "process.exited", "lease.released"]
    assert len(fresh.disk.points(lease.lease_id)) >= 3
    assert fresh.disk.has_lease(lease.lease_id)

    async def meter() -> None:
        await fresh.broker.metering.write()

    fresh.on_loop(meter)
    ((_, usage),) = fresh.disk.metered([], 0, 2**40, {"lease": lease.lease_id})
    assert usage.reserved_ms > 0, "what it is charged for is there"
