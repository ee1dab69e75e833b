"""Checks the machine: host memory, NVIDIA's driver and devices, and whether this user can checkpoint here. Changes nothing.

The checks suggest huge pages, because page faults slow down saving GPU memory to host memory. A trial checkpoint claims the devices and
skips those that a broker manages, because it is not safe for two processes to make checkpoints at the same time.
"""

import asyncio
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from fractional_gpu.commands.doctor.report import Finding, note, ok, problem, warning
from fractional_gpu.config import Settings
from fractional_gpu.core.model import Sharing
from fractional_gpu.core.units import format_memory, host_capacity
from fractional_gpu.gpu.checkpoint_trial import PHASES, TrialResult, try_checkpoint
from fractional_gpu.gpu.interface import DeviceInfo, GPUError, GPUErrorCode, Monitor
from fractional_gpu.gpu.limit_trial import try_memory_limit
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from fractional_gpu.gpu.nvidia.support import (
    MOVING_CUDA_VERSION,
    driver_refusal,
    driver_warnings,
    sharing_advice,
    sharing_refusal,
    why_no_bindings,
)
from fractional_gpu.gpu.probe_process import MEMORY_MIB
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.claims import DeviceClaim, DeviceClaimedError
from fractional_gpu.host.memory import LimitReader, adjustment, memory_groups, system_headroom
from fractional_gpu.host.process import PROC, owner_uid

SYS: Final = Path("/sys")
_REASON: Final = (
    "saving a kernel fills new host memory, so page faults limit its speed: 3.6 GiB of an H200 took 2.6 s with small pages, and "
    "2.0 s with huge pages"
)
_UNMEASURED: Final = "compare suspend times before and after"
_TOTAL: Final = re.compile(r"MemTotal:\s*(\d+) kB")
_CAP_SYS_RESOURCE: Final = 1 << 24
_LEAST_SWAPPINESS: Final = 1  # with this value, the system swaps only to avoid killing processes
_ALL_IDS: Final = ["0", "0", "4294967295"]  # the map of the first user namespace
_BIGGEST: Final = "a suspended kernel is the biggest process, because its memory holds its saved state"


def check_memory(devices: Sequence[DeviceInfo], settings: Settings | None, *, proc: Path = PROC) -> Iterator[Finding]:
    system, here = system_headroom(proc=proc), LimitReader(proc=proc).headroom(os.getpid())
    total_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    budget_mib = total_mib if settings is None else settings.host_budget_mib(total_mib)
    room_mib = min(system.mib, budget_mib)
    device_mib = sum(device.memory_mib for device in devices)
    what = f"{format_memory(room_mib)} for suspended kernels (free: {format_memory(system.mib)}, budget: {format_memory(budget_mib)})"
    if device_mib > room_mib:
        yield warning(
            "host-memory",
            f"{what}, less than the {format_memory(device_mib)} of device memory: not all of it can be suspended at once",
            "raise host_memory in jupyter_gpu_config.py, or add memory: what does not fit stays on the device",
        )
    else:
        yield ok("host-memory", what if not devices else f"{what}, devices hold {format_memory(device_mib)}")
    if devices and settings is not None:
        capacity = host_capacity(budget_mib, max(device.memory_mib for device in devices), settings.first_fraction)
        yield note("host-memory", f"capacity for suspended kernels: {capacity}")
    if here.mib >= system.mib:
        yield ok("cgroup", "no control group limits this process below the system's memory")
        return
    largest_mib = max((device.memory_mib for device in devices), default=0)
    limit = f"a process started here can use {format_memory(here.mib)} more, limited by {here.limited_by}"
    if here.mib < largest_mib:
        yield warning(
            "cgroup",
            f"{limit}: a kernel that fills a device of {format_memory(largest_mib)} cannot be suspended",
            "raise the memory limit of the kernels' control group (container, unit or job) by the device's memory",
        )
    else:
        yield note("cgroup", limit)


def check_huge_pages(sys: Path = SYS) -> Iterator[Finding]:
    folder = sys / "kernel/mm/transparent_hugepage"
    enabled = _setting(folder / "enabled")
    if not enabled:
        yield note("huge-pages", "this system does not report transparent huge pages: new memory uses small pages")
        return
    rest = {name: _setting(folder / name) for name in ("defrag", "shmem_enabled", "khugepaged/defrag")}
    settings = ", ".join(f"{name} {value}" for name, value in rest.items() if value)
    found = f"transparent huge pages: {enabled} ({settings})" if settings else f"transparent huge pages: {enabled}"
    if enabled != "always":
        yield note(
            "huge-pages",
            f"{found}: processes get huge pages only if they ask for them; {_REASON}",
            f"to try it, as root: echo always > {folder}/enabled; {_UNMEASURED}",
        )
    elif rest["defrag"] == "never":
        yield note(
            "huge-pages",
            f"{found}: new memory uses huge pages only while free ones are left, because the system creates no more; {_REASON}",
            f"to try it, as root: echo madvise > {folder}/defrag, or defer; {_UNMEASURED}",
        )
    else:
        yield ok("huge-pages", found)


def check_nodes(devices: Sequence[DeviceInfo], addresses: Mapping[str, str], sys: Path = SYS) -> Iterator[Finding]:
    nodes = _nodes(sys)
    if len(nodes) < 2:
        yield ok("numa", "the machine has one NUMA node, equally near to every device")
        return
    near: dict[int, list[DeviceInfo]] = {}
    for device in devices:
        try:
            address = addresses.get(device.device_id, "")
            node = int((sys / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        except (OSError, ValueError):
            node = -1  # the system does not say
        near.setdefault(node if node in nodes else -1, []).append(device)
    for node, there in sorted(near.items()):
        named = f"device {', '.join(str(device.index) for device in there)}"
        if node < 0:
            yield note(
                "numa",
                f"the machine has {len(nodes)} NUMA nodes, but does not report which one {named} is attached to",
                "try `nvidia-smi topo -m`; on some machines a firmware setting hides it",
            )
            continue
        held_mib = sum(device.memory_mib for device in there)
        what = f"{named} is attached to NUMA node {node} (of {len(nodes)}), which has {format_memory(nodes[node])}"
        if held_mib > nodes[node]:
            yield warning(
                "numa",
                f"{what}, less than the {format_memory(held_mib)} of the device{'s' if len(there) > 1 else ''}: the rest of the saved "
                f"state goes to another node and crosses the link between the processors both ways",
                "add memory to that node, or spread the devices over the nodes; the slowdown has not been measured",
            )
        else:
            yield note(
                "numa",
                f"{what}: a kernel that runs on another node saves its state there, across the link between the processors",
                f"if you can, start kernels near their device (numactl --cpunodebind={node} --preferred={node}, or CPUAffinity= and "
                "NUMAPolicy= in a unit); the gain has not been measured",
            )


def pci_address(nvml: ModuleType, device_id: str) -> str:
    try:
        place = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByUUID(device_id)).busId
    except (AttributeError, nvml.NVMLError):  # an old library lacks the call, and a MIG instance lacks the address
        return ""
    text = place.decode("ascii", "replace") if isinstance(place, bytes) else str(place)
    domain, _, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"  # the domain has eight digits in NVML, and four or more in /sys
    except ValueError:
        return ""


def check_swap(*, proc: Path = PROC) -> Iterator[Finding]:
    fields = dict(_fields(proc / "meminfo"))
    total_mib, free_mib = (int(fields.get(name, "0 kB").split()[0]) // 1024 for name in ("SwapTotal", "SwapFree"))
    if not total_mib:
        yield note(
            "swap",
            "none: if host memory runs out, the system kills a process immediately",
            "keep host_memory in jupyter_gpu_config.py well below the free memory, or add some swap as a cushion (a file or zram)",
        )
        return
    swappiness = _number(proc / "sys/vm/swappiness")
    used_mib = max(0, total_mib - free_mib)
    told_swappiness = "unknown" if swappiness is None else swappiness
    what = f"{format_memory(total_mib)}, {format_memory(used_mib)} in use, vm.swappiness {told_swappiness}"
    if swappiness is None or swappiness > _LEAST_SWAPPINESS:
        yield note(
            "swap",
            f"{what}: saved state is idle, so it is swapped out first, and a resume must wait until it has been read back",
            "as root: sysctl vm.swappiness=1, or MemorySwapMax=0 for the kernels' units (memory.swap.max of their groups)",
        )
    else:
        yield ok("swap", what)


def check_oom(broker_pid: int | None, *, proc: Path = PROC) -> Iterator[Finding]:
    if _number(proc / "sys/vm/panic_on_oom"):
        yield warning(
            "oom",
            "vm.panic_on_oom is set: if memory runs out, the whole machine panics and every kernel is lost",
            "as root: sysctl vm.panic_on_oom=0",
        )
    yield from _killed_together(proc)
    yield from _other_killers(proc)
    pid, whose = (os.getpid(), "a broker started here") if broker_pid is None else (broker_pid, "the broker")
    try:
        effective = int(dict(_fields(proc / str(pid) / "status")).get("CapEff", "0"), 16)
        is_first_namespace = (proc / str(pid) / "uid_map").read_text().split() == _ALL_IDS
        may = (
            bool(effective & _CAP_SYS_RESOURCE) and is_first_namespace
        )  # in another namespace, the capability has no effect here
        value, uid = adjustment(pid, proc=proc), owner_uid(pid, proc=proc)
    except (OSError, ValueError) as error:
        yield note("oom", f"cannot tell whether {whose} can protect kernels from the out-of-memory killer: {error}")
        return
    if may:
        yield ok("oom", f"{whose} protects suspended kernels from the out-of-memory killer")
        return
    yield note(
        "oom",
        f"{whose} (user {uid}, oom_score_adj {value}) has no CAP_SYS_RESOURCE here: if memory runs out, {_BIGGEST}, so the "
        f"out-of-memory killer may kill it even if another process used up the memory",
        "run the broker as root, as a system service (docs/hub.md), or give each user's kernels a separate memory limit and keep "
        "host_memory below the free memory",
    )


def _setting(file: Path) -> str:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    inside = re.search(r"\[(\S+)\]", text)
    return inside[1] if inside else text


def _nodes(sys: Path) -> dict[int, int]:
    found = {}
    for file in sys.glob("devices/system/node/node[0-9]*/meminfo"):
        total = _TOTAL.search(file.read_text(encoding="ascii"))
        if total is not None and int(total[1]):
            found[int(file.parent.name.removeprefix("node"))] = int(total[1]) // 1024
    return found


def _killed_together(proc: Path) -> Iterator[Finding]:
    folders = memory_groups(os.getpid(), proc=proc).get(2, [])
    together = [folder for folder in folders if _number(folder / "memory.oom.group")]
    if together:
        yield warning(
            "oom-group",
            f"if control group {together[0]} runs out of memory, the system kills every process in it, suspended kernels included",
            "as root: write 0 to its memory.oom.group; on Kubernetes, set the kubelet's singleProcessOOMKill",
        )


def _other_killers(proc: Path) -> Iterator[Finding]:
    for pid, name in _named_processes(proc):
        if name == "systemd-oomd":
            yield note(
                "oom",
                f"{name} is running (process {pid}): it kills whole control groups based on swap use and pressure, ignoring oom_score_adj",
                "set ManagedOOMPreference=omit for the kernels' units",
            )


def _named_processes(proc: Path) -> Iterator[tuple[int, str]]:
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # the process ended, or is hidden from this user
                yield int(folder.name), (folder / "comm").read_text(errors="replace").strip()


def _fields(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


NO_GPU: Final = "no GPU was found"
SIMULATE: Final = (
    "install NVIDIA's driver; to try it without a GPU: jupyter gpu demo, or JUPYTER_GPU_SIMULATE=1x2GiB in the environment of "
    "the Jupyter server"
)
_MPS: Final = "nvidia-cuda-mps"  # the kernel keeps 15 characters of nvidia-cuda-mps-control and nvidia-cuda-mps-server


class NvidiaReport(NamedTuple):
    devices: tuple[DeviceInfo, ...]
    findings: tuple[Finding, ...]


def check_nvidia(
    *,
    nvml: ModuleType | None = None,
    bindings: Callable[[], str] = why_no_bindings,
    proc: Path = PROC,
    sysfs: Path = SYS,
) -> NvidiaReport:
    library = importlib.import_module("pynvml") if nvml is None else nvml
    monitor = NvidiaMonitor(nvml=library, bindings=bindings)
    try:
        try:
            devices = tuple(monitor.devices())
        except GPUError as error:
            return NvidiaReport((), (problem("driver", str(error), "check `nvidia-smi` and `dmesg`"),))
        if not devices:
            why = f"{NO_GPU}: {monitor.why_none}; kernels with a share of a real GPU cannot start here"
            missing = bindings()
            needs = [note("cuda-bindings", f"{missing} (needed for real GPUs only)")] if missing else []
            return NvidiaReport((), (warning("driver", why, SIMULATE), *needs))
        findings = [
            *_driver(library),
            *_bindings(bindings()),
            *(_device(device) for device in devices),
            *(finding for device in devices for finding in _modes(library, device)),
            *check_nodes(devices, {one.device_id: pci_address(library, one.device_id) for one in devices}, sysfs),
            *_mps(proc),
        ]
        return NvidiaReport(devices, tuple(findings))
    finally:
        monitor.close()


def mps_processes(proc: Path = PROC) -> list[int]:
    return sorted(pid for pid, name in _named_processes(proc) if name.startswith(_MPS))


def _driver(nvml: ModuleType) -> Iterator[Finding]:
    version: str = nvml.nvmlSystemGetDriverVersion()
    level = _read(nvml, "nvmlSystemGetCudaDriverVersion_v2")  # 13010 means 13.1
    api = f", CUDA {level // 1000}.{level % 1000 // 10}" if level else ""
    refusal = driver_refusal(version)
    if refusal:
        now = f" (now {version}{api})" if api else ""
        yield problem("driver", f"{refusal}{now}", "until it is replaced, kernels run but are never suspended")
    else:
        yield ok("driver", f"{version}{api}")
    if level and level < MOVING_CUDA_VERSION:
        yield note(
            "moving",
            f"driver {version} can restore a kernel's state only on the device it came from",
            "install driver 580 or newer; until then, a suspended kernel waits for its own device",
        )
    for sentence in driver_warnings(version):
        yield warning("driver", sentence, "plan to install another release, and test it first")


def _bindings(why_not: str) -> Iterator[Finding]:
    if why_not:
        what, _, command = why_not.partition(": ")
        yield problem(
            "cuda-bindings", f"{what}: kernels cannot be suspended", f"{command} (in the broker's environment)"
        )
    else:
        yield ok("cuda-bindings", "installed and new enough for checkpoints")


def _device(device: DeviceInfo) -> Finding:
    what = f"{device.index}: {device.name}, {format_memory(device.memory_mib)}, {device.device_id}"
    if device.checkpointable:
        return ok("device", what)
    advice = "its kernels stay on it until they end"
    return warning("device", f"{what}; kernels on it cannot be suspended: {device.why_not}", advice)


def _modes(nvml: ModuleType, device: DeviceInfo) -> Iterator[Finding]:
    handle = nvml.nvmlDeviceGetHandleByUUID(device.device_id)
    persistent = _read(nvml, "nvmlDeviceGetPersistenceMode", handle)
    if persistent == 0:
        yield warning(
            "persistence",
            f"device {device.index} is not in persistence mode: after an idle period, the first kernel waits a few seconds for the driver",
            f"as root: nvidia-smi -i {device.index} -pm 1, or enable nvidia-persistenced",
        )
    elif persistent == 1:
        yield ok("persistence", f"device {device.index} is in persistence mode")
    mode = _read(nvml, "nvmlDeviceGetComputeMode", handle)
    if refusal := sharing_refusal(device.index, mode):
        yield problem("compute-mode", refusal, sharing_advice(device.index))
    mig = _read(nvml, "nvmlDeviceGetMigMode", handle)
    if mig and mig[0] != mig[1]:
        turn = "on" if mig[1] else "off"
        yield warning(
            "mig",
            f"MIG on device {device.index} will be turned {turn} at the next reset",
            "reset the device or reboot, then check again",
        )


def check_pools(settings: Settings | None, devices: Sequence[DeviceInfo], proc: Path = PROC) -> Iterator[Finding]:
    for pool in settings.pools if settings is not None else ():
        if pool.sharing is Sharing.MPS and not mps_processes(proc):
            yield problem(
                "mps-pool",
                f"pool {pool.name!r} shares through MPS, but no MPS control daemon is running: its kernels would have no compute limit",
                "nvidia-cuda-mps-control -d, as the user of the kernels or as root",
            )
        if pool.sharing is Sharing.MIG and not any(device.device_id.startswith("MIG-") for device in devices):
            yield problem(
                "mig-pool",
                f"pool {pool.name!r} hands out MIG instances, but there are none",
                "as root: nvidia-smi -mig 1, then nvidia-smi mig -cgi PROFILE -C",
            )
        library = pool.hami_library
        if library and not Path(library).is_file():
            yield problem(
                "hami", f"pool {pool.name!r} preloads {library}, which does not exist", "install HAMi-core there"
            )


def _mps(proc: Path) -> Iterator[Finding]:
    pids = mps_processes(proc)
    if pids:
        yield warning(
            "mps",
            f"MPS is running (process {pids[0]}): its clients cannot be checkpointed",
            "echo quit | nvidia-cuda-mps-control, or keep kernels off MPS if they should be suspended",
        )
    else:
        yield ok("mps", "not running")


def _read(nvml: ModuleType, call: str, *arguments: object) -> Any:  # noqa: ANN401 - NVML's
    """Return NVML's answer, or None if the library lacks the call or the driver refuses it."""
    try:
        return getattr(nvml, call)(*arguments)
    except (AttributeError, nvml.NVMLError):
        return None


def claim_and_try(backend: str, monitor: Monitor, devices: Sequence[DeviceInfo]) -> TrialResult:
    """Claim the devices and try a checkpoint on the first that supports it. Blocks for seconds, or for minutes if the driver hangs."""
    able = [device for device in devices if device.checkpointable]
    if not able:
        return TrialResult(not_tried="no device can be checkpointed")
    with ExitStack() as claims:
        try:
            for device in devices:
                claims.enter_context(DeviceClaim.claim(device.device_id))
        except DeviceClaimedError as error:
            return TrialResult(not_tried=str(error))

        async def with_worker() -> TrialResult:
            worker, device = WorkerLink(backend), able[0]
            try:
                result = await try_checkpoint(worker, monitor, device.device_id)
                if not result.wrong and monitor.kind == "nvidia":
                    result.limit = await try_memory_limit(worker, monitor, device.device_id, device.memory_mib)
                return result
            finally:
                await worker.close()

        return asyncio.run(with_worker())


def check_claims(devices: Sequence[DeviceInfo], broker: int | None) -> Iterator[Finding]:
    for device in devices:
        try:
            DeviceClaim.claim(device.device_id).close()
        except DeviceClaimedError as error:
            if broker is None or error.pid != broker:
                yield warning(
                    "broker",
                    str(error),
                    "until that process ends, your kernels cannot start there: ask an administrator for a broker for all users "
                    "(docs/operating.md)",
                )


def findings_of(result: TrialResult, *, kind: str) -> Iterator[Finding]:
    if result.not_tried:
        yield note("checkpoint", f"not tried: {result.not_tried}")
        return
    if result.wrong:
        yield problem("checkpoint", f"the trial on a test process failed: {result.wrong}", _advice(result.code))
        return
    each = ", ".join(f"{phase} {result.phases_us[phase] / 1000:.0f} ms" for phase in PHASES)
    simulated = " on a simulated device" if kind == "simulated" else ""
    yield ok("checkpoint", f"tried on a test process{simulated}: {MEMORY_MIB} MiB saved and restored ({each})")
    if result.before_mib is None:
        yield warning(
            "process-use",
            "the driver does not know the process ids used here, so it cannot report how much memory a kernel uses",
            "in a container, share the host's process ids (--pid=host), or run the broker on the host",
        )
    elif result.left_mib:
        yield warning(
            "process-use",
            f"while the process was suspended, it still held {result.left_mib} MiB of its {result.before_mib} MiB on the device",
            "allow for that much per suspended kernel, and report it together with the driver's version",
        )
    else:
        yield ok("process-use", f"the driver reported {result.before_mib} MiB for it, and none while it was suspended")
    if result.limit is not None and result.limit.why_not:
        yield note(
            "memory-limits",
            f"frameworks enforce memory caps, and the broker checks them afterwards: {result.limit.why_not}",
        )
    elif result.limit is not None:
        yield ok("memory-limits", "the driver enforces the caps of kernels in separate control groups")


def _advice(code: GPUErrorCode | None) -> str:
    if code is GPUErrorCode.NOT_PERMITTED:
        scope = Path(PROC, "sys/kernel/yama/ptrace_scope")
        level = scope.read_text().strip() if scope.is_file() else "not set"
        return (
            "run the broker as root (a system service), or give it CAP_SYS_PTRACE; "
            f"kernel.yama.ptrace_scope is {level}: 0 allows it for the same user"
        )
    if code is GPUErrorCode.WORKER_HUNG:
        return "the driver did not respond: check `nvidia-smi` and `dmesg`; you may have to reboot"
    return "until this works, kernels run but are not suspended; see the driver's release notes"
