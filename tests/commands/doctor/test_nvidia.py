"""What the doctor finds about drivers and devices, with a double of NVML."""

from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.machine import check_nvidia, check_pools, mps_processes
from fractional_gpu.commands.doctor.report import Finding, Severity
from fractional_gpu.config import Settings, load
from tests.gpu_nvidia.fake_nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED, FakeGPU, FakeNVML

LIBRARY_NOT_FOUND = 12


_NOT_FOR_INSTANCES = dict.fromkeys(
    ("nvmlDeviceGetPersistenceMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetMigMode"), NOT_SUPPORTED
)


class DoctorsNVML(FakeNVML):
    """Answers the questions that only the doctor has."""

    persistence = 1
    level = 13000
    older_level = 13000

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        self._enter("nvmlSystemGetCudaDriverVersion_v2")
        return self.level

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        self._enter("nvmlSystemGetCudaDriverVersion")
        return self.older_level

    def nvmlDeviceGetPersistenceMode(self, gpu: FakeGPU) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetPersistenceMode", gpu)
        return self.persistence


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    process(folder, 1, "systemd")
    return folder


def process(proc: Path, pid: int, name: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(f"{name[:15]}\n")


def look(
    nvml: FakeNVML, proc: Path, bindings: str = "", level: int | None = None, sysfs: Path | None = None
) -> list[Finding]:
    seen = check_nvidia(
        nvml=nvml, bindings=lambda: bindings, level=lambda: level, proc=proc, sysfs=sysfs or proc.parent / "sys"
    )
    return list(seen.findings)


def of(findings: list[Finding], check: str) -> Finding:
    (found,) = [one for one in findings if one.check == check]
    return found


def test_a_sound_machine_has_nothing_to_complain_of(proc: Path) -> None:
    gpu = FakeGPU()
    nvml = DoctorsNVML(gpu)
    seen = check_nvidia(nvml=nvml, bindings=str, level=lambda: pytest.fail("asked"), proc=proc, sysfs=proc)
    assert {one.severity for one in seen.findings} == {Severity.OK}
    assert [one.check for one in seen.findings] == ["driver", "cuda-bindings", "device", "persistence", "numa", "mps"]
    assert of(list(seen.findings), "driver").finding == "580.65.06, CUDA 13.0"
    assert gpu.uuid in of(list(seen.findings), "device").finding
    assert [device.device_id for device in seen.devices] == [gpu.uuid]
    assert nvml.started == 0, "NVML was not given back"


def test_no_driver_is_a_warning_that_says_how_to_try_things_out(proc: Path) -> None:
    nvml = DoctorsNVML()
    nvml.fails["nvmlInit"] = LIBRARY_NOT_FOUND
    driver, bindings = look(nvml, proc, "the Python package cuda-bindings is not installed: pip install it")
    assert (driver.severity, bindings.severity) == (Severity.WARNING, Severity.NOTE)
    assert "do not start here" in driver.finding
    assert "not installed" in driver.finding
    assert "jupyter gpu demo, or JUPYTER_GPU_SIMULATE=1x2GiB in the environment" in driver.advice


def test_a_driver_that_fails_is_an_error(proc: Path) -> None:
    nvml = DoctorsNVML(FakeGPU())
    nvml.fails["nvmlDeviceGetCount"] = 999
    (found,) = look(nvml, proc)
    assert (found.check, found.severity) == ("driver", Severity.ERROR)
    assert "NVML error 999" in found.finding


@pytest.mark.parametrize("version", ["550.90.07", "610.57.02"])
def test_a_driver_that_cannot_be_trusted_is_an_error(proc: Path, version: str) -> None:
    found = look(DoctorsNVML(FakeGPU(), version=version), proc)
    assert of(found, "driver").severity is Severity.ERROR
    assert version in of(found, "driver").finding
    assert of(found, "device").severity is Severity.WARNING


def test_missing_bindings_are_an_error_where_there_is_a_device(proc: Path) -> None:
    found = of(look(DoctorsNVML(FakeGPU()), proc, "the bindings are missing: pip install 'x[cuda]'"), "cuda-bindings")
    assert (found.severity, found.finding) == (Severity.ERROR, "the bindings are missing: kernels cannot be suspended")
    assert found.advice == "pip install 'x[cuda]' (in the broker's environment)"


def test_persistence_mode_off_is_a_warning_with_the_command(proc: Path) -> None:
    nvml = DoctorsNVML(FakeGPU())
    nvml.persistence = 0
    found = of(look(nvml, proc), "persistence")
    assert found.severity is Severity.WARNING
    assert "nvidia-smi -i 0 -pm 1" in found.advice


@pytest.mark.parametrize(("mode", "words"), [(1, "one thread"), (2, "no process"), (3, "one process")])
def test_a_device_that_cannot_be_shared_is_an_error(proc: Path, mode: int, words: str) -> None:
    found = of(look(DoctorsNVML(FakeGPU(compute_mode=mode)), proc), "compute-mode")
    assert found.severity is Severity.ERROR
    assert words in found.finding


def test_mig_is_a_warning(proc: Path) -> None:
    divided = FakeGPU(mig=1, instances={0: FakeGPU(uuid="MIG-0", name="MIG 1g.10gb", fails=_NOT_FOR_INSTANCES)})
    found = of(look(DoctorsNVML(divided), proc), "device")
    assert found.severity is Severity.WARNING
    assert "MIG 1g.10gb" in found.finding
    assert "MIG instance, on which the driver cannot checkpoint" in found.finding


def test_the_level_of_cuda_is_asked_for_in_each_way_there_is(proc: Path) -> None:
    nvml = DoctorsNVML(FakeGPU())
    nvml.fails["nvmlSystemGetCudaDriverVersion_v2"] = FUNCTION_NOT_FOUND
    nvml.older_level = 12090
    assert of(look(nvml, proc), "driver").finding == "580.65.06, CUDA 12.9"
    nvml.fails["nvmlSystemGetCudaDriverVersion"] = 999
    assert of(look(nvml, proc, level=13010), "driver").finding == "580.65.06, CUDA 13.1", "the driver's own library"
    assert of(look(nvml, proc), "driver").finding == "580.65.06", "the driver's version alone"
    assert of(look(FakeNVML(FakeGPU()), proc), "driver").finding == "580.65.06"
    old = of(look(DoctorsNVML(FakeGPU(), version="550.90.07"), proc), "driver").finding
    assert old.endswith("(now 550.90.07, CUDA 13.0)")


def pools(tmp_path: Path, **keys: str) -> Settings:
    file = tmp_path / "jupyter_gpu_config.py"
    file.write_text(f"c.GPUBroker.pools = {{'default': {keys!r}}}")
    return load(str(file))


def test_a_pool_that_needs_what_the_machine_lacks_is_an_error(proc: Path, tmp_path: Path) -> None:
    library = str(tmp_path / "libvgpu.so")
    for keys, check in (
        ({"sharing": "mps"}, "mps-pool"),
        ({"sharing": "mig"}, "mig-pool"),
        ({"hami_library": library}, "hami"),
    ):
        (found,) = check_pools(pools(tmp_path, **keys), [], proc)
        assert (found.check, found.severity) == (check, Severity.ERROR)
        assert found.advice
    process(proc, 60, "nvidia-cuda-mps-control")
    assert list(check_pools(pools(tmp_path, sharing="mps"), [], proc)) == []
    assert list(check_pools(pools(tmp_path), [], proc)) == []
    assert list(check_pools(None, [], proc)) == []


def test_mps_is_found_by_its_processes(proc: Path) -> None:
    process(proc, 70, "nvidia-cuda-mps-server")
    process(proc, 60, "nvidia-cuda-mps-control")
    process(proc, 50, "nvidia-smi")
    assert mps_processes(proc) == [60, 70]
    found = of(look(DoctorsNVML(FakeGPU()), proc), "mps")
    assert found.severity is Severity.WARNING
    assert "process 60" in found.finding


@pytest.mark.parametrize(("level", "is_told"), [(12080, True), (13000, False)])
def test_a_driver_that_cannot_move_kernels_is_an_ordinary_circumstance(
    proc: Path, level: int, *, is_told: bool
) -> None:
    nvml = DoctorsNVML(FakeGPU())
    nvml.level = level
    found = [one for one in look(nvml, proc) if one.check == "moving"]
    assert [one.severity for one in found] == ([Severity.NOTE] if is_told else [])
    assert all("driver 580 or newer" in one.advice for one in found)
