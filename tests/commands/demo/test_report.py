"""The demonstration's result."""

from dataclasses import replace

from fractional_gpu.commands.demo.demo import DemoKernel, render_report, report_as_json
from fractional_gpu.commands.terminal.text import plain
from fractional_gpu.protocol.status import HostStatus
from tests.commands.pictures import a_device, a_host, a_lease
from tests.support.statuses import changed


def host_of(name: str, memory_mib: int = 1024, *, simulated: bool = True) -> HostStatus:
    return a_host(simulated=simulated, devices=[a_device(name=name, memory_mib=memory_mib)])


HOST = host_of("Simulated GPU")
TENANT_A = DemoKernel(
    name="tenant-a",
    kernelspec="fractional-gpu-default-750",
    lease=a_lease(fraction_milli=750, state="suspended", suspends=5, resumes=4),
    moved_s=1.25,
    compared_bytes=576 * 2**20,
    state_intact=True,
)
TENANT_B = replace(TENANT_A, name="tenant-b", lease=changed(TENANT_A.lease, state="resident", suspends=4), moved_s=1.0)


def test_the_table() -> None:
    assert (
        plain(render_report(HOST, [TENANT_A, TENANT_B]))
        == """\
Simulated GPU, 1 GiB
  KERNEL    GPU  STATE       SUSPENDED  RESUMED  MOVING  COMPARED  INTACT
  tenant-a  3/4  suspended   5 times    4 times  1.2 s   576 MiB   yes
  tenant-b  3/4  on the GPU  4 times    4 times  1.0 s   576 MiB   yes
Together they asked for 1.5 GPUs, and every byte survived.
"""
    )


def test_lost_state_is_not_ok_and_the_table_shouts() -> None:
    lost = replace(TENANT_B, state_intact=False)
    assert report_as_json(HOST, [TENANT_A, lost])["ok"] is False
    text = plain(render_report(HOST, [TENANT_A, lost]))
    assert "NO" in text
    assert text.endswith("Something is wrong: tenant-b lost state.\n")


def test_a_demonstration_that_moved_nothing_shows_nothing_and_is_not_ok() -> None:
    for lease in (changed(TENANT_A.lease, suspends=0), changed(TENANT_A.lease, resumes=0)):
        still = replace(TENANT_A, lease=lease)
        assert report_as_json(HOST, [still])["ok"] is False
