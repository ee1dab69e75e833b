"""Memory limits of control groups: the calls to the driver, and what processes then see."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, MemoryLimit
from tests.driver_double import releases
from tests.driver_double.conftest import StartKernel
from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import KernelError, KernelProcess
from tests.support.control_group import unit_group

MIB = 1 << 20
Group = tuple[str, Path]


@pytest.fixture
def double(double: DriverDouble) -> DriverDouble:
    double.set(driver="615")
    return double


@pytest.fixture
def group() -> Iterator[Group]:
    with unit_group() as group:
        yield group


@pytest.fixture
def member(start: StartKernel, group: Group) -> KernelProcess:
    """A process in the group, without a context."""
    kernel = start()
    (group[1] / "cgroup.procs").write_text(str(kernel.pid))
    return kernel


def set_limit(remote: Remote, double: DriverDouble, group: Group, mib: int | None) -> None:
    remote.call("limits", "set", (double.devices[0].device_id, group[0], mib))


def test_the_driver_is_told_the_groups_folder_and_bytes(double: DriverDouble, remote: Remote, group: Group) -> None:
    set_limit(remote, double, group, 100)
    set_limit(remote, double, group, None)
    told = [call.arguments for call in double.calls("nvmlDeviceSetMemoryLimits_v1")]
    assert [one["group"] for one in told] == [str(group[1])] * 2
    soft, hundred_mib, none = bytes(8), (100 * MIB).to_bytes(8, "little"), b"\xff" * 8
    assert [one["limits"] for one in told] == [(soft + hundred_mib).hex(), (soft + none).hex()]


def test_a_limit_is_read_with_what_the_group_uses(
    double: DriverDouble, remote: Remote, group: Group, member: KernelProcess
) -> None:
    device_id = double.devices[0].device_id
    assert remote.call("limits", "read", (device_id, group[0])) is None
    set_limit(remote, double, group, 100)
    member.run("!x = cuda.allocate(2**20)")
    assert remote.call("limits", "read", (device_id, group[0])) == MemoryLimit(hard_mib=100, used_mib=33)
    set_limit(remote, double, group, None)
    assert remote.call("limits", "read", (device_id, group[0])) is None


def test_all_processes_of_a_group_share_its_limit(
    double: DriverDouble, remote: Remote, group: Group, member: KernelProcess, start: StartKernel
) -> None:
    child = start()
    (group[1] / "cgroup.procs").write_text(str(child.pid))
    outsider = start()
    set_limit(remote, double, group, 128)
    member.run("!x = cuda.allocate(40 * 2**20)")
    with pytest.raises(KernelError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        child.run("!x = cuda.allocate(40 * 2**20)")  # two contexts of 32 MiB, and 80 MiB
    child.run("!x = cuda.allocate(20 * 2**20)")
    outsider.run("!x = cuda.allocate(200 * 2**20)")


@pytest.mark.parametrize("told", [True, False])
def test_frameworks_see_the_limit_as_the_device_if_the_driver_tells_it(
    told: bool, double: DriverDouble, remote: Remote, group: Group, member: KernelProcess
) -> None:
    double.set(limits_told=told)
    set_limit(remote, double, group, 128)
    size_mib = 128 if told else double.devices[0].mib
    assert member.run("cuda.memory_info()") == [(size_mib - 32) * MIB, size_mib * MIB]


def test_a_restore_past_the_limit_is_fatal_unless_the_limit_was_raised_before(
    double: DriverDouble, remote: Remote, group: Group, member: KernelProcess
) -> None:
    member.run("!x = cuda.allocate(40 * 2**20)")
    driver = remote.checkpointer
    for mib in (72, 71):
        driver.lock(member.pid, 1000)
        driver.checkpoint(member.pid)
        set_limit(remote, double, group, 0)
        set_limit(remote, double, group, mib)
        if mib == 72:
            driver.restore(member.pid)
            driver.unlock(member.pid)
    with pytest.raises(GPUError) as failed:
        driver.restore(member.pid)
    assert failed.value.code is GPUErrorCode.OUT_OF_MEMORY


def test_a_driver_without_limits_and_a_group_that_is_gone_are_told(
    double: DriverDouble, remote: Remote, group: Group
) -> None:
    with pytest.raises(GPUError, match="not in a mounted cgroup v2 hierarchy") as gone:
        set_limit(remote, double, ("/no-such.service", group[1]), 1)
    assert gone.value.code is GPUErrorCode.OPERATING_SYSTEM
    double.set(driver="610")
    with pytest.raises(GPUError) as old:
        set_limit(remote, double, group, 1)
    assert old.value.code is GPUErrorCode.NOT_SUPPORTED


def test_the_oldest_nvidia_ml_py_has_no_limits(double: DriverDouble, group: Group) -> None:
    with Remote(double, nvml=releases.oldest("nvidia-ml-py")) as remote, pytest.raises(GPUError) as old:
        set_limit(remote, double, group, 1)
    assert old.value.code is GPUErrorCode.NOT_SUPPORTED
    assert "nvidia-ml-py>=13.615" in str(old.value)
