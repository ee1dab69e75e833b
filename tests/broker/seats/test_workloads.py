"""Seats of jobs, with real control groups: only the job's own processes use its seat, and the seat ends with the job."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs, to_builtins

from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.terminal.render import render_status
from fractional_gpu.commands.terminal.text import plain
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.messages import LeaseRequest, ProgressKind, Workload
from fractional_gpu.protocol.seats import SeatProgress, SeatRequest
from fractional_gpu.protocol.status import SeatStatus
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker, started_for
from tests.support.callers import Caller, caller
from tests.support.control_group import JOIN, job_group
from tests.support.world import until

pytestmark = pytest.mark.promise("workload-seat")

POOLS: dict[str, Any] = {"default": {"wait_bound": "100%", "kernels_per_seat": 8}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker(pools=POOLS) as live:
        yield live


def take(live: LiveBroker, job: str, **fields: Any) -> SeatProgress:  # noqa: ANN401 - SeatRequest's
    request = SeatRequest(
        **{
            "owner": "ada",
            "server": f"job-{job}",
            "pool": "default",
            "fraction_milli": 250,
            "admitted": True,
            "workload": Workload(engine="slurm", id=job),
            **fields,
        }
    )
    with SeatClient(live.socket, timeout_s=DEADLINE_S) as client:
        seat = list(client.take_seat(request))[-1]
        assert seat.kind == ProgressKind.GRANTED
        client.confirm_seat(seat.seat_id)
    return seat


def seat_of(live: LiveBroker, seat: SeatProgress) -> SeatStatus | None:
    with SeatClient(live.socket, timeout_s=DEADLINE_S) as client:
        return next((one for one in client.seats().seats if one.seat_id == seat.seat_id), None)


def record_of(live: LiveBroker, seat: SeatProgress) -> SeatRecord:
    return next(one for one in live.service.seats.live() if one.seat_id == seat.seat_id)


def lease_on(caller: Caller, seat: SeatProgress) -> tuple[int, Any]:
    body = to_builtins(LeaseRequest(fraction_milli=125, seat=seat.seat_id))
    return caller.call("POST", "/v1/leases", seat.token, body)


def client_in(group: Path, live: LiveBroker) -> AbstractContextManager[Caller]:
    return caller(live.socket, first=JOIN.format(group=str(group)))


def test_only_the_jobs_own_processes_use_its_seat(live: LiveBroker) -> None:
    with job_group() as (job, group), job_group() as (other, elsewhere):
        seat = take(live, job)
        with client_in(elsewhere, live) as thief:
            status, refused = lease_on(thief, seat)
            assert (status, refused["error"]["reason"]) == (403, "other-workload")
            assert f"runs in Slurm job {other}" in refused["error"]["message"]
        outside = live.call("POST", "/v1/leases", {"fraction_milli": 125, "seat": seat.seat_id}, token=seat.token)
        assert outside.error["reason"] == "other-workload"
        assert "of any job or pod" in outside.error["message"]
        with client_in(group, live) as own:
            status, lease = lease_on(own, seat)
            assert status == 200, lease
            # The kernel's process must be in the job as well, not only the process that asked for the lease.
            with started_for(lease["lease_id"], first=JOIN.format(group=str(elsewhere))) as foreign:
                status, refused = own.call("POST", f"/v1/leases/{lease['lease_id']}/attach", lease["token"], foreign)
                assert (status, refused["error"]["reason"]) == (403, "other-workload"), refused
            with started_for(lease["lease_id"], first=JOIN.format(group=str(group))) as kernel:
                status, attached = own.call("POST", f"/v1/leases/{lease['lease_id']}/attach", lease["token"], kernel)
                assert status == 200, attached


def test_a_group_whose_name_looks_like_a_line_of_a_jobs_is_not_the_jobs(live: LiveBroker) -> None:
    with job_group() as (job, group):
        seat = take(live, job)
        top = group.parents[2]
        forged = top / "jfg\x0c0::" / "slurm" / "uid_0" / f"job_{job}"
        forged.mkdir(parents=True)
        try:
            with client_in(forged, live) as thief:
                status, refused = lease_on(thief, seat)
        finally:
            for one in (forged, *forged.parents[:3]):
                one.rmdir()
        assert (status, refused["error"]["reason"]) == (403, "other-workload")


def test_a_seat_ends_with_its_jobs_group_and_its_leases_with_it(live: LiveBroker) -> None:
    with job_group() as (job, group):
        seat = take(live, job)
        with client_in(group, live) as own:
            _, lease = lease_on(own, seat)
            with started_for(lease["lease_id"], first=JOIN.format(group=str(group))) as kernel:
                status, _ = own.call("POST", f"/v1/leases/{lease['lease_id']}/attach", lease["token"], kernel)
                assert status == 200
                _, waiting = lease_on(own, seat)
        until(lambda: record_of(live, seat).group_seen, "the broker knows the group")
        until(lambda: not (group / "cgroup.procs").read_text(), "the job's processes have ended")
        assert seat_of(live, seat) is not None, "the group is there still"
        group.rmdir()
        until(lambda: seat_of(live, seat) is None, "the seat ended with the job")
        for one in (lease["lease_id"], waiting["lease_id"]):
            until(lambda one=one: live.call("GET", f"/v1/leases/{one}").status == 404, "its leases ended")  # type: ignore[misc]


def test_no_workload_outlives_the_machines_boot(live: LiveBroker) -> None:
    with job_group() as (job, _):
        seat = take(live, job)
        ledger = live.broker.writer.ledger
        saved = next(one for one in ledger.live_seats() if one.seat_id == seat.seat_id)
        assert saved.boot_id
        assert saved.expires_ms is None

        async def rebooted() -> None:
            seats = live.service.seats
            seats._keep(structs.replace(saved, boot_id="another"))
            await seats.workloads._look()

        live.on_loop(rebooted)
        assert seat_of(live, seat) is None


def test_a_broker_that_starts_ends_the_seats_of_workloads_that_ended_meanwhile() -> None:
    with job_group() as (job, group), job_group() as (other, _), live_broker(pools=POOLS) as live:
        gone, lives = take(live, job), take(live, other)
        for seat in (gone, lives):
            until(lambda seat=seat: record_of(live, seat).group_seen, "its group is known")  # type: ignore[misc]
        live.on_loop(live.stop_seats)
        group.rmdir()

        async def started_again() -> list[str]:
            ledger = live.broker.writer.ledger
            until(lambda: all(one.group_seen for one in ledger.live_seats()), "the ledger has it")
            seats = live.service.seats = Seats(live.broker, live.service.settings)
            seats.recover(ledger)
            there = {one.seat_id for one in seats.live()}
            assert there == {gone.seat_id, lives.seat_id}
            await seats.workloads._look()
            return [one.seat_id for one in seats.live()]

        assert live.on_loop(started_again) == [lives.seat_id]


def test_too_little_memory_is_said_with_the_seat_and_in_the_story_and_status(live: LiveBroker) -> None:
    with job_group(limit_mib=700) as (job, group):
        seat = take(live, job)
        assert f"{group} (700 MiB)" in seat.warning
        status = seat_of(live, seat)
        assert status is not None
        assert status.warning == seat.warning
        with SeatClient(live.socket, timeout_s=DEADLINE_S) as client:
            assert seat.warning in plain(render_status(client.status()))
        with client_in(group, live) as own:
            _, lease = lease_on(own, seat)
            until(
                lambda: any(
                    line["reason"] == "seat.memory"
                    for line in live.call("GET", f"/v1/leases/{lease['lease_id']}/story").body["lines"]
                ),
                "the lease's story has it",
            )
    with job_group(limit_mib=100_000) as (job, _):
        assert take(live, job).warning == ""
