"""The doctor's look at what happens where host memory runs out: swap, the out-of-memory killer, and who may steer it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fractional_gpu.commands.doctor.finding import (
    Finding,
    note,
    ok,
    warning,
)
from fractional_gpu.core.units import format_memory
from fractional_gpu.host.memory import memory_groups
from fractional_gpu.host.oom import adjustment
from fractional_gpu.host.process import PROC, owner_uid

__all__ = ["check_oom", "check_swap"]

_CAP_SYS_RESOURCE: Final = 1 << 24
_LEAST_SWAPPINESS: Final = 1  # swap is used to keep from killing only
_ALL_IDS: Final = [
    "0",
    "0",
    "4294967295",
]  # the map of the first user namespace: in another one the capability is void here
_OTHER_KILLERS: Final = {
    "earlyoom": "it goes by the same adjustments",
    "nohang": "it goes by the same adjustments",
    "systemd-oomd": "it ends whole control groups by their swap and pressure, whatever a process's adjustment is",
}
_BIGGEST: Final = "a suspended kernel holds its saved state in its own memory, and is the biggest process there"


def check_swap(*, proc: Path = PROC) -> Iterator[Finding]:
    """Say whether saved state may be swapped out, and what that means."""
    told = dict(_lines(proc / "meminfo"))
    total_mib, free_mib = (int(told.get(name, "0 kB").split()[0]) // 1024 for name in ("SwapTotal", "SwapFree"))
    if not total_mib:
        yield note(
            "swap",
            "none: where host memory runs out, the system kills a process at once",
            "keep host_memory in jupyter_gpu_config.py well below what is free, or add some swap as a cushion (a file, or zram)",
        )
        return
    swappiness = _number(proc / "sys/vm/swappiness")
    used_mib = max(0, total_mib - free_mib)
    told_swappiness = "unknown" if swappiness is None else swappiness
    what = f"{format_memory(total_mib)}, {format_memory(used_mib)} in use, vm.swappiness {told_swappiness}"
    if swappiness is None or swappiness > _LEAST_SWAPPINESS:
        yield note(
            "swap",
            f"{what}: saved state lies idle, so it is swapped out first, and a resume then waits until it is read back",
            "as root: sysctl vm.swappiness=1, or for the kernels' units MemorySwapMax=0 (memory.swap.max of their groups)",
        )
    else:
        yield ok("swap", what)


def check_oom(broker_pid: int | None, *, proc: Path = PROC) -> Iterator[Finding]:
    """Say who is killed where memory runs out. `broker_pid` is of the broker that serves here, None if none does."""
    if _number(proc / "sys/vm/panic_on_oom"):
        yield warning(
            "oom",
            "vm.panic_on_oom is set: the whole machine stops where memory runs out, and every kernel is lost",
            "as root: sysctl vm.panic_on_oom=0",
        )
    yield from _killed_together(proc)
    yield from _other_killers(proc)
    pid, whose = (os.getpid(), "a broker that is started here") if broker_pid is None else (broker_pid, "the broker")
    try:
        may, value, uid = _may_lower(pid, proc), adjustment(pid, proc=proc), owner_uid(pid, proc=proc)
    except (OSError, ValueError) as error:
        yield note("oom", f"what {whose} may do against the out-of-memory killer cannot be read: {error}")
        return
    if may:
        yield ok("oom", f"{whose} keeps the out-of-memory killer from taking kernels for their saved state")
        return
    yield note(
        "oom",
        f"{whose} (user {uid}, oom_score_adj {value}) has no CAP_SYS_RESOURCE here: where memory runs out, {_BIGGEST}, so the killer may "
        "take it although another one filled the memory",
        "run the broker as a system service of root (docs/hub.md), or give each user's kernels a memory limit of their own and keep "
        "host_memory below what is free",
    )


def _may_lower(pid: int, proc: Path) -> bool:
    effective = dict(_lines(proc / str(pid) / "status")).get("CapEff", "0")
    return (
        bool(int(effective, 16) & _CAP_SYS_RESOURCE) and (proc / str(pid) / "uid_map").read_text().split() == _ALL_IDS
    )


def _killed_together(proc: Path) -> Iterator[Finding]:
    try:
        folders = memory_groups(os.getpid(), proc=proc).get(2, [])
    except (OSError, ValueError):
        return  # said where the host's memory is looked at
    together = [folder for folder in folders if _number(folder / "memory.oom.group")]
    if together:
        yield warning(
            "oom-group",
            f"control group {together[0]} is killed as a whole where its memory runs out: nothing keeps a suspended kernel in it",
            "as root: write 0 to its memory.oom.group; on Kubernetes, singleProcessOOMKill of the kubelet",
        )


def _other_killers(proc: Path) -> Iterator[Finding]:
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                name = (folder / "comm").read_text(errors="replace").strip()
            except OSError:  # it ended, or is hidden from this user
                continue
            if name in _OTHER_KILLERS:
                yield note(
                    "oom",
                    f"{name} runs (process {folder.name}) and kills before the system does: {_OTHER_KILLERS[name]}",
                    "for systemd-oomd: ManagedOOMPreference=omit for the kernels' units"
                    if name == "systemd-oomd"
                    else "",
                )


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
