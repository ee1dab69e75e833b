"""A pool's sharing mode reaches its kernels through their environment; if the machine lacks something for it, the broker does not start."""

from pathlib import Path

import pytest

from fractional_gpu.broker.kernels.kernel import check_pools, launch_environment, remove_books, sharing_environment
from fractional_gpu.config import ConfigError
from fractional_gpu.core.model import DeviceView, LeaseSpec, PoolSpec, Sharing
from fractional_gpu.jupyter.kernel_lease import KernelLease, environment_with


def pool(
    sharing: Sharing = Sharing.TIME_SLICE, *, devices: tuple[str, ...] = ("GPU-1",), library: str = ""
) -> PoolSpec:
    return PoolSpec(name="p", devices=devices, sharing=sharing, hami_library=library)


def spec(milli: int = 250, devices: int = 1) -> LeaseSpec:
    return LeaseSpec(lease_id="abc", pool="p", owner="ann", fraction_milli=milli, reserve_mib=10_000, devices=devices)


def held(leasable_mib: int, device_id: str = "MIG-1") -> DeviceView:
    return DeviceView(
        device_id=device_id, name="1g.10gb", pool="p", memory_mib=leasable_mib, leasable_mib=leasable_mib, reserved_mib=0,
        stranger_mib=0, over_committed=False, lost=False,
    )  # fmt: skip


def test_time_slicing_needs_nothing_more_than_to_be_no_client_of_a_daemon_of_mps() -> None:
    (name,) = sharing_environment(pool(), spec(), 10_000, [held(20_000)]).items()
    assert name == ("CUDA_MPS_PIPE_DIRECTORY", "/proc/self/without-mps")
    assert launch_environment(pool(), spec()) == {}


@pytest.mark.parametrize(("milli", "percent"), [(1000, "100"), (250, "25"), (125, "13"), (1, "1")])
def test_mps_limits_compute_and_memory(milli: int, percent: str) -> None:
    assert sharing_environment(pool(Sharing.MPS), spec(milli), 10_000, [held(20_000, "GPU-1")]) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-1=10000M",
    }
    assert sharing_environment(pool(Sharing.MPS), spec(milli), 10_000, []) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent
    }


def test_a_mig_instance_is_the_kernel_s_as_a_whole() -> None:
    assert sharing_environment(pool(Sharing.MIG), spec(1000), 10_000, [held(20_000)]) == {
        "JUPYTER_GPU_MEMORY_MIB": "20000"
    }
    assert sharing_environment(pool(Sharing.MIG), spec(1000), 10_000, []) == {}


def test_hami_is_there_from_the_start_with_books_of_the_lease_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    environment = launch_environment(pool(library="/opt/libvgpu.so"), spec(500))
    books = tmp_path / "jupyter-gpu-abc.hami"
    assert environment == {
        "LD_PRELOAD": "/opt/libvgpu.so",
        "JUPYTER_GPU_PRELOAD": "/opt/libvgpu.so",
        "CUDA_DEVICE_MEMORY_LIMIT": "10000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(books),
    }
    books.touch()
    remove_books("abc")
    remove_books("abc")
    assert not books.exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "/opt/libvgpu.so"),
        ({"LD_PRELOAD": "/lib/mine.so"}, "/lib/mine.so:/opt/libvgpu.so"),
        ({"LD_PRELOAD": "/opt/libvgpu.so"}, "/opt/libvgpu.so"),
    ],
)
def test_what_a_user_preloads_stays(before: dict[str, str], after: str) -> None:
    environment = launch_environment(pool(library="/opt/libvgpu.so"), spec())
    assert environment_with(lease_of(environment), before)["LD_PRELOAD"] == after


def lease_of(environment: dict[str, str]) -> KernelLease:
    return KernelLease(
        lease_id="abc",
        socket="/s",
        token="",
        token_file=Path("/t"),
        reserve_mib=1,
        gated=True,
        environment=environment,
    )


def test_a_library_that_is_not_there_stops_the_broker(tmp_path: Path) -> None:
    library = tmp_path / "libvgpu.so"
    with pytest.raises(ConfigError, match="which does not exist: install HAMi-core"):
        check_pools([pool(library=str(library))], {}, simulated=False)
    library.touch()
    check_pools([pool(library=str(library))], {}, simulated=False)


def test_a_mig_pool_has_instances_only() -> None:
    mixed = pool(Sharing.MIG, devices=("MIG-1", "GPU-1"))
    with pytest.raises(ConfigError, match=r"H100 \(GPU-1\) is a whole device: divide it"):
        check_pools([mixed], {"GPU-1": "H100"}, simulated=False)
    check_pools([pool(Sharing.MIG, devices=("MIG-1",))], {}, simulated=False)
    check_pools([mixed], {}, simulated=True)
