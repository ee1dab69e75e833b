"""Promises of fractional_gpu.host.memory, on made-up /proc and control group trees, and once on the real ones."""

import os
from pathlib import Path

import pytest

from fractional_gpu.host.memory import Headroom, LimitReader, shortage, system_headroom

MIB = 1024 * 1024
PID = 4242
SYSTEM = "the system's memory"
UNLIMITED_V1 = 9223372036854771712


class Host:
    """A machine of 100 GiB with 50 GiB available, to which mounts and groups are added."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.sys = root / "sys fs"  # a space, as mountinfo escapes it
        (self.proc / str(PID)).mkdir(parents=True)
        (self.proc / "self").mkdir()
        self.memory(available_mib=50 * 1024)
        self.mountinfo: list[str] = ["22 1 8:1 / / rw - ext4 /dev/sda1 rw"]
        self.cgroup()

    def memory(self, *, available_mib: int, total_mib: int = 100 * 1024) -> None:
        text = f"MemTotal: {total_mib * 1024} kB\nMemFree: 12 kB\nMemAvailable: {available_mib * 1024} kB\n"
        (self.proc / "meminfo").write_text(text)

    def mount(self, version: int, point: str, root: str = "/") -> Path:
        folder = self.sys / point
        folder.mkdir(parents=True, exist_ok=True)
        name = str(folder).replace(" ", "\\040")
        tail = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        self.mountinfo.append(f"30 22 0:26 {root} {name} rw,nosuid shared:9 - {tail}")
        (self.proc / "self/mountinfo").write_text("\n".join(self.mountinfo) + "\n")
        return folder

    def cgroup(self, *lines: str) -> None:
        (self.proc / "self/mountinfo").write_text("\n".join(self.mountinfo) + "\n")
        (self.proc / str(PID) / "cgroup").write_text("".join(line + "\n" for line in lines))

    def headroom(self) -> Headroom:
        return LimitReader(proc=self.proc).headroom(PID)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def v2(folder: Path, *, maximum: int | None, current: int, high: int | None = None, inactive: int = 0) -> None:
    """Write a version 2 group; all in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if maximum is None else f"{maximum * MIB}\n")
    (folder / "memory.high").write_text("max\n" if high is None else f"{high * MIB}\n")
    (folder / "memory.current").write_text(f"{current * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile {inactive * MIB * 2}\ninactive_file {inactive * MIB}\n")


def v1(folder: Path, *, limit: int | None, usage: int, inactive: int = 0) -> None:
    """Write a version 1 group; all in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{UNLIMITED_V1 if limit is None else limit * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage * MIB}\n")
    stat = f"inactive_file 7\ntotal_inactive_file {inactive * MIB}\n"
    (folder / "memory.stat").write_text(stat)


def test_without_control_groups_the_system_binds_less_a_margin(host: Host) -> None:
    assert host.headroom() == Headroom(48 * 1024, SYSTEM)  # 2 % of 100 GiB kept
    assert system_headroom(proc=host.proc) == host.headroom()


def test_a_group_of_version_2_binds_and_inactive_file_cache_is_room(host: Host) -> None:
    top = host.mount(2, "cgroup")
    v2(top / "user.slice/kernel.scope", maximum=10_000, current=4_000, inactive=1_000)
    host.cgroup("0::/user.slice/kernel.scope")
    found = host.headroom()
    assert found.mib == 10_000 - (4_000 - 1_000) - 200
    assert "user.slice/kernel.scope (10000 MiB)" in found.limited_by


def test_the_tightest_ancestor_binds(host: Host) -> None:
    top = host.mount(2, "cgroup")
    v2(top / "a", maximum=9_000, current=8_000)
    v2(top / "a/b", maximum=None, current=3_000)
    v2(top / "a/b/c", maximum=5_000, current=2_000)
    host.cgroup("0::/a/b/c")
    found = host.headroom()
    assert found.mib == 1_000 - 180
    assert found.limited_by.endswith("/a (9000 MiB)")


def test_a_group_without_a_limit_leaves_it_to_the_system(host: Host) -> None:
    v2(host.mount(2, "cgroup") / "a", maximum=None, current=2_000)
    host.cgroup("0::/a")
    assert host.headroom().limited_by == SYSTEM


def test_a_group_of_version_1_binds_and_its_unlimited_is_no_limit(host: Host) -> None:
    top = host.mount(1, "cgroup/memory")
    v1(top, limit=None, usage=60_000)
    v1(top / "docker", limit=8_000, usage=5_000, inactive=500)
    v1(top / "docker/x", limit=None, usage=100)
    host.cgroup("5:cpu,cpuacct:/docker/x", "4:hugetlb,memory:/docker/x", "1:name=systemd:/docker/x")
    found = host.headroom()
    assert found.mib == 8_000 - 4_500 - 160
    assert found.limited_by.endswith("/docker (8000 MiB)")
    v1(top / "docker", limit=None, usage=5_000)
    assert host.headroom().limited_by == SYSTEM


def test_a_container_that_mounts_its_own_part_of_the_hierarchy_is_followed(host: Host) -> None:
    top = host.mount(1, "cgroup/memory", root="/docker/abc")
    v1(top, limit=4_000, usage=1_000)
    v1(top / "kernel", limit=2_000, usage=500)
    host.cgroup("4:memory:/docker/abc/kernel")
    assert host.headroom().mib == 1_500 - 64
    host.cgroup("4:memory:/docker/abc")
    assert host.headroom().mib == 3_000 - 80


@pytest.mark.parametrize("path", ["/kubepods/pod1/abc", "/../sibling", "/.."])
def test_where_the_group_is_not_visible_the_mounts_own_limit_counts(host: Host, path: str) -> None:
    top = host.mount(2, "cgroup", root="/docker/abc")
    v2(top, maximum=4_000, current=1_000)
    host.cgroup(f"0::{path}")
    assert host.headroom().mib == 3_000 - 80


def test_a_limit_that_cannot_be_read_is_an_error(host: Host) -> None:
    top = host.mount(2, "cgroup")
    (top / "a/memory.max").mkdir(parents=True)
    host.cgroup("0::/a")
    with pytest.raises(IsADirectoryError):
        host.headroom()


def test_a_process_that_is_gone_is_told_apart(host: Host) -> None:
    with pytest.raises(ProcessLookupError, match="no process has the id 77"):
        LimitReader(proc=host.proc).headroom(77)


def test_the_real_machine_answers_for_this_process() -> None:
    found = LimitReader().headroom(os.getpid())
    assert 0 <= found.mib <= system_headroom().mib + 1024  # memory comes and goes between the two readings
    assert found.limited_by


@pytest.mark.parametrize("name", ["mine\x0cx", "mine\x0c0::"])
def test_a_group_s_limit_binds_whatever_characters_its_name_has(host: Host, name: str) -> None:
    v2(host.mount(2, "cgroup") / name, maximum=1024, current=24)
    host.cgroup(f"0::/{name}")
    assert host.headroom().mib == 936


def test_processes_that_take_memory_together_share_the_room_of_each_limit(host: Host) -> None:
    folder = host.mount(2, "cgroup")
    v2(folder / "user/one", maximum=20_000, current=1_000)
    v2(folder / "user/two", maximum=None, current=1_000)
    v2(folder / "user", maximum=22_000, current=10_000)
    host.cgroup("0::/user/one")
    (host.proc / "5").mkdir()
    (host.proc / "5" / "cgroup").write_text("0::/user/two\n")
    assert shortage({PID: 5_000, 5: 5_000}, proc=host.proc) is None
    found = shortage({PID: 10_000, 5: 10_000}, proc=host.proc)  # each alone would fit
    assert found is not None
    assert (found.need_mib, found.left_mib) == (20_000, 12_000 - 440)
    assert found.limited_by == f"the memory limit of control group {folder}/user (22000 MiB)"
    found = shortage(
        {PID: 30_000, 5: 30_000}, proc=host.proc
    )  # the system lacks more than any group, but the group above
    assert found is not None
    assert found.need_mib == 60_000
    assert shortage({}, proc=host.proc) is None
    with pytest.raises(ProcessLookupError):
        shortage({9: 1}, proc=host.proc)
