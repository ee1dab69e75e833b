"""The meter in simulations: it changes nothing, adds up over whole days, and comes close to what was really drawn."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fractional_gpu.core.events import Event
from fractional_gpu.core.metering.meter import Meter
from fractional_gpu.core.metering.tariffs import Basis, PriceBand, Tariff
from fractional_gpu.core.metering.usage import HOUR_MS, Usage, UsageRow
from fractional_gpu.core.model import DeviceSpec, PoolSpec, ReserveBy
from fractional_gpu.reports.rows_file import read as read_rows
from fractional_gpu.reports.rows_file import rows_of
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.load import Group, Habit, Load, in_groups, synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering import BEGINS_MS, DAY_MS, Metering, Power, write_usage
from fractional_gpu.simulator.record import recording, replay
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session, read_sessions, write_sessions
from tests.simulator.loads import BUSY
from tests.support.simulated_draw import TruthfulMeter

pytestmark = pytest.mark.promise("meter", "simulated-meter")

LARGE = Tariff(currency="EUR", price_milli=2400, bands=(PriceBand(spans=((480, 1080),), price_milli=3600),))
SMALL = Tariff(currency="EUR", price_milli=900, basis=Basis.RESERVED, credit_milli=800)
K = TypeVar("K")
GROUPS = (Group("physics", 2), Group("biology"), Group("teaching", 1, "small"))
USE = Load(habit=Habit.BUILDERS, ask_error_percent=30, failed_swaps_percent=5)


def machine(large: int = 2, small: int = 1, **about: Any) -> Host:  # noqa: ANN401 - fields of a host
    names = tuple(f"d{number}" for number in range(large + small))
    devices = tuple(DeviceSpec(device_id=name, name="simulated", memory_mib=81_920) for name in names)
    pools = (PoolSpec(name="large", devices=names[:large]), PoolSpec(name="small", devices=names[large:]))
    return Host(devices=devices, pools=pools if small else pools[:1], **about)


def by_use(host: Host) -> Host:
    pools = tuple(replace(pool, reserve_by=ReserveBy.USE, headroom_mib=1024) for pool in host.pools)
    return replace(host, pools=pools, request_percent=50, patience_ms=5_000, failed_swaps_percent=5)


def trace_of(seed: int, load: Load = BUSY, users: int = 8, days: int = 1) -> list[Session]:
    return in_groups(synthetic_sessions(users, days, seed, load), GROUPS)


class HalfSeeing(Meter):
    """Gets the use of half the leases. For the others it knows only the share."""

    def read_energy(
        self,
        at_ms: int,
        wall_ms: int,
        device_id: str,
        *,
        counter_mj: int | None,
        power_mw: int | None = None,
        quiet: bool = False,
        utilisation: Mapping[str, int] | None = None,
    ) -> int:
        seen = {one: milli for one, milli in (utilisation or {}).items() if random.Random(one).random() < 0.5}
        return super().read_energy(
            at_ms, wall_ms, device_id, counter_mj=counter_mj, power_mw=power_mw, quiet=quiet, utilisation=seen
        )


def metered(*, noise: int = 0, make: Callable[[], Meter] = Meter, seed: int = 1) -> TruthfulMeter:
    return TruthfulMeter(Metering(tariffs={"large": LARGE, "small": SMALL}, noise_percent=noise, seed=seed), make)


def summed(rows: Iterable[UsageRow]) -> Usage:
    total = Usage()
    for row in rows:
        total.add(row.usage)
    return total


def summed_by(rows: Iterable[UsageRow], key: Callable[[UsageRow], K]) -> defaultdict[K, Usage]:
    totals = defaultdict[K, Usage](Usage)
    for row in rows:
        totals[key(row)].add(row.usage)
    return totals


def figures(result: Result) -> dict[str, object]:
    return {name: value for name, value in result.as_json().items() if name != "wall_s"}


RUNS = [
    pytest.param(machine(), BUSY, id="caps"),
    pytest.param(by_use(machine()), USE, id="by-use"),
]


@pytest.mark.parametrize(("host", "load"), RUNS)
def test_a_meter_changes_no_byte_of_the_run(host: Host, load: Load, tmp_path: Path) -> None:
    trace, files, results = trace_of(5, load), [tmp_path / "without.log", tmp_path / "with.log"], []
    for file, meter in zip(files, [None, metered(noise=20, make=HalfSeeing)], strict=True):
        with recording(file, host, trace) as log:
            results.append(simulate(host, trace, record=log, meter=meter))
    assert figures(results[0]) == figures(results[1])
    assert results[0].suspends
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("host", "load", "seed", "noise"),
    [(machine(), BUSY, 1, 0), (by_use(machine()), USE, 2, 20)],
    ids=["caps", "by-use"],
)
def test_sums_equal_devices_times_time_and_the_energy_drawn(host: Host, load: Load, seed: int, noise: int) -> None:
    trace, meter = trace_of(seed, load, days=2), metered(noise=noise, make=HalfSeeing, seed=seed)
    closed_ms: dict[str, int] = {}

    def watch(event: Event, _effects: object) -> None:
        if type(event).__name__ == "LeaseReleased":
            closed_ms[event.lease_id] = event.at_ms  # type: ignore[attr-defined]

    result = simulate(host, trace, meter=meter, watch=watch)
    rows, days = meter.rows, meter.ended_ms // DAY_MS
    assert meter.ended_ms == days * DAY_MS >= max(closed_ms.values())
    hours = days * 24
    for device in host.devices:
        mine = [row for row in rows if row.key.device_id == device.device_id]
        by_hour = summed_by(mine, lambda row: row.key.hour_s)
        assert len(by_hour) == hours
        for number in range(hours):
            assert by_hour[BEGINS_MS // 1000 + number * 3600].occupied_us == HOUR_MS * 1000
        drawn_uj = meter.hosts[0].drawn_uj(device.device_id)
        assert summed(mine).energy_mj == drawn_uj // 1000
        idle_mj = meter.ended_ms * Power().idle_mw // 1000
        assert drawn_uj // 1000 > idle_mj * (1 - noise / 100)
    opened = {session.session_id: session.open_ms for session in trace}
    assert closed_ms.keys() == opened.keys()
    by_lease = summed_by(rows, lambda row: row.key.lease_id)
    for lease_id, open_ms in opened.items():
        usage = by_lease[lease_id]
        assert usage.reserved_ms == closed_ms[lease_id] - open_ms
        assert usage.held_ms + usage.suspended_ms <= usage.reserved_ms
    total = summed(rows)
    assert total.moved_mib == result.moved_mib > 0
    assert total.charge_milli <= total.resident_milli <= total.whole_milli
    drawn_nj = sum(meter.truth.work.values()) + sum(meter.truth.idle_by_share.values())
    assert abs(drawn_nj // 10**6 - total.energy_mj) <= len(host.devices) * days


def test_without_noise_and_with_all_use_measured_the_division_is_nearly_the_truth() -> None:
    meter = metered(seed=1)
    simulate(machine(1, 1), trace_of(1), meter=meter)
    true_mj: dict[str, int] = {}
    for part in (meter.truth.work, meter.truth.idle_by_share):
        for (_, lease_id), energy_nj in part.items():
            true_mj[lease_id] = true_mj.get(lease_id, 0) + energy_nj // 10**6
    given_mj: dict[str, int] = {}
    for row in meter.rows:
        given_mj[row.key.lease_id] = given_mj.get(row.key.lease_id, 0) + row.usage.energy_mj
    off_mj = sum(abs(given_mj.get(one, 0) - true_mj.get(one, 0)) for one in given_mj.keys() | true_mj.keys())
    assert 0 < off_mj < sum(true_mj.values()) * 0.01


# -- by hand -----------------------------------------------------------------------------------------------------------


def session(name: str, *cells: Cell, opens: int = 0, closes: int, gpus: int = 1, pool: str = "") -> Session:
    return Session(name, name, opens, closes, gpus, 40_000, cells, group="staff", pool=pool)


def test_one_lease_by_hand() -> None:
    """Half a device from 7:00 to 9:00, at work from 7:30 to 8:30 with 40 % of the device; dearer from 8:00 on."""
    cell = Cell(7 * HOUR_MS + HOUR_MS // 2, HOUR_MS, 1, 40_000, 40)
    meter = metered()
    simulate(machine(1, 0), [session("a", cell, opens=7 * HOUR_MS, closes=9 * HOUR_MS)], meter=meter)
    rows = [row for row in meter.rows if row.key.lease_id]
    assert {row.key.hour_s * 1000 - BEGINS_MS for row in rows} == {7 * HOUR_MS, 8 * HOUR_MS}
    assert meter.totals()["large"][1].occupied_us == DAY_MS * 1000
    total = summed(rows)
    assert (total.reserved_ms, total.held_ms, total.busy_ms) == (2 * HOUR_MS, HOUR_MS * 3 // 2, HOUR_MS)
    assert total.charge_milli == 2400 // 2 // 2 + 3600 // 2
    assert total.device_mib_ms == 40_000 * total.held_ms
    work_mj = HOUR_MS * 625_000 * 40 // 100 // 1000
    assert total.energy_mj == work_mj + 75 * 3_600_000 * 3 // 2
    assert {row.party.group for row in rows} == {"staff"}


def test_a_cell_on_several_devices_draws_on_each() -> None:
    cell = Cell(HOUR_MS, HOUR_MS, 2, 40_000, 100)
    meter = metered()
    simulate(machine(2, 0), [session("a", cell, closes=3 * HOUR_MS, gpus=2)], meter=meter)
    drawn_mj = {
        row.key.device_id: row.usage.energy_mj for row in meter.rows if row.key.lease_id and row.usage.busy_share
    }
    assert drawn_mj == {"d0": 700 * 3_600_000, "d1": 700 * 3_600_000}


def test_devices_of_several_hosts_are_named_apart() -> None:
    hosts, meter = (machine(1, 1), machine(1, 1)), metered()
    simulate(hosts, trace_of(1), meter=meter)
    names = {row.key.device_id for row in meter.rows if row.key.device_id}
    assert names == {"host-0/d0", "host-0/d1", "host-1/d0", "host-1/d1"}
    assert summed(meter.rows).occupied_us == 4 * meter.ended_ms * 1000


# -- pools, groups, weekends -------------------------------------------------------------------------------------------


def test_sessions_run_in_the_pool_of_their_group() -> None:
    meter, trace = metered(), trace_of(1)
    simulate(machine(), trace, meter=meter)
    found = {(row.party.group, row.party.pool) for row in meter.rows if row.key.lease_id}
    assert found == {("physics", "large"), ("biology", "large"), ("teaching", "small")}
    users = {session.user: session.group for session in trace}
    assert sorted(users.values()) == ["biology"] * 2 + ["physics"] * 4 + ["teaching"] * 2
    teaching = {row.key.device_id for row in meter.rows if row.party.group == "teaching"}
    assert teaching <= {"d2", ""}


def test_an_unknown_pool_is_named() -> None:
    trace = [session("a", closes=HOUR_MS, pool="huge")]
    with pytest.raises(SimulationError, match=r"pool 'huge', which does not exist; choose one of large, small"):
        simulate(machine(), trace)


def test_a_record_of_several_pools_replays(tmp_path: Path) -> None:
    file, hosts, trace = tmp_path / "run.log", (machine(1, 1), machine(2, 1)), trace_of(3, users=16)
    with recording(file, hosts, trace) as log:
        simulate(hosts, trace, record=log)
    events, _ = replay(file)
    assert events > 100


def test_groups_and_pools_outlive_files(tmp_path: Path) -> None:
    trace, files = trace_of(1), (tmp_path / "sessions.csv", tmp_path / "cells.csv")
    write_sessions(trace, *files)
    assert read_sessions(*files) == trace


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_has_all_rows_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        meter = metered(noise=5)
        simulate(machine(), trace_of(1), meter=meter)
        write_usage(file, meter, (machine(),))
    assert files[0].read_bytes() == files[1].read_bytes()
    read = rows_of(read_rows(files[0].read_bytes(), str(files[0])))
    assert [(row.key, row.party, row.usage) for row in read] == [(row.key, row.party, row.usage) for row in meter.rows]
