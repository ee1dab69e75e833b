"""What surrounds a target: the machine, its memory, namespaces, control groups, swap. Items of tests/gpu/questions.py."""

import ctypes
import importlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tests.gpu.items import Item, Note, NotHereError, Setting, cycle, described, tried
from tests.gpu.look import Region, host_memory, kernel_log, mappings
from tests.gpu.talk import Talker

__all__ = ["FIRST", "LAST"]

_START_S: Final = 30.0
_ANSWER_S: Final = 20.0
_LONG_S: Final = 60.0
_MIB: Final = 1 << 20
_HOST_MIB: Final = 8192  # what the rest of the machine keeps while its memory is touched
_PART: Final = 256 << 20  # bytes that a thread touches at a time
_GROUPS: Final = Path("/sys/fs/cgroup")
_PROCESS_MADVISE, _PAGEOUT, _MOST_RANGES = 440, 21, 1024
_FILES: Final = (
    *(f"/sys/kernel/mm/transparent_hugepage/{name}" for name in ("enabled", "defrag", "shmem_enabled")),
    *("/proc/sys/vm/nr_overcommit_hugepages", "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/swappiness"),
    *("/proc/sys/kernel/yama/ptrace_scope", "/proc/driver/nvidia/version"),
)
_PACKAGES: Final = ("cuda-bindings", "nvidia-ml-py", "torch", "jax", "cupy-cuda13x", "numba-cuda")
_DEVICE: Final = ("Name", "PersistenceMode", "ComputeMode", "MigMode", "CurrPcieLinkGeneration", "CurrPcieLinkWidth")


def machine(setting: Setting, note: Note) -> None:
    """Sandbox, kernel, memory settings, what is installed, and the facts of `nvidia-smi -q` that decide something."""
    log = kernel_log()
    gvisor = platform.release() == "4.4.0" or any("gVisor" in line for line in log)
    note("sandbox", "gVisor" if gvisor else "none seen")
    note(
        "kernel",
        f"{platform.release()} {platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}",
    )
    note("kernel's log", f"{len(log)} lines can be read")
    note("control groups", "version 2" if (_GROUPS / "cgroup.controllers").is_file() else "version 1, or none")
    for path in _FILES:
        note(path, tried(partial(_words, path)))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    note(
        "process",
        {name: " ".join(status[name].split()) for name in ("Uid", "CapEff", "NSpid", "Seccomp") if name in status},
    )
    note("compiler", shutil.which("cc") or "none")
    note("packages", {one.name: one.version for one in metadata.distributions() if one.name in _PACKAGES})
    if not setting.simulated:
        note("device", tried(_device))


def _words(path: str) -> str:
    return " ".join(Path(path).read_text().split())


def _device() -> dict[str, object]:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    found: dict[str, object] = {"driver": nvml.nvmlSystemGetDriverVersion(), "count": nvml.nvmlDeviceGetCount()}
    for name in _DEVICE:
        try:
            found[name] = getattr(nvml, f"nvmlDeviceGet{name}")(handle)
        except nvml.NVMLError as error:
            found[name] = str(error)
    return found


def memory_total(setting: Setting, note: Note) -> None:
    """Whether the machine's memory grows when it is used, and how fast the kernel hands out fresh memory."""
    before = _meminfo()
    note("before_mib", before)
    mib = min(6 * setting.large_mib, before["MemAvailable"] - _HOST_MIB)
    if mib < 1:
        raise NotHereError(f"only {before['MemAvailable']} MiB are available")
    Path("/proc/self/oom_score_adj").write_text("1000")
    begun = time.perf_counter()
    with mmap.mmap(-1, mib * _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        parts = [memoryview(memory)[start : start + _PART] for start in range(0, len(memory), _PART)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_touch, parts))
        note("touched", {"mib": mib, "seconds": round(time.perf_counter() - begun, 2)})
        note("touched_mib", _meminfo())
        for part in parts:
            part.release()
    note("after_mib", _meminfo())


def _touch(part: memoryview) -> None:
    first = (ctypes.c_char * len(part)).from_buffer(part)
    ctypes.memset(first, 1, len(part))  # which lets other threads run


def _meminfo() -> dict[str, int]:
    told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        name: int(told[name].split()[0]) // 1024 for name in ("MemTotal", "MemAvailable", "SwapFree") if name in told
    }


# ---- namespaces and control groups -------------------------------------------------------------------------------------------


def in_namespace(setting: Setting, note: Note, options: tuple[str, ...]) -> None:
    """A target in a separate namespace, driven from outside: how driver and NVML know it, and a whole cycle."""
    with setting.hold(prefix=("unshare", *options)) as holder, setting.caller() as caller:
        holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        inner = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        pid = int(inner[0]) if inner else holder.pid  # unshare stays in front of a namespace of processes
        note("process", described(setting, caller, pid))
        note("cycle", cycle(caller, pid))
        note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))


@contextmanager
def _control_group(limit_mib: int | None = None) -> Iterator[Path]:
    """A control group for the block, in this process's own or next to it. Raises NotHereError."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = (_GROUPS / "cgroup.controllers").is_file()
    root, file = (_GROUPS, "memory.max") if first else (_GROUPS / "memory", "memory.limit_in_bytes")
    own = next((path for _, names, path in lines if (names == "" if first else names == "memory")), "/")
    parent = root / own.lstrip("/")
    if first and parent != root:
        parent = parent.parent  # a group with processes has no children with controllers
    group = parent / f"jgl-{os.getpid()}"
    try:
        if first:
            (parent / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        if limit_mib is not None:
            (group / file).write_text(str(limit_mib * _MIB))
    except OSError as error:
        raise NotHereError(f"no control group can be made: {error}") from error
    try:
        yield group
    finally:
        with suppress(OSError):  # a target that did not end is still in it
            group.rmdir()


def small_control_group(setting: Setting, note: Note) -> None:
    """A target whose control group has no room for what a checkpoint saves: refused, killed, or saved anyway?"""
    with _control_group(setting.small_mib // 2) as group, setting.caller() as caller:
        with setting.hold() as holder:
            holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
            (group / "cgroup.procs").write_text(str(holder.pid))
            note("cycle", tried(lambda: cycle(caller, holder.pid)))
            note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))
            note("ended with", holder.process.poll())
        note("the caller answers", tried(lambda: described(setting, caller, caller.pid)))


def memory_limits(setting: Setting, note: Note) -> None:
    """A limit of the driver on a control group's device memory: set, exceeded, and lowered below what a restore needs."""
    nvml: Any = importlib.import_module("pynvml")
    if not hasattr(nvml, "nvmlDeviceSetMemoryLimits_v1"):
        raise NotHereError("this nvidia-ml-py knows no memory limits (13.615 does)")
    with _control_group() as group, setting.hold() as holder, setting.caller() as caller:
        (group / "cgroup.procs").write_text(str(holder.pid))
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)

        def limit(mib: int) -> None:
            given = nvml.c_nvmlSetMemoryLimits_v1_t(str(group).encode(), 0, mib * _MIB)
            nvml.nvmlDeviceSetMemoryLimits_v1(handle, given)

        def charged_mib() -> float:
            told = nvml.c_nvmlGetMemoryLimits_v1_t(str(group).encode(), 0, 0, 0)
            nvml.nvmlDeviceGetMemoryLimits_v1(handle, told)
            return float(round(told.currentUsed / _MIB, 1))

        most_mib = 1024 + 2 * setting.small_mib  # with a context
        try:
            limit(most_mib)
        except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported) as error:
            raise NotHereError(f"this driver sets no memory limits: {error}") from error
        note("limit_mib", most_mib)
        note("past the limit", tried(lambda: holder.ask(_LONG_S, do="hold", mib=2 * most_mib, cached_mib=0)))
        holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        note("seen inside", tried(lambda: holder.ask(_ANSWER_S, do="room")))
        note("charged_mib", charged_mib())
        for call in ("lock", "checkpoint"):
            note(call, caller.ask(_LONG_S, call=call, pid=holder.pid))
        note("charged while saved, MiB", charged_mib())
        limit(setting.small_mib // 2)
        note("restore past the limit", caller.ask(_LONG_S, call="restore", pid=holder.pid))
        note("state", caller.ask(_ANSWER_S, call="state", pid=holder.pid))
        limit(most_mib)
        for call in ("restore", "unlock"):
            note(f"{call} within the limit", caller.ask(_LONG_S, call=call, pid=holder.pid))
        note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))


# ---- swap --------------------------------------------------------------------------------------------------------------------


def paged_out(setting: Setting, note: Note) -> None:
    """Whether saved memory can be moved to swap from outside, and what that costs the restore."""
    with _swap(4 * setting.small_mib), setting.hold() as holder, setting.caller() as caller:
        holder.ask(_START_S, do="hold", mib=setting.small_mib, cached_mib=0)
        for call in ("lock", "checkpoint"):
            note(call, caller.ask(_LONG_S, call=call, pid=holder.pid))
        note("before_mib", _swapped(holder))
        plain = [one for one in mappings(holder.pid) if not one.name and one.told.get("Anonymous")]
        begun = time.perf_counter()
        note("advised_mib", tried(lambda: round(_page_out(holder.pid, plain) / _MIB, 1)))
        note("advising_s", round(time.perf_counter() - begun, 3))
        note("after_mib", _swapped(holder))
        for call in ("restore", "unlock"):
            note(call, caller.ask(_LONG_S, call=call, pid=holder.pid))
        note("intact", tried(lambda: holder.ask(_ANSWER_S, do="check")["intact"]))


def _swapped(holder: Talker) -> dict[str, Any]:
    told = host_memory(holder.pid)
    return {name: told[name] for name in ("Anonymous", "Swap", "VmLck", "VmPin")}


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_size_t), ("length", ctypes.c_size_t))


def _page_out(pid: int, regions: list[Region]) -> int:
    """Ask the kernel to move a process's memory to swap, and return how many bytes it accepted. Raises OSError."""
    largest = sorted(regions, key=lambda one: one.start - one.end)[:_MOST_RANGES]
    ranges = (_Range * len(largest))(*(_Range(one.start, one.end - one.start) for one in largest))
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    count = ctypes.c_size_t(len(ranges))
    done = int(libc.syscall(ctypes.c_long(_PROCESS_MADVISE), process, ranges, count, _PAGEOUT, ctypes.c_uint(0)))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


@contextmanager
def _swap(mib: int) -> Iterator[None]:
    """Swap of this size: the machine's own, or a file for the block. Raises NotHereError."""
    if _meminfo().get("SwapFree", 0) >= mib:
        yield
        return
    with tempfile.NamedTemporaryFile(prefix="jgl-swap-", dir="/var/tmp") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, mib * _MIB)
            for command in ("mkswap", "swapon"):
                subprocess.run([command, file.name], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotHereError(f"there is no swap, and none can be made: {error}") from error
        try:
            yield
        finally:
            subprocess.run(["swapoff", file.name], check=True)


FIRST: Final = {"machine": Item(act=machine, longest_s=30), "memory-total": Item(act=memory_total, longest_s=60)}
LAST: Final = {
    "net-namespace": Item(act=partial(in_namespace, options=("--net",)), needs=("driver", "root")),
    "pid-namespace": Item(
        act=partial(in_namespace, options=("--pid", "--fork", "--kill-child", "--mount-proc")), needs=("driver", "root")
    ),
    "paged-out": Item(act=paged_out, needs=("driver", "root")),
    "memory-limits": Item(act=memory_limits, needs=("driver", "root")),
    "small-control-group": Item(act=small_control_group, needs=("driver", "root")),
}
