"""The broker watches the machine's memory and each kernel's control group, and reports each shortage once."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fractional_gpu.broker.monitoring import host_memory
from fractional_gpu.broker.monitoring.host_memory import HostMemoryPressure, host_budget_mib
from fractional_gpu.core.events import HostPressureSeen
from fractional_gpu.core.model import LeaseState
from fractional_gpu.host.memory import Headroom
from tests.broker.monitoring.test_sampler import LEASE, World

pytestmark = pytest.mark.promise("race-host-memory")


@pytest.mark.parametrize(
    ("room_mib", "saved_mib", "budget_mib"),
    [
        (50_000, 0, 8_000),  # plenty: the configured budget
        (5_000, 3_000, 7_000),  # 5,000 more, of which 1,000 stay free
        (1_000, 3_000, 3_000),  # nothing more
        (400, 3_000, 2_400),  # 600 should go back
        (0, 500, 0),
    ],
)
def test_the_budget_leaves_the_machine_some_room(
    monkeypatch: pytest.MonkeyPatch, room_mib: int, saved_mib: int, budget_mib: int
) -> None:
    monkeypatch.setattr(host_memory, "system_headroom", lambda: Headroom(room_mib, "the test"))
    assert host_budget_mib(8_000, 50_000, saved_mib) == budget_mib


def have(monkeypatch: pytest.MonkeyPatch, system_mib: int, room: Callable[[int], Headroom]) -> None:
    monkeypatch.setattr(host_memory, "system_headroom", lambda: Headroom(system_mib, "the system's memory"))
    monkeypatch.setattr(host_memory, "LimitReader", lambda: SimpleNamespace(headroom=room))


def rooms(monkeypatch: pytest.MonkeyPatch, **mib: int) -> set[str]:
    pids = {name: number for number, name in enumerate(mib)}
    left = dict(enumerate(mib.values()))

    def room(pid: int) -> Headroom:
        if left[pid] < 0:
            raise ProcessLookupError
        return Headroom(left[pid], "a group")

    have(monkeypatch, 10_000, room)
    return HostMemoryPressure()(pids, 0.0)


def test_who_has_no_room_in_its_group_is_pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rooms(monkeypatch, a=0, b=1, c=-1, d=0) == {"a", "d"}


def test_if_the_machine_is_full_no_group_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 0, lambda _pid: Headroom(0, "the system's memory"))
    assert HostMemoryPressure()({"a": 1}, 0.0) == set()


@pytest.mark.parametrize(
    ("room_mib", "looks_s"),
    [
        (0, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),  # until it is over
        (10_000, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        (40_000, [0, 6, 12, 18]),
        (500_000, [0, 10, 20]),
    ],
)
def test_the_more_room_there_is_the_more_rarely_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, room_mib: int, looks_s: list[int]
) -> None:
    looks: list[int] = []

    def room(_pid: int) -> Headroom:
        looks.append(now_s)
        return Headroom(room_mib, "a group")

    have(monkeypatch, 1_000_000, room)
    pressure = HostMemoryPressure()
    for now_s in range(0, 22, 2):
        assert pressure({"a": 1}, now_s) == ({"a"} if room_mib == 0 else set())
    assert looks == looks_s


@pytest.mark.parametrize(("state", "told"), [(LeaseState.SUSPENDED, [True, False]), (LeaseState.RESIDENT, [])])
async def test_pressure_is_told_when_it_comes_and_when_it_goes(
    monkeypatch: pytest.MonkeyPatch, state: LeaseState, told: list[bool]
) -> None:
    world = World(state)
    seen: list[bool] = []
    for short in (False, True, True, False):
        monkeypatch.setattr(world.sampler, "_pressure", lambda pids, _now_s, short=short: set(pids) if short else set())
        events = [event for event in await world.told() if isinstance(event, HostPressureSeen)]
        assert all(event.lease_id == LEASE for event in events)
        seen += [event.pressed for event in events]
    assert seen == told
