"""What NVML and /proc report about a process: the device's lists, its mappings and device files, and how its host memory counts.

    python -P -m tests.gpu.look nvidia|simulated:DIRECTORY      prints what the first device holds, MiB
    python -P -m tests.gpu.look --keep                          keeps NVML and the devices open until its standard input ends

Standard library and nvidia-ml-py only.
"""

import ctypes
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = [
    "Region",
    "containing",
    "device_files",
    "driver_messages",
    "grown",
    "host_memory",
    "kernel_log",
    "kinds_of_mappings",
    "mappings",
    "sees",
]

_MIB: Final = 1 << 20
_LISTS: Final = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
}
_HEAD: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")
_TOLD: Final = ("Rss", "Anonymous", "AnonHugePages", "ShmemPmdMapped", "Private_Hugetlb", "Locked", "Swap")
_GROUPS: Final = Path("/sys/fs/cgroup")


# ---- the device --------------------------------------------------------------------------------------------------------------


def sees(backend: str, *pids: int) -> dict[str, Any]:
    """Return what the first device holds and who is listed on it, MiB; `mib` is None for a process whose bytes are not told."""
    return _simulated(backend, pids) if backend.startswith("simulated:") else _nvidia(pids)


def _nvidia(pids: Iterable[int]) -> dict[str, Any]:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            reserved = memory.reserved
        except nvml.NVMLError:  # a driver without the second version
            memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), 0
        listed: dict[int, dict[str, Any]] = {}
        for kind, call in _LISTS.items():
            try:
                found = getattr(nvml, call)(handle)
            except nvml.NVMLError:
                continue
            for one in found:
                mib = None if one.usedGpuMemory is None else round(one.usedGpuMemory / _MIB, 1)
                listed.setdefault(one.pid, {"list": kind, "mib": mib})
    finally:
        nvml.nvmlShutdown()
    return {
        "used_mib": round(memory.used / _MIB, 1),
        "free_mib": round(memory.free / _MIB, 1),
        "total_mib": round(memory.total / _MIB, 1),
        "reserved_mib": round(reserved / _MIB, 1),
        "listed": {str(pid): listed.get(pid) for pid in pids},
        "others_listed": len(set(listed) - set(pids)),
    }


def _simulated(backend: str, pids: Iterable[int]) -> dict[str, Any]:
    from fractional_gpu.gpu.open import open_monitor  # noqa: PLC0415 - on hardware this file needs NVML only

    with closing(open_monitor(backend)) as monitor:
        device = min(monitor.devices(), key=lambda one: one.index)
        use = monitor.use(device.device_id)
    listed = {one.pid: {"list": one.kind.value, "mib": one.used_mib} for one in use.processes}
    return {
        "used_mib": use.used_mib,
        "free_mib": device.memory_mib - use.used_mib,
        "total_mib": device.memory_mib,
        "reserved_mib": 0,
        "listed": {str(pid): listed.get(pid) for pid in pids},
        "others_listed": len(set(listed) - set(pids)),
    }


# ---- /proc -------------------------------------------------------------------------------------------------------------------


class Region(NamedTuple):
    """One mapping; sizes in KiB as smaps tells them, by its names."""

    start: int
    end: int
    permissions: str
    name: str
    told: dict[str, int]
    flags: str


def mappings(pid: int) -> list[Region]:
    """Return the mappings, each with its fields in smaps. Raises OSError."""
    found: list[Region] = []
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        head = _HEAD.fullmatch(line)
        if head is not None:
            found.append(Region(int(head[1], 16), int(head[2], 16), head[3], head[4], {}, ""))
            continue
        key, _, rest = line.partition(":")
        if key == "VmFlags" and found:
            found[-1] = found[-1]._replace(flags=rest.strip())
        elif found and rest.endswith("kB"):
            found[-1].told[key] = int(rest.split()[0])
    return found


def kinds_of_mappings(found: Iterable[Region]) -> dict[str, dict[str, Any]]:
    """Return number, MiB and permissions of what is not an ordinary file: device files, shared and named memory, plain memory."""
    kinds: dict[str, dict[str, Any]] = {}
    for one in found:
        special = one.name.startswith(("/dev/", "/memfd:", "anon_inode", "[anon")) or not one.name
        if not special:
            continue
        name = re.sub(r"\d{3,}|\(deleted\)", "", one.name).strip() or "plain memory"
        kind = kinds.setdefault(name, {"mappings": 0, "mib": 0.0, "resident_mib": 0.0, "permissions": []})
        kind["mappings"] += 1
        kind["mib"] = round(kind["mib"] + (one.end - one.start) / _MIB, 2)
        kind["resident_mib"] = round(kind["resident_mib"] + one.told.get("Rss", 0) / 1024, 2)
        kind["permissions"] = sorted({*kind["permissions"], one.permissions})
    return kinds


def containing(found: Iterable[Region], address: int) -> dict[str, Any] | None:
    """Return the mapping that contains an address, or None."""
    for one in found:
        if one.start <= address < one.end:
            return {"name": one.name, "permissions": one.permissions, "flags": one.flags}
    return None


def device_files(pid: int) -> dict[str, int]:
    """Return how many descriptors the process has of each device file and of each kind of nameless file. Raises OSError."""
    counted: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(("/dev/", "/memfd:", "anon_inode:")):
            counted[target] += 1
    return dict(sorted(counted.items()))


def host_memory(pid: int) -> dict[str, Any]:
    """Return how the process's host memory counts, MiB: resident, anonymous, in huge pages, locked; and its control group's figures."""
    told = dict.fromkeys(_TOLD, 0)
    for one in mappings(pid):
        for name in _TOLD:
            told[name] += one.told.get(name, 0)
    status = Path(f"/proc/{pid}/status").read_text()
    for name in ("VmLck", "VmPin"):
        line = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        told[name] = int(line[1]) if line else 0
    return {**{name: round(value / 1024, 1) for name, value in told.items()}, "cgroup": _group(pid)}


def _group(pid: int) -> dict[str, Any]:
    """Return the figures of the process's own group, MiB; version 2 first, then version 1."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and (_GROUPS / path.lstrip("/") / "memory.current").is_file():
            folder, current = _GROUPS / path.lstrip("/"), "memory.current"
        elif "memory" in controllers.split(",") and (_GROUPS / "memory" / path.lstrip("/")).is_dir():
            folder, current = _GROUPS / "memory" / path.lstrip("/"), "memory.usage_in_bytes"
        else:
            continue
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        wanted = ("anon", "rss", "file", "shmem", "unevictable", "kernel")
        figures = {name: round(int(stat[name]) / _MIB, 1) for name in wanted if name in stat}
        return {"path": path, "current": round(int((folder / current).read_text()) / _MIB, 1), **figures}
    return {}


def grown(before: Iterable[Region], after: Iterable[Region], *, most: int = 6) -> list[dict[str, Any]]:
    """Return the mappings whose resident part has grown by more than 1 MiB, the largest growth first."""
    earlier = {one.start: one.told.get("Rss", 0) for one in before}
    rows = []
    for one in after:
        by = one.told.get("Rss", 0) - earlier.get(one.start, 0)
        if by > 1024:
            told = {name: round(one.told.get(name, 0) / 1024, 1) for name in _TOLD if one.told.get(name)}
            row = {"name": one.name or "plain memory", "permissions": one.permissions, "flags": one.flags}
            rows.append((by, {**row, "grown_mib": round(by / 1024, 1), **told}))
    rows.sort(key=lambda row: -row[0])
    return [row for _, row in rows[:most]]


# ---- the kernel's log --------------------------------------------------------------------------------------------------------


def kernel_log() -> list[str]:
    """Return the kernel's messages that are still there, oldest first; none if its log cannot be read."""
    read_all, size = 3, 10  # of syslog(2)
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(max(1, libc.klogctl(size, None, 0)))
    count = libc.klogctl(read_all, buffer, len(buffer))
    return buffer.raw[: max(0, count)].decode(errors="replace").splitlines()


@contextmanager
def driver_messages() -> Iterator[list[str]]:
    """Collect, at the block's end, what the kernel has logged about NVIDIA's driver since it began."""
    found: list[str] = []
    before = set(kernel_log())
    yield found
    found += [line for line in kernel_log() if line not in before and re.search("NVRM|Xid", line)]


def _keep() -> None:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    sys.stdout.write(f"{len(handles)}\n")
    sys.stdout.flush()
    os.read(0, 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--keep"]:
        _keep()
    else:
        sys.stdout.write(f"{sees(sys.argv[1])['used_mib']}\n")
