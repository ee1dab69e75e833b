"""What the doctor finds about swap and the out-of-memory killer, with a reason and something to do."""

import os
from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.machine import check_oom, check_swap
from fractional_gpu.commands.doctor.report import Finding, Severity

BROKER = 77
ALL = "         0          0 4294967295\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with a broker that has every capability, and this process without any; no group limits memory."""
    folder = tmp_path / "proc"
    (folder / "sys/vm").mkdir(parents=True)
    (folder / "self").mkdir()
    (folder / "self/mountinfo").write_text(f"30 23 0:26 / {tmp_path}/group rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "group").mkdir()
    process(folder, BROKER, "python", capabilities=0x1FFFFFFFFFF, adjustment=-500)
    process(folder, os.getpid(), "python", capabilities=0, uid=1000)
    return folder


def process(
    proc: Path, pid: int, name: str, *, capabilities: int = 0, uid: int = 0, adjustment: int = 0, ids: str = ALL
) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "cgroup").write_text("0::/\n")
    (folder / "uid_map").write_text(ids)
    (folder / "oom_score_adj").write_text(f"{adjustment}\n")
    (folder / "status").write_text(f"Name:\t{name}\nUid:\t{uid}\t{uid}\nCapEff:\t{capabilities:016x}\n")


def memory(proc: Path, swap_mib: int, free_mib: int = 0, swappiness: str | None = "60") -> Finding:
    (proc / "meminfo").write_text(
        f"MemTotal: 1024 kB\nSwapTotal: {swap_mib * 1024} kB\nSwapFree: {free_mib * 1024} kB\n"
    )
    if swappiness is not None:
        (proc / "sys/vm/swappiness").write_text(f"{swappiness}\n")
    (found,) = check_swap(proc=proc)
    assert found.check == "swap"
    return found


def test_no_swap_means_a_kill_at_once(proc: Path) -> None:
    found = memory(proc, 0)
    assert found.severity is Severity.NOTE
    assert "kills a process at once" in found.finding
    assert "host_memory" in found.advice


@pytest.mark.parametrize("swappiness", ["60", "2", None])
def test_swap_that_is_used_early_makes_resumes_wait(proc: Path, swappiness: str | None) -> None:
    found = memory(proc, 8192, 6144, swappiness)
    assert found.severity is Severity.NOTE
    assert found.finding.startswith("8 GiB, 2 GiB in use, vm.swappiness ")
    assert "a resume must wait" in found.finding
    assert "vm.swappiness=1" in found.advice


def test_swap_as_a_cushion_only_is_fine(proc: Path) -> None:
    assert memory(proc, 8192, 8192, "1").severity is Severity.OK


def test_a_broker_that_may_not_is_named_with_what_to_do(proc: Path) -> None:
    (found,) = check_oom(None, proc=proc)
    assert found.severity is Severity.NOTE
    assert found.finding.startswith("a broker started here (user 1000, oom_score_adj 0) has no CAP_SYS_RESOURCE")
    assert "is the biggest process," in found.finding
    assert "system service of root" in found.advice


def test_a_machine_that_stops_instead_is_a_warning(proc: Path) -> None:
    (proc / "sys/vm/panic_on_oom").write_text("1\n")
    found, _ = check_oom(BROKER, proc=proc)
    assert (found.severity, found.advice) == (Severity.WARNING, "as root: sysctl vm.panic_on_oom=0")


@pytest.mark.parametrize(("value", "said"), [("1", True), ("0", False)])
def test_a_group_that_is_killed_as_a_whole_is_a_warning(proc: Path, value: str, *, said: bool) -> None:
    (proc.parent / "group/memory.oom.group").write_text(f"{value}\n")
    found = [one for one in check_oom(BROKER, proc=proc) if one.check == "oom-group"]
    assert [one.severity for one in found] == [Severity.WARNING] * said
    assert all("singleProcessOOMKill" in one.advice for one in found)


@pytest.mark.parametrize("name", ["earlyoom", "systemd-oomd", "nohang"])
def test_another_killer_is_named(proc: Path, name: str) -> None:
    process(proc, 60, name)
    found = [one for one in check_oom(BROKER, proc=proc) if name in one.finding]
    assert [one.severity for one in found] == [Severity.NOTE]
