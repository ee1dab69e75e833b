"""What the page makes of the broker's status: words, and only sums for other users."""

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from fractional_gpu.config import POOL_KEYS
from fractional_gpu.protocol.seats import PoolKeys, PoolList, SeatList
from fractional_gpu.protocol.status import DeviceStatus, HostStatus, LeaseStatus, SeatStatus, Stranger
from fractional_gpu_hub.service.broker_follower import Snapshot
from fractional_gpu_hub.service.views import Viewer, is_own, pool_settings, view_of
from tests.support.statuses import a_status

ADA = Viewer(name="ada", admin=False)
GRACE = Viewer(name="grace", admin=True)
DEVICE = DeviceStatus(
    device_id="GPU-1", index=0, name="H", pool="default", memory_mib=81_920, leasable_mib=80_000, used_mib=21_504,
    reserved_mib=40_960, stranger_mib=1024, over_committed=False, lost=False,
    strangers=[Stranger(pid=7, user="carol", used_mib=1024, command="train", uid=0, own=True)],
)  # fmt: skip


def lease(name: str, owner: str, **fields: Any) -> LeaseStatus:  # noqa: ANN401 - LeaseStatus' own
    given: dict[str, Any] = {
        "lease_id": name * 6, "state": "resident", "pool": "default", "owner": owner, "label": f"{owner}'s notebook",
        "kernel_id": "k", "pid": 1, "fraction_milli": 250, "reserve_mib": 20_480, "used_mib": 4096, "saved_mib": 0,
        "device_id": "GPU-1", "device_name": "H", "simulated": False, "busy": False, "gated": True, "age_ms": 0,
        "reason": "", "sentence": "", "device_ids": ["GPU-1"], "reserved_mib": 20_480, "seat": f"seat-{owner}",
    }  # fmt: skip
    return a_status(**(given | fields))


def seat(owner: str) -> SeatStatus:
    return SeatStatus(
        seat_id=f"seat-{owner}", owner=owner, server="", group="", pool="default", fraction_milli=250, memory_mib=20_480,
        device_id="GPU-1", priority=0, weight=100, max_kernels=4, uid=None, kernels=1, used_milli=250, confirmed=True,
        age_ms=0, expires_ms=None,
    )  # fmt: skip


def snapshot(*leases: LeaseStatus, **fields: Any) -> Snapshot:  # noqa: ANN401 - Picture's own
    status = HostStatus(
        version="1", pid=1, simulated=False, socket="s", host_budget_mib=100_000, host_saved_mib=0,
        devices=[DEVICE], leases=list(leases), pools={"default": [250, 500]},
    )  # fmt: skip
    seats = SeatList(seats=[seat("ada"), seat("bob")])
    pools = PoolList(pools=[PoolKeys(pool="default", devices=["GPU-1"], keys={"idle_after": "5m"}, changed=[])])
    return replace(Snapshot(status=status, seats=seats, pools=pools, problem=""), **fields)


def test_a_user_sees_their_own_and_of_others_only_a_sum() -> None:
    shown = view_of(snapshot(lease("aaaa", "ada"), lease("bbbb", "bob")), ADA)
    text = json.dumps(shown)
    for secret in ("bob", "bbbb", "carol", "train", "idle_after"):
        assert secret not in text
    assert shown["devices"][0]["kernels"] == "1 of yours, 1 from other users (20 GiB)"
    assert "other programs hold 1 GiB" in shown["devices"][0]["note"]
    room = "(room for 4 that filled 1/4 of a GPU, 20 GiB each)"
    assert room not in shown["summary"]
    assert room in view_of(snapshot(), GRACE)["summary"]
    administrators = view_of(snapshot(), GRACE)["devices"][0]["note"]
    assert "other programs hold 1 GiB: train (process 7 of carol) holds 1 GiB" in administrators
    assert [row["id"] for row in shown["kernels"]] == ["aaaa" * 6]
    assert "evict" not in shown["kernels"][0]["actions"]
    assert [row["actions"] for row in shown["seats"]] == [[]]
    assert [row["actions"] for row in view_of(snapshot(), GRACE)["seats"]] == [["release"], ["release"]]


def test_a_deadline_is_shown_with_what_becomes_of_each_kernel() -> None:
    made = snapshot(
        lease("aaaa", "ada", goes_away_in_ms=30_000, lost_because="it uses MPS"),
        lease("bbbb", "ada", goes_away_in_ms=30_000),
    )
    assert made.status is not None
    going = structs.replace(DEVICE, draining=True, goes_away_in_ms=30_000, leases_saved=1, leases_lost=1)
    status = structs.replace(made.status, devices=[going], goes_away_in_ms=60_000)
    shown = view_of(replace(made, status=status), ADA)
    (device,) = shown["devices"]
    assert device["state"] == "going away"
    assert "it goes away in 30 s: 1 kernel on it will be saved before, 1 kernel on it cannot be saved" in device["note"]
    notes = {row["id"]: row["note"] for row in shown["kernels"]}
    assert "cannot be saved before: it uses MPS; save your results to disk now" in notes["aaaa" * 6]
    assert notes["bbbb" * 6].endswith("and it is saved before.")
    assert "this machine is being revoked: its host goes away in 1 min" in shown["summary"]


@pytest.mark.parametrize(
    ("demand_milli", "compute", "note", "level"),
    [
        (0, "0 % needed", "by busy kernels", 0),
        (1000, "100 % needed", "by busy kernels", 100),
        (1340, "134 % needed", "by busy kernels, which slow each other down", 100),
    ],
)
def test_the_compute_that_busy_kernels_need_is_said_in_words(
    demand_milli: int, compute: str, note: str, level: int
) -> None:
    made = snapshot()
    assert made.status is not None
    status = structs.replace(made.status, devices=[structs.replace(DEVICE, demand_milli=demand_milli)])
    (row,) = view_of(replace(made, status=status), ADA)["devices"]
    assert (row["compute"], row["compute_note"], row["demand"]) == (compute, note, level)


def test_an_administrator_sees_all_leases_with_their_users() -> None:
    shown = view_of(snapshot(lease("aaaa", "ada"), lease("bbbb", "bob")), GRACE)
    assert {row["owner"] for row in shown["kernels"]} == {"ada", "bob"}
    assert "carol" in shown["devices"][0]["note"]
    assert shown["pools"][0]["keys"] == {"idle_after": "5m"}
    assert shown["kernels"][0]["actions"] == ["suspend", "pin", "move", "evict", "story"]


def test_a_kernel_of_a_machines_user_is_not_that_of_the_hubs_user_of_the_same_name() -> None:
    stray = lease("cccc", "ada", seat="")
    assert not is_own(stray, ADA)
    assert view_of(snapshot(stray), ADA)["kernels"] == []
    assert view_of(snapshot(stray), GRACE)["kernels"][0]["owner"] == "ada (not from a server)"


@pytest.mark.parametrize(
    ("fields", "state", "memory", "where"),
    [
        ({"busy": True}, "in use", "4 GiB of 20 GiB on the GPU", "GPU 0"),
        ({}, "idle on the GPU", "4 GiB of 20 GiB on the GPU", "GPU 0"),
        ({"pinned_ms": 90_500}, "idle on the GPU, pinned for 1 min", "4 GiB of 20 GiB on the GPU", "GPU 0"),
        ({"working": True}, "working in the background", "4 GiB of 20 GiB on the GPU", "GPU 0"),
        (
            {"state": "suspended", "saved_mib": 4096, "device_ids": [], "reserved_mib": 0},
            "suspended",
            "4 GiB in host memory",
            "host memory",
        ),
        (
            {"state": "suspended", "saved_mib": 4096, "device_ids": [], "reserved_mib": 0, "position": 2},
            "waiting, place 2",
            "4 GiB in host memory",
            "host memory",
        ),
        ({"state": "unarmed", "device_ids": [], "reserved_mib": 0}, "has not used the GPU", "none of 20 GiB", "none"),
    ],
)
def test_a_kernels_state_in_words(fields: dict[str, Any], state: str, memory: str, where: str) -> None:
    (row,) = view_of(snapshot(lease("aaaa", "ada", **fields)), ADA)["kernels"]
    assert (row["state"], row["memory"], row["where"]) == (state, memory, where)


def test_the_reason_for_a_wait_is_a_sentence_with_its_forecast() -> None:
    waits = lease(
        "aaaa", "ada", state="suspended", position=1, sentence="idle kernels make room", expected_ms=12_000,
        expected_bounds_ms=(4000, 70_000),
        device_ids=[], reserved_mib=0,
    )  # fmt: skip
    (row,) = view_of(snapshot(waits), ADA)["kernels"]
    assert row["note"] == "Idle kernels make room. About 10 s more (4 s to 1 min)."


def test_who_waits_comes_first_in_their_order() -> None:
    rows = view_of(
        snapshot(lease("aaaa", "ada"), lease("bbbb", "bob", position=2), lease("cccc", "ada", position=1)), GRACE
    )["kernels"]
    assert [row["short"] for row in rows] == ["cccccccc", "bbbbbbbb", "aaaaaaaa"]


@pytest.mark.parametrize(
    ("fields", "state", "action"),
    [
        ({}, "in service", "drain"),
        ({"draining": True}, "being emptied", "undrain"),
        ({"draining": True, "reserved_mib": 0}, "emptied", "undrain"),
        ({"lost": True}, "lost", "drain"),
        ({"over_committed": True}, "over-committed", "drain"),
    ],
)
def test_a_devices_state_in_words(fields: dict[str, Any], state: str, action: str) -> None:
    made = snapshot()
    assert made.status is not None
    changed = replace(made, status=structs.replace(made.status, devices=[structs.replace(DEVICE, **fields)]))
    (row,) = view_of(changed, GRACE)["devices"]
    assert (row["state"], row["actions"]) == (state, [action])


def test_a_broker_that_has_not_answered_yet_is_a_page_with_a_sentence() -> None:
    shown = view_of(Snapshot(), ADA)
    assert shown["problem"] == "the GPU broker has not responded yet"
    assert (shown["devices"], shown["kernels"], shown["pools"]) == ([], [], [])


def test_the_editor_has_each_setting_of_a_pool_once_and_its_common_ones_with_help_first() -> None:
    shown = pool_settings()
    keys = [one.key for one in (*shown.common, *shown.others)]
    assert sorted(keys) == sorted(POOL_KEYS.keys() - {"devices"})
    assert keys[0] == "idle_after"
    assert all(one.help for one in shown.common)
    by_key = {one.key: one for one in (*shown.common, *shown.others)}
    assert (by_key["may_move"].boolean, by_key["may_move"].default, by_key["may_move"].example) == (
        True,
        "true",
        "false",
    )
    assert (by_key["fractions"].default, by_key["price"].default) == ('["1/8", "1/4", "1/2", "3/4", "1"]', "null")


@pytest.mark.parametrize("key", sorted(POOL_KEYS.keys() - {"devices"}))
def test_what_the_editor_suggests_is_what_the_broker_takes(key: str) -> None:
    shown = pool_settings()
    (setting,) = (one for one in (*shown.common, *shown.others) if one.key == key)
    for text in (setting.default, setting.example):
        try:
            value = json.loads(text)  # as the page's script reads the input
        except ValueError:
            value = text
        POOL_KEYS[key].parse(value)
