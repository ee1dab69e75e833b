"""Huge pages and memory nodes: what the doctor finds in /sys, with a reason and something to do."""

from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.machine import check_huge_pages, check_nodes
from fractional_gpu.commands.doctor.report import Finding, Severity
from fractional_gpu.gpu.interface import DeviceInfo

GIB = 1024


def huge_pages(sys: Path, **settings: str) -> Finding:
    folder = sys / "kernel/mm/transparent_hugepage"
    (folder / "khugepaged").mkdir(parents=True, exist_ok=True)
    for name, text in settings.items():
        (folder / name.replace("khugepaged_", "khugepaged/")).write_text(f"{text}\n")
    (found,) = check_huge_pages(sys)
    assert found.check == "huge-pages"
    return found


@pytest.mark.parametrize("enabled", ["always [madvise] never", "always madvise [never]"])
def test_where_programs_must_ask_for_huge_pages_the_reason_and_what_to_try_are_said(
    tmp_path: Path, enabled: str
) -> None:
    found = huge_pages(
        tmp_path, enabled=enabled, defrag="always defer [madvise] never", shmem_enabled="always [never] deny"
    )
    assert found.severity is Severity.NOTE
    chosen = enabled[enabled.index("[") + 1 : enabled.index("]")]
    assert found.finding.startswith(f"transparent huge pages: {chosen} (defrag madvise, shmem_enabled never)")
    assert "page faults are the slow part: without a GPU, one thread filled 1.65 GB/s" in found.finding
    assert "echo always > " in found.advice
    assert "has not been measured" in found.advice, "nothing is promised"


def test_huge_pages_for_everybody_are_fine_unless_nothing_makes_them(tmp_path: Path) -> None:
    always = {"enabled": "[always] madvise never", "khugepaged_defrag": "1"}
    found = huge_pages(tmp_path, **always, defrag="always [defer] never")
    assert found.severity is Severity.OK
    assert found.finding == "transparent huge pages: always (defrag defer, khugepaged/defrag 1)"
    found = huge_pages(tmp_path, **always, defrag="always defer madvise [never]")
    assert found.severity is Severity.NOTE
    assert "defrag" in found.advice


# -- memory nodes ------------------------------------------------------------------------------------------------------------


def device(index: int, memory_mib: int) -> DeviceInfo:
    return DeviceInfo(
        device_id=f"GPU-{index}",
        index=index,
        name="H100",
        memory_mib=memory_mib,
        simulated=False,
        checkpointable=True,
    )


def machine(sys: Path, nodes: list[int], near: dict[str, int]) -> Path:
    """A machine with this much memory on each node, MiB, and devices on the bus near to nodes."""
    for number, mib in enumerate(nodes):
        folder = sys / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {number} MemTotal: {mib * 1024:>15} kB\nNode {number} MemFree: 1 kB\n")
    for address, node in near.items():
        folder = sys / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return sys


A, B = "0000:65:00.0", "0000:ca:00.0"


def test_a_device_near_to_a_node_of_several_says_how_to_stay_there(tmp_path: Path) -> None:
    sys = machine(tmp_path, [256 * GIB, 256 * GIB], {A: 0, B: 1})
    first, second = check_nodes([device(0, 80 * GIB), device(1, 80 * GIB)], {"GPU-0": A, "GPU-1": B}, sys)
    assert (first.severity, second.severity) == (Severity.NOTE, Severity.NOTE)
    assert "device 0 is near to memory node 0 of 2, which has 256 GiB" in first.finding
    assert "--preferred=1" in second.advice
    assert "has not been measured" in second.advice


def test_a_node_with_less_memory_than_its_devices_is_a_warning(tmp_path: Path) -> None:
    sys = machine(tmp_path, [128 * GIB, 128 * GIB], {A: 1, B: 1})
    (found,) = check_nodes([device(0, 80 * GIB), device(1, 80 * GIB)], {"GPU-0": A, "GPU-1": B}, sys)
    assert found.severity is Severity.WARNING
    assert "device 0, 1 is near to memory node 1 of 2" in found.finding
    assert "less than the 160 GiB of the devices" in found.finding
