"""Which control group belongs to a process's user or seat alone."""

from pathlib import Path

import pytest

from fractional_gpu.host.own_group import OwnGroup, own_group

POD = "/kubepods.slice/kubepods-pod0f0e0d0c_1111_2222_3333_444455556666.slice"
UNIFIED = "30 20 0:26 / {point} rw - cgroup2 cgroup2 rw\n"


def proc_with(folder: Path, group: str, *, version: int = 2) -> Path:
    """A /proc in which process 7 is in the group, and process 1, the reader, in the broker's."""
    for pid, path in ((1, "/system.slice/broker.service"), (7, group)):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "cgroup").write_text(f"{0 if version == 2 else 4}::{path}\n")
    (folder / "1/mountinfo").write_text(UNIFIED.format(point=folder) if version == 2 else "")
    (folder / "self").symlink_to("1")
    return folder


@pytest.mark.parametrize(
    ("group", "own"),
    [
        ("/system.slice/jupyter-ada.service", OwnGroup("/system.slice/jupyter-ada.service", is_leaf=True)),
        (
            "/system.slice/jupyter-ada.service/hidden.service",
            OwnGroup("/system.slice/jupyter-ada.service", is_leaf=False),
        ),
        ("/system.slice/docker-12ab.scope", OwnGroup("/system.slice/docker-12ab.scope", is_leaf=True)),
        (f"/docker/{'5' * 64}", OwnGroup(f"/docker/{'5' * 64}", is_leaf=True)),
        ("/user.slice/user-1000.slice/session-2.scope", OwnGroup("/user.slice/user-1000.slice", is_leaf=False)),
        (
            "/system.slice/slurmstepd.scope/job_12/step_0/user",
            OwnGroup("/system.slice/slurmstepd.scope/job_12", is_leaf=False),
        ),
        (f"{POD}/cri-containerd-1.scope", OwnGroup(POD, is_leaf=False)),
    ],
)
def test_a_unit_container_job_pod_or_users_slice_is_its_own(tmp_path: Path, group: str, own: OwnGroup) -> None:
    assert own_group(7, 1000, proc=proc_with(tmp_path, group)) == own


@pytest.mark.parametrize(
    "group", ["/", "/system.slice", "/system.slice/broker.service", "/user.slice/user-1001.slice/session-3.scope"]
)
def test_the_root_the_brokers_group_and_another_users_slice_are_not(tmp_path: Path, group: str) -> None:
    assert own_group(7, 1000, proc=proc_with(tmp_path, group)) is None


def test_groups_of_version_1_do_not_count(tmp_path: Path) -> None:
    assert own_group(7, 1000, proc=proc_with(tmp_path, "/slurm/uid_1000/job_12", version=1)) is None
