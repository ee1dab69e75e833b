"""Making and changing a simulated host."""

import os
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.open import open_checkpointer, open_monitor
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.store import SimulatedHostError, Store
from tests.gpu_sim.kernels import Kernel
from tests.support.full_disks import no_temporary_files


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2x80GiB", [81920, 81920]),
        ("512MiB", [512]),
        (" 1 x 1TiB ", [1048576]),
        ("1x2GiB,2x1gib", [2048, 1024, 1024]),
        ("64x1GiB", [1024] * 64),
    ],
)
def test_devices_are_read_from_text(text: str, sizes: list[int]) -> None:
    assert host.parse_devices(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "junk", "2", "2x", "x80GiB", "2x80", "0x80GiB", "2x0GiB", "65x1GiB", "-1x1GiB", "1x99TiB"]
)
def test_devices_that_are_not_allowed_are_refused_with_what_is(text: str) -> None:
    with pytest.raises(SimulatedHostError, match="2x80GiB"):
        host.parse_devices(text)


def test_an_existing_host_is_opened_with_the_same_devices(simulated: host.SimulatedHost) -> None:
    assert host.create(simulated.directory, "2x256MiB").devices == simulated.devices


def test_an_empty_host_may_change_its_devices(simulated: host.SimulatedHost) -> None:
    changed = host.create(simulated.directory, "128MiB")
    assert [device.memory_mib for device in changed.devices] == [128]
    assert changed.devices[0].device_id not in [device.device_id for device in simulated.devices]


def test_devices_do_not_change_under_living_processes(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    kernel.run("cuda.memory_info()")
    with pytest.raises(SimulatedHostError, match=rf"256, 256.*{kernel.pid}.*\[128\]"):
        host.create(simulated.directory, "1x128MiB")
    kernel.kill()
    assert len(host.create(simulated.directory, "1x128MiB").devices) == 1


def test_two_hosts_never_share_a_device_id(simulated: host.SimulatedHost, tmp_path: Path) -> None:
    other = host.create(tmp_path / "other", "2x256MiB")
    assert not {d.device_id for d in other.devices} & {d.device_id for d in simulated.devices}


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SimulatedHostError, match="not a link"):
        host.create(tmp_path / "link", "1GiB")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(SimulatedHostError, match="not writable by other users"):
        host.create(tmp_path / "open", "1GiB")


def test_a_host_of_another_version_is_refused(simulated: host.SimulatedHost) -> None:
    store = Store(simulated.directory)
    with store.transaction() as db:
        db.execute("UPDATE meta SET value='99' WHERE name='version'")
    store.close()
    with pytest.raises(SimulatedHostError, match=r"version 99.*remove the folder"):
        Store(simulated.directory)


def test_a_damaged_host_is_refused(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir(mode=0o700)
    (tmp_path / "host" / "host.sqlite").write_bytes(b"this is not a database" * 100)
    with pytest.raises(SimulatedHostError, match="cannot be opened"):
        Store(tmp_path / "host")


def test_a_host_is_removed_only_when_unused(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    kernel.run("cuda.memory_info()")
    with pytest.raises(SimulatedHostError, match=str(kernel.pid)):
        host.destroy(simulated.directory)
    kernel.kill()
    host.destroy(simulated.directory)
    assert not simulated.directory.exists()


def test_a_host_lives_in_memory_or_in_the_temporary_folder_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = host.choose_directory("test-of-naming")
    assert folder == host.choose_directory("test-of-naming")
    assert folder.parent.is_dir()
    assert str(os.getuid()) in folder.name
    no_temporary_files(monkeypatch)
    assert folder == host.choose_directory("test-of-naming"), "on a full disk, too"
    with pytest.raises(SimulatedHostError, match="is not a valid name"):
        host.choose_directory("../elsewhere")


def test_the_monitor_shows_devices_and_who_uses_them(
    simulated: host.SimulatedHost, kernel: Kernel, monitor: SimulatedMonitor
) -> None:
    kernel.run("!x = cuda.allocate(10 * 2**20 + 1)")
    first, second = simulated.devices
    use = monitor.use(first.device_id)
    assert [(process.pid, process.used_mib) for process in use.processes] == [(kernel.pid, 43)]
    assert use.used_mib == 43
    assert monitor.use(second.device_id).processes == ()
    assert monitor.kind == "simulated"
    assert all(device.simulated and device.checkpointable for device in monitor.devices())
    with pytest.raises(GPUError) as caught:
        monitor.use("SIM-nobody")
    assert caught.value.code is GPUErrorCode.NO_SUCH_DEVICE


def test_the_monitor_says_what_a_kernel_needs(simulated: host.SimulatedHost, monitor: SimulatedMonitor) -> None:
    device = simulated.devices[1].device_id
    assert monitor.kernel_environment(None) == {"JUPYTER_GPU_SIMULATED_DIR": str(simulated.directory)}
    assert monitor.kernel_environment(device)["JUPYTER_GPU_SIMULATED_DEVICE"] == device


@pytest.mark.parametrize(
    ("backend", "code"),
    [
        ("amd", GPUErrorCode.NOT_SUPPORTED),
        ("simulated:/nowhere", GPUErrorCode.NOT_INITIALIZED),
    ],
)
def test_a_backend_that_cannot_be_opened_says_why(backend: str, code: GPUErrorCode) -> None:
    for opener in (open_monitor, open_checkpointer):
        with pytest.raises(GPUError) as caught:
            opener(backend)
        assert caught.value.code is code


def test_backends_are_opened_by_name(simulated: host.SimulatedHost) -> None:
    monitor = open_monitor(f"simulated:{simulated.directory}")
    assert [device.device_id for device in monitor.devices()] == [device.device_id for device in simulated.devices]
    monitor.close()
