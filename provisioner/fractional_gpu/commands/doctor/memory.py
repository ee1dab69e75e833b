"""The doctor's look at how fast fresh host memory is: huge pages, and the memory node that a device is near to.

What is saved from a device lands in fresh memory of the kernel's own process, and the slow part of that is page faults, as far as is known.
Populating memory on a machine without a GPU ran at 1.65 GB/s with one thread on 4 KiB pages, and at 8.6 GB/s with two threads on huge ones.
No figure has been measured with NVIDIA's driver: the findings say so and promise no speed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from fractional_gpu.commands.doctor.finding import (
    Finding,
    note,
    ok,
    warning,
)
from fractional_gpu.core.units import format_memory
from fractional_gpu.gpu.interface import DeviceInfo

__all__ = ["SYS", "check_huge_pages", "check_nodes", "pci_address"]

SYS: Final = Path("/sys")
_REASON: Final = (
    "saving a kernel fills fresh host memory, where page faults are the slow part: 1.65 GB/s with one thread on small pages and 8.6 GB/s "
    "with two on huge ones, populated without a GPU"
)
_UNMEASURED: Final = "whether NVIDIA's driver gains from it has not been measured: compare suspends before and after"
_TOTAL: Final = re.compile(r"MemTotal:\s*(\d+) kB")


def check_huge_pages(sys: Path = SYS) -> Iterator[Finding]:
    """Say how this machine hands out transparent huge pages, and what may be tried."""
    folder = sys / "kernel/mm/transparent_hugepage"
    enabled = _chosen(folder / "enabled")
    if not enabled:
        yield note(
            "huge-pages", "this system does not tell of transparent huge pages: fresh memory comes in small ones"
        )
        return
    rest = {name: _chosen(folder / name) for name in ("defrag", "shmem_enabled", "khugepaged/defrag")}
    settings = ", ".join(f"{name} {value}" for name, value in rest.items() if value)
    found = f"transparent huge pages: {enabled} ({settings})" if settings else f"transparent huge pages: {enabled}"
    if enabled != "always":
        yield note(
            "huge-pages",
            f"{found}: a process that does not ask for huge pages gets small ones; {_REASON}",
            f"to try it, as root: echo always > {folder}/enabled; {_UNMEASURED}",
        )
    elif rest["defrag"] == "never":
        yield note(
            "huge-pages",
            f"{found}: fresh memory is huge only while free huge pages are left, for nothing makes new ones; {_REASON}",
            f"to try it, as root: echo madvise > {folder}/defrag, or defer; {_UNMEASURED}",
        )
    else:
        yield ok("huge-pages", found)


def check_nodes(devices: Sequence[DeviceInfo], addresses: Mapping[str, str], sys: Path = SYS) -> Iterator[Finding]:
    """Compare each memory node with the devices that are near to it. `addresses` are PCI addresses by device id."""
    nodes = _nodes(sys)
    if len(nodes) < 2:
        yield ok("numa", "the machine has one memory node, equally near to every device")
        return
    near: dict[int, list[DeviceInfo]] = {}
    for device in devices:
        node = _node_of(addresses.get(device.device_id, ""), sys)
        near.setdefault(node if node in nodes else -1, []).append(device)
    for node, there in sorted(near.items()):
        named = f"device {', '.join(str(device.index) for device in there)}"
        if node < 0:
            yield note(
                "numa",
                f"the machine has {len(nodes)} memory nodes, and does not tell which {named} is near to",
                "`nvidia-smi topo -m` may tell more; on some machines a firmware setting hides it",
            )
            continue
        held_mib = sum(device.memory_mib for device in there)
        what = f"{named} is near to memory node {node} of {len(nodes)}, which has {format_memory(nodes[node])}"
        if held_mib > nodes[node]:
            yield warning(
                "numa",
                f"{what}, less than the {format_memory(held_mib)} of the device{'s' if len(there) > 1 else ''}: what is saved beyond "
                "that lies on another node, and crosses the link between the processors both ways",
                "add memory to that node, or spread the devices over the nodes; by how much it slows a swap has not been measured",
            )
        else:
            yield note(
                "numa",
                f"{what}: state of a kernel that runs on another node's processors is saved there, and crosses the link between them",
                f"start kernels near their device where you can (numactl --cpunodebind={node} --preferred={node}, or CPUAffinity= and "
                "NUMAPolicy= of a unit); by how much it helps has not been measured",
            )


def pci_address(nvml: ModuleType, device_id: str) -> str:
    """Return where /sys/bus/pci has the device, "" where NVML does not tell."""
    try:
        place = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByUUID(device_id)).busId
    except (AttributeError, nvml.NVMLError):  # an old library lacks the call, an instance the address
        return ""
    text = place.decode("ascii", "replace") if isinstance(place, bytes) else str(place)
    domain, _, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"  # NVML gives the domain eight digits, /sys four or as many as it takes
    except ValueError:
        return ""


def _chosen(file: Path) -> str:
    """Return the setting in force: the one in brackets, or the only word; "" where the file is not there."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    inside = re.search(r"\[(\S+)\]", text)
    return inside[1] if inside else text


def _nodes(sys: Path) -> dict[int, int]:
    """Return the memory of each node that has any, MiB."""
    found = {}
    for file in sys.glob("devices/system/node/node[0-9]*/meminfo"):
        total = _TOTAL.search(file.read_text(encoding="ascii"))
        if total is not None and int(total[1]):
            found[int(file.parent.name.removeprefix("node"))] = int(total[1]) // 1024
    return found


def _node_of(address: str, sys: Path) -> int:
    """Return the memory node that a device is near to, -1 where that is not told."""
    try:
        return int((sys / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1
