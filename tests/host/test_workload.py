"""Which job or pod a process belongs to, by its control group; what a user cannot forge; the group's limit and its end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.host.workload import (
    KUBERNETES,
    SLURM,
    find_group,
    group_exists,
    memory_warning,
    own_workload,
    parse_workload,
)

pytestmark = pytest.mark.promise("workload-seat")

UID = "0f2f5bd5-9ac2-4a4b-8e0e-2a4f8fd7a3a8"
UNDERSCORED = UID.replace("-", "_")
HASH = "c5c1a2a7" * 8
TEXTS = Path(__file__).parent / "cgroups"
MIB = 1024**2


def texts() -> list[Path]:
    return sorted(TEXTS.glob("*.txt"))


@pytest.mark.parametrize("file", texts(), ids=lambda file: file.stem)
def test_what_proc_says_is_read_for_what_it_is(file: Path) -> None:
    """Each file: a line with the expected engine, id and group (or `none`), a line with its source, and the text."""
    expected, _, text = file.read_text(encoding="ascii").split("\n", 2)
    found = parse_workload(text.encode())
    assert ("none" if found is None else f"{found.engine} {found.id} {found.group}") == expected


@pytest.mark.parametrize(
    "path",
    [
        "/user.slice/user-1000.slice/user@1000.service/slurm/uid_1000/job_12/step_0",
        f"/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-pod{UNDERSCORED}.slice",
        f"/user.slice/kubepods/pod{UID}/x",
        f"/docker/{HASH}/kubepods/burstable/pod{UID}/x",
        "/slurm/job_12",
        "/slurm/uid_1000/job_12x/step_0",
        "/system.slice/myslurm/uid_1000/job_12",
        "/system.slice/ssh.service/slurmstepd.scope/job_12",
        f"/kubepods/podx{UID}",
        f"/x/../kubepods/pod{UID}",
        "/",
        "",
    ],
)
def test_a_name_below_a_group_that_a_user_may_own_proves_nothing(path: str) -> None:
    assert parse_workload(f"0::{path}\n".encode()) is None
    assert parse_workload(f"4:memory:{path}\n0::/\n".encode()) is None


@pytest.mark.parametrize("character", ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
@pytest.mark.parametrize("forged", ["/slurm/uid_0/job_12", f"/kubepods/pod{UID}"])
def test_no_character_of_a_groups_name_begins_a_line(character: str, forged: str) -> None:
    """The operating system refuses line feeds alone in the names of groups."""
    assert parse_workload(f"0::/user.slice/user-1000.slice/x{character}0::{forged}\n".encode()) is None


def test_a_group_below_a_jobs_own_is_still_the_jobs() -> None:
    nested = f"0::/system.slice/slurmstepd.scope/job_12/step_0/user/kubepods/pod{UID}\n"
    found = parse_workload(nested.encode())
    assert found is not None
    assert (found.engine, found.id) == (SLURM, "12")


def test_hierarchies_that_contradict_each_other_prove_nothing() -> None:
    assert parse_workload(b"5:freezer:/slurm/uid_0/job_12\n4:memory:/slurm/uid_0/job_13\n") is None


@given(
    st.lists(st.sampled_from(["..", "slurm", "uid_0", "job_7", "kubepods", f"pod{UID}", "x", "burstable"]), max_size=7)
)
def test_whatever_is_above_a_workloads_group_is_one_of_the_engines(parts: list[str]) -> None:
    found = parse_workload(f"0::/{'/'.join(parts)}\n".encode())
    if found is not None and ".." not in parts:
        assert found.group.startswith(("/slurm/uid_0/job_7", "/kubepods/"))


# -- groups -----------------------------------------------------------------------------------------------------------------


class Machine:
    """A folder that looks like /proc, with one hierarchy of version 2."""

    def __init__(self, folder: Path, total_mib: int = 64 * 1024) -> None:
        self.proc, self.root = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.root.mkdir()
        (self.proc / "self" / "mountinfo").write_text(f"30 23 0:26 / {self.root} rw - cgroup2 cgroup2 rw\n")
        (self.proc / "meminfo").write_text(f"MemTotal: {total_mib << 10} kB\nMemAvailable: {total_mib << 10} kB\n")

    def group(self, path: str, limit_mib: int | None = None, used_mib: int = 0) -> Path:
        folder = self.root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text("max\n" if limit_mib is None else f"{limit_mib * MIB}\n")
        (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
        return folder


@pytest.mark.parametrize(
    ("engine", "name", "group"),
    [
        (SLURM, "12", "/system.slice/slurmstepd.scope/job_12"),
        (SLURM, "12", "/system.slice/n1_slurmstepd.scope/job_12"),
        (SLURM, "12", "/slurm/uid_1000/job_12"),
        (SLURM, "12", "/slurm_n1/uid_1000/job_12"),
        (KUBERNETES, UID, f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice"),
        (KUBERNETES, UID, f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice"),
        (KUBERNETES, UID, f"/kubepods/besteffort/pod{UID}"),
        (
            KUBERNETES,
            UID,
            (
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
                f"kubelet-kubepods-burstable-pod{UNDERSCORED}.slice"
            ),
        ),
    ],
)
def test_a_workloads_group_is_found_by_its_name_and_gone_when_it_is_removed(
    tmp_path: Path, engine: str, name: str, group: str
) -> None:
    machine = Machine(tmp_path)
    machine.group("/slurm/uid_1000/job_123")
    machine.group(f"/user.slice/{group}")
    assert find_group(engine, name, proc=machine.proc) == ""
    folder = machine.group(group)
    assert find_group(engine, name, proc=machine.proc) == group
    found = parse_workload(f"0::{group}/below\n".encode())
    assert found is not None
    assert (found.engine, found.id, found.group) == (engine, name, group)
    assert group_exists(group, proc=machine.proc) is True
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert group_exists(group, proc=machine.proc) is False


def test_the_limit_that_binds_may_be_one_above(tmp_path: Path) -> None:
    machine, group = Machine(tmp_path), "/slurm/uid_1000/job_12"
    machine.group("/slurm/uid_1000", limit_mib=4096)
    machine.group(group, limit_mib=8192, used_mib=100)
    assert memory_warning(SLURM, group, 3072, proc=machine.proc) == ""
    said = memory_warning(SLURM, group, 3073, proc=machine.proc)
    assert f"{machine.root}/slurm/uid_1000 (4096 MiB)" in said
    assert "raise --mem to 4097 MiB" in said
    machine.group(group, limit_mib=8192, used_mib=2000)
    assert "2000 MiB that a kernel uses" in memory_warning(KUBERNETES, group, 3000, proc=machine.proc)
    machine.group("/slurm/uid_1000")
    machine.group(group)
    assert memory_warning(SLURM, group, 60_000, proc=machine.proc) == "", "without a limit there is no reason to warn"


# -- this process ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "77"}, "Slurm job 77"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a Kubernetes pod"),
    ],
)
def test_in_a_container_the_engines_variables_say_it(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    assert own_workload(environment, proc=tmp_path) == said, "no cgroup can be read there"


def test_the_group_counts_more_than_the_variables(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:memory:/slurm/uid_0/job_12/step_0\n")
    assert own_workload({"SLURM_JOB_ID": "77"}, proc=tmp_path) == "Slurm job 12"
