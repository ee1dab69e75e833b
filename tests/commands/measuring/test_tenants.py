"""What counts as spare room, and what disturbs a step."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fractional_gpu.commands.measuring.tenants import Tenant, disturbance, leases_to_suspend, no_spare_room, others_work
from fractional_gpu.jupyter.kernel_lease import KernelLease
from fractional_gpu.protocol.status import HostStatus, LeaseStatus
from tests.commands.pictures import a_device, a_host, a_lease
from tests.support.statuses import changed

DEVICE = a_device(device_id="gpu-0", memory_mib=1000, leasable_mib=1000)
LEASE = a_lease(lease_id="other", label="ada.ipynb", device_id="gpu-0", reserved_mib=250)
OURS = changed(LEASE, lease_id="ours", label="measure python", busy=True, working=True)


def host(*leases: LeaseStatus, **device: Any) -> HostStatus:  # noqa: ANN401 - fields of a device
    return a_host(devices=[structs.replace(DEVICE, **device)], leases=list(leases))


@pytest.fixture
def tenant(tmp_path: Path) -> Tenant:
    lease = KernelLease(
        lease_id="ours",
        token="",
        token_file=tmp_path / "token",
        socket="",
        reserve_mib=250,
        gated=False,
        environment={},
    )
    return Tenant(["program"], lease, tmp_path)


@pytest.mark.parametrize(
    "device",
    [
        {"reserved_mib": 501},
        {"used_mib": 501},
        {"lost": True},
        {"draining": True},
        {"pool": "night"},
        {"device_id": "gpu-1"},
    ],
)
def test_what_is_reserved_used_or_not_to_be_had_is_no_spare_room(device: dict[str, Any]) -> None:
    assert no_spare_room(host(), "default", 250, 4, "gpu-0") == ""
    assert no_spare_room(host(reserved_mib=500), "default", 250, 2, "gpu-0") == ""
    assert "has the 500 MiB free" in no_spare_room(host(**device), "default", 250, 2, "gpu-0")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"busy": True}, ""),
        ({"state": "suspended", "device_id": None, "position": 3}, "ada.ipynb is waiting for a GPU"),
        ({"pool": "night", "device_id": None, "position": 3}, ""),
    ],
)
def test_other_leases_disturb_when_they_wait(tenant: Tenant, changes: dict[str, Any], said: str) -> None:
    assert disturbance(host(OURS, changed(LEASE, **changes)), [tenant], "gpu-0", "default") == said


def test_a_device_that_is_lost_disturbs(tenant: Tenant) -> None:
    assert disturbance(host(OURS, lost=True), [tenant], "gpu-0", "default") == "the device was lost"
    assert disturbance(host(OURS, device_id="gpu-1"), [tenant], "gpu-0", "default") == "the device was lost"


@pytest.mark.parametrize(
    ("changes", "used_milli", "neighbours", "said"),
    [
        ({"busy": True}, 300, 0, "ada.ipynb worked on the device"),
        ({"busy": True}, 19, 9, ""),  # its cell runs, and does not use the device
        ({}, 300, 0, "another user's kernel, or a process without a lease, worked on the device"),
        (
            {"device_id": "gpu-1", "busy": True},
            300,
            0,
            "another user's kernel, or a process without a lease, worked on the device",
        ),
        ({"busy": True}, None, 0, "ada.ipynb worked on the device"),
        ({"working": True}, None, 0, "ada.ipynb worked on the device"),
        ({"busy": True, "device_id": "gpu-1"}, None, 0, ""),
        ({}, None, 0, ""),
        ({}, None, 1, "another user's kernel, or a process without a lease, worked on the device"),
    ],
)
def test_others_disturb_when_they_work_as_the_device_counts_or_else_as_their_cells_say(
    tenant: Tenant, changes: dict[str, Any], used_milli: int | None, neighbours: int, said: str
) -> None:
    status = host(OURS, changed(LEASE, **changes))
    assert others_work(status, [tenant], "gpu-0", used_milli, neighbours) == said


def test_a_tenant_that_left_its_device_disturbs(tenant: Tenant) -> None:
    suspended = changed(OURS, state="suspending")
    assert disturbance(host(suspended), [tenant], "gpu-0", "default") == (
        "a program in this step lost the device (its lease was suspending)"
    )


@pytest.mark.parametrize(
    ("changes", "wanted", "leave"),
    [
        ({}, 1, []),
        ({}, 2, ["big"]),
        ({}, 3, ["big"]),
        ({}, 4, ["big", "small"]),
        ({"busy": True}, 2, ["small"]),
        ({"working": True}, 3, []),
        ({"pinned_ms": 1}, 3, []),
        ({"unsuspendable_reason": "it has a managed allocation"}, 3, []),
        ({"state": "suspending"}, 3, []),
        ({"owner": "eve"}, 3, []),
        ({"kind": "command"}, 3, []),
        ({"lease_id": "asked before"}, 3, []),
        ({"state": "suspended", "position": 1}, 2, []),
    ],
)
def test_the_fewest_idle_leases_of_the_user_leave_that_make_enough_room(
    changes: dict[str, Any], wanted: int, leave: list[str]
) -> None:
    mine = changed(OURS, state="unattached", device_id=None, reserve_mib=250)
    small = changed(LEASE, lease_id="small", device_ids=["gpu-0"], reserved_mib=250)
    big = changed(small, **{"lease_id": "big", "reserved_mib": 500, "used_mib": 500, **changes})
    status = host(mine, small, big, reserved_mib=750, used_mib=500)
    found = leases_to_suspend(status, "ours", wanted, "gpu-0", {"asked before"})
    assert [one.lease_id for one in found] == leave
