"""Promises of NvidiaMonitor and of the tables it relies on, against a double of NVML."""

import os
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import DeviceUtilisation, GPUError, GPUErrorCode, ProcessKind, ProcessUse
from fractional_gpu.gpu.nvidia import support
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from fractional_gpu.gpu.nvidia.support import driver_refusal, moving_refusal, why_no_bindings
from fractional_gpu.host.clock import WallClock, since_boot_us
from tests.gpu_nvidia.fake_nvml import (
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    FakeGPU,
    FakeNVML,
)


def monitor_of(nvml: FakeNVML, *, bindings: str = "") -> NvidiaMonitor:
    return NvidiaMonitor(nvml=nvml, bindings=lambda: bindings)


def fails(code: GPUErrorCode, match: str, call: Callable[[], object]) -> None:
    with pytest.raises(GPUError, match=match) as caught:
        call()
    assert caught.value.code is code


def test_devices_are_described_by_uuid_with_the_memory_that_processes_can_have() -> None:
    gpus = [FakeGPU(), FakeGPU(name="NVIDIA A10", total=24 * GIB, reserved=0, mig=0)]
    monitor = monitor_of(FakeNVML(*gpus))
    first, second = monitor.devices()
    assert (first.device_id, first.index, first.name) == (gpus[0].uuid, 0, "NVIDIA H100 80GB HBM3")
    assert (first.memory_mib, first.simulated, first.checkpointable, first.why_not) == (81920 - 500, False, True, "")
    assert (second.index, second.memory_mib, second.checkpointable) == (1, 24 * 1024, True)
    assert monitor.why_none == ""


@pytest.mark.parametrize("number", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, 25])
def test_the_old_form_of_memory_is_read_where_the_new_is_missing(number: int) -> None:
    gpu = FakeGPU(used=GIB, fails={"nvmlDeviceGetMemoryInfo_v2": number})
    monitor = monitor_of(FakeNVML(gpu))
    assert monitor.devices()[0].memory_mib == 81920
    assert monitor.use(gpu.uuid).used_mib == 1024 + 500


# ---- no device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (12, "not installed"),
        (9, "kernel module is not loaded"),
        (18, "reboot"),
        (4, "group that owns them"),
        (999, "could not be initialised: NVML says 999"),
    ],
)
def test_without_a_driver_there_are_no_devices_and_a_sentence_says_why(number: int, sentence: str) -> None:
    nvml = FakeNVML(FakeGPU())
    nvml.fails["nvmlInit"] = number
    monitor = monitor_of(nvml)
    assert monitor.devices() == []
    assert sentence in monitor.why_none
    fails(GPUErrorCode.NO_SUCH_DEVICE, sentence, lambda: monitor.use(nvml.gpus[0].uuid))
    monitor.close()


def test_a_driver_that_is_loaded_later_is_found() -> None:
    nvml = FakeNVML(FakeGPU())
    nvml.fails["nvmlInit"] = 9
    monitor = monitor_of(nvml)
    assert monitor.devices() == []
    nvml.fails.clear()
    assert len(monitor.devices()) == 1
    assert monitor.why_none == ""


def test_a_driver_without_a_device_says_so() -> None:
    monitor = monitor_of(FakeNVML())
    assert monitor.devices() == []
    assert "finds no device" in monitor.why_none


def test_a_device_that_is_lost_forbidden_or_without_memory_of_its_own_does_not_hide_the_others() -> None:
    lost, forbidden, sound = FakeGPU(fails={"*": GPU_IS_LOST}), FakeGPU(fails={"*": NO_PERMISSION}), FakeGPU()
    integrated = FakeGPU(fails={"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED})
    nvml = FakeNVML(lost, forbidden, integrated, sound)
    monitor = monitor_of(nvml)
    assert [device.device_id for device in monitor.devices()] == [sound.uuid]
    sound.fails["*"] = GPU_IS_LOST
    assert monitor.devices() == []
    assert "none of the 4 NVIDIA devices can be used" in monitor.why_none


@pytest.mark.parametrize(
    "call", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetName", "nvmlDeviceGetMigMode"]
)
def test_a_failure_to_list_is_an_error_not_an_absence(call: str) -> None:
    nvml = FakeNVML(FakeGPU())
    nvml.fails[call] = UNKNOWN
    fails(GPUErrorCode.UNKNOWN, r"failed: NVML says 999 \(NVML error 999\)", monitor_of(nvml).devices)


# ---- what can be checkpointed ----------------------------------------------------------------------------------------


def why_not(*gpus: FakeGPU, version: str = "580.65.06", bindings: str = "") -> str:
    device = monitor_of(FakeNVML(*gpus, version=version), bindings=bindings).devices()[0]
    assert device.checkpointable is not bool(device.why_not)
    return device.why_not


def divided(*numbers: int) -> FakeGPU:
    """A device in MIG mode with instances of 10 GiB."""
    instances = {
        number: FakeGPU(uuid=f"MIG-{number}", name="NVIDIA H100 MIG 1g.10gb", total=10 * GIB, reserved=0)
        for number in numbers
    }
    return FakeGPU(mig=1, instances=instances)


def test_the_instances_of_a_device_in_mig_mode_are_devices_that_cannot_be_checkpointed() -> None:
    whole = FakeGPU()
    monitor = monitor_of(FakeNVML(divided(0, 3), whole))
    first, second, third = monitor.devices()
    assert [one.device_id for one in (first, second, third)] == ["MIG-0", "MIG-3", whole.uuid]
    assert [one.index for one in (first, second, third)] == [0, 1, 2]
    assert (second.name, second.memory_mib) == ("NVIDIA H100 MIG 1g.10gb", 10240)
    assert "MIG instance, which the driver cannot checkpoint" in first.why_not
    assert (first.checkpointable, third.checkpointable) == (False, True)
    assert monitor.kernel_environment(second.device_id) == {"CUDA_VISIBLE_DEVICES": "MIG-3"}


def test_a_device_in_mig_mode_without_an_instance_is_no_device() -> None:
    monitor = monitor_of(FakeNVML(divided()))
    assert monitor.devices() == []
    assert "MIG mode without an instance" in monitor.why_none


def test_a_device_that_is_put_into_mig_mode_is_none_until_it_leaves_the_mode() -> None:
    """The library still tells its memory, and a kernel that is shown the device finds none."""
    gpu = FakeGPU(mig=0)
    monitor = monitor_of(FakeNVML(gpu))
    (device,) = monitor.devices()
    assert monitor.use(device.device_id).memory_mib == device.memory_mib
    gpu.mig = 1
    fails(GPUErrorCode.NO_SUCH_DEVICE, "was switched to MIG mode", lambda: monitor.use(device.device_id))
    gpu.mig = 0
    assert monitor.use(device.device_id).memory_mib == device.memory_mib


def test_instances_that_cannot_be_listed_are_an_error() -> None:
    gpu = divided(0)
    gpu.fails["nvmlDeviceGetMigDeviceHandleByIndex"] = UNKNOWN
    fails(GPUErrorCode.UNKNOWN, "NVML says 999", monitor_of(FakeNVML(gpu)).devices)


# ---- who works ---------------------------------------------------------------------------------------------------------

SECOND = 1_000_000


def test_who_worked_is_told_from_samples_that_say_so() -> None:
    now = time.time_ns() // 1000
    gpu = FakeGPU(samples=[(7, now - 5 * SECOND, 80), (7, now, 3), (8, now, 0), (9, now - 3 * SECOND, 50), (0, now, 9)])
    activity = monitor_of(FakeNVML(gpu)).activity(gpu.uuid, since_boot_us() - 4 * SECOND)
    assert activity is not None
    assert set(activity.worked_us) == {7, 9}, "8 was idle, 0 is no process"
    assert since_boot_us() - 2 * SECOND < activity.worked_us[7] <= since_boot_us()
    assert since_boot_us() - 2 * SECOND < activity.known_until_us
    assert activity.settle_us == SECOND


def test_a_sample_that_may_tell_of_an_earlier_time_is_not_taken_for_work_since() -> None:
    now = time.time_ns() // 1000
    gpu = FakeGPU(samples=[(7, now, 80)])
    activity = monitor_of(FakeNVML(gpu)).activity(gpu.uuid, since_boot_us() - 1000)
    assert activity is not None
    assert activity.worked_us == {}


def test_work_that_has_ended_is_not_reported_again_though_the_driver_means_over_all_time_since() -> None:
    """A process works until second 10; the driver samples every 0.2 s. The monitor is asked at once and then every second."""
    now_s, gpu = 10.05, FakeGPU(samples=[(7, 9_850_000, 100), (7, 10_050_000, 20)], processes={7: 1})
    later = [(7, 10_050_000 + 200_000 * number, 0) for number in range(1, 80)]
    monitor = NvidiaMonitor(
        nvml=FakeNVML(gpu),
        bindings=lambda: "",
        clock=WallClock(lambda: int(now_s * 1e9), lambda: int(now_s * 1e9)),
    )
    last_us = []
    for second in range(12):
        now_s = 10.05 + second
        gpu.samples += [one for one in later if one not in gpu.samples and one[1] <= now_s * 1e6]
        activity = monitor.activity(gpu.uuid, 10_000_000)
        assert activity is not None
        last_us.append(activity.worked_us.get(7, 0))
    assert set(last_us) == {0}, "only a sample that began earlier contains the work"


def test_work_that_goes_on_is_reported_at_each_look_however_rare_they_are() -> None:
    gpu, now_s = FakeGPU(processes={7: 1}), 10.0
    monitor = NvidiaMonitor(
        nvml=FakeNVML(gpu),
        bindings=lambda: "",
        clock=WallClock(lambda: int(now_s * 1e9), lambda: int(now_s * 1e9)),
    )
    for pause_s in (0.0, 0.5, 1.0, 1.0, 2.0, 9.0, 30.0):
        now_s += pause_s
        gpu.samples = [(7, int(now_s * 1e6) - 200_000 * number, 30) for number in range(70)]
        activity = monitor.activity(gpu.uuid, 8_000_000)
        assert activity is not None
        assert activity.known_until_us - activity.worked_us[7] <= SECOND, "it would count as quiet after two seconds"


@pytest.mark.parametrize("number", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION])
def test_a_device_that_does_not_tell_who_works_is_asked_for_nothing_more(number: int) -> None:
    gpu = FakeGPU(fails={"nvmlDeviceGetProcessUtilization": number})
    assert monitor_of(FakeNVML(gpu)).activity(gpu.uuid, 0) is None
    instance = divided(0)
    assert monitor_of(FakeNVML(instance)).activity("MIG-0", 0) is None


# ---- utilisation -------------------------------------------------------------------------------------------------------


def measured(gpu: FakeGPU, last_us: int = 2 * SECOND) -> DeviceUtilisation:
    found = monitor_of(FakeNVML(gpu)).utilisation(gpu.uuid, since_boot_us() - last_us)
    assert found is not None
    return found


def test_what_processes_used_is_the_mean_of_their_sane_samples_since_then() -> None:
    now = time.time_ns() // 1000
    far = now + 3600 * SECOND
    samples = [(7, now - SECOND, 80), (7, now, 30), (8, now, 0), (9, now - 3 * SECOND, 50), (0, now, 9)]
    absurd = [(12, now, 37_100), (10, far, 50), (11, 1 << 62, 20)]
    found = measured(FakeGPU(samples=samples + absurd, busy=90))
    assert found.by_pid == {7: 550, 8: 0}
    assert found.device_milli == 900


def test_samples_of_processes_that_the_device_does_not_list_are_no_ones() -> None:
    """In a namespace of pids NVML translates its lists, and leaves the samples with the host's pids."""
    now = time.time_ns() // 1000
    gpu = FakeGPU(samples=[(7, now, 80), (8, now, 30)], unlisted=frozenset({8}), busy=90)
    assert measured(gpu).by_pid == {7: 800}
    activity = monitor_of(FakeNVML(gpu)).activity(gpu.uuid, since_boot_us() - SECOND)
    assert activity is not None
    assert set(activity.worked_us) == {7}


def test_a_process_that_is_named_by_its_thread_counts_as_the_process() -> None:
    now = time.time_ns() // 1000
    ready, done = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        ready.wait()
        number = thread.native_id
        assert number is not None
        gpu = FakeGPU(samples=[(number, now, 80)], processes={number: 300 * MIB}, busy=90)
        use = monitor_of(FakeNVML(gpu)).use(gpu.uuid)
        assert [(one.pid, one.used_mib) for one in use.processes] == [(os.getpid(), 300)]
        assert measured(gpu).by_pid == {os.getpid(): 800}
    finally:
        done.set()
        thread.join()


def test_the_next_period_begins_at_the_newest_sample() -> None:
    stamp = time.time_ns() // 1000 - 100_000
    gpu = FakeGPU(samples=[(7, stamp, 80), (8, stamp - 500_000, 10)], busy=90)
    monitor = monitor_of(FakeNVML(gpu))
    first = monitor.utilisation(gpu.uuid, since_boot_us() - 2 * SECOND)
    assert first is not None
    assert since_boot_us() - 200_000 < first.until_us < since_boot_us() - 90_000
    gpu.samples.append((7, time.time_ns() // 1000, 20))
    second = monitor.utilisation(gpu.uuid, first.until_us)
    assert second is not None
    assert second.by_pid == {7: 200}, "no sample counts twice"


def test_a_driver_that_has_no_newer_sample_says_that_nothing_worked() -> None:
    now_us = since_boot_us()
    found = measured(FakeGPU(busy=0))
    assert found.by_pid == {}
    assert now_us - 250_000 <= found.until_us <= since_boot_us(), "later samples may still come"


def test_a_device_at_work_without_samples_tells_nothing_by_process() -> None:
    assert measured(FakeGPU(busy=60)).by_pid is None
    assert measured(FakeGPU(busy=60)).device_milli == 600


@pytest.mark.parametrize("number", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION])
def test_where_processes_are_not_told_the_device_is(number: int) -> None:
    gpu = FakeGPU(busy=43, fails={"nvmlDeviceGetProcessUtilization": number})
    assert (measured(gpu).by_pid, measured(gpu).device_milli) == (None, 430)
    gpu.fails["nvmlDeviceGetUtilizationRates"] = number
    assert monitor_of(FakeNVML(gpu)).utilisation(gpu.uuid, 0) is None


def test_a_device_that_tells_an_absurd_figure_of_itself_tells_none() -> None:
    assert measured(FakeGPU(busy=37_100)).device_milli is None


def test_of_a_period_in_which_the_clock_was_set_nothing_is_known_by_process() -> None:
    wall_us, steady_us = 1_700_000_000 * SECOND, 5_000 * SECOND
    gpu = FakeGPU(samples=[(7, wall_us, 80)], busy=80)

    def clock() -> WallClock:
        return WallClock(lambda: wall_us * 1000, lambda: steady_us * 1000)

    monitor = NvidiaMonitor(nvml=FakeNVML(gpu), bindings=lambda: "", clock=clock())

    def seen() -> object:
        found = monitor.utilisation(gpu.uuid, steady_us - SECOND)
        return found and found.by_pid

    assert seen() == {7: 800}
    wall_us += 3600 * SECOND
    gpu.samples = [(7, wall_us, 70)]
    assert seen() is None
    assert seen() == {7: 700}


# ---- sensors -------------------------------------------------------------------------------------------------------------


def test_sensors_tell_what_the_device_tells() -> None:
    gpu = FakeGPU(busy=43, temperature=51, power=230_000, energy=9_000)
    told = monitor_of(FakeNVML(gpu)).sensors(gpu.uuid)
    assert (told.busy_percent, told.temperature_c, told.power_mw, told.energy_mj) == (43, 51, 230_000, 9_000)


@pytest.mark.parametrize("number", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION])
def test_a_sensor_that_is_not_there_does_not_hide_the_others(number: int) -> None:
    calls = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTotalEnergyConsumption")
    gpu = FakeGPU(fails=dict.fromkeys(calls, number))
    told = monitor_of(FakeNVML(gpu)).sensors(gpu.uuid)
    assert (told.busy_percent, told.temperature_c, told.power_mw, told.energy_mj) == (None, 30, 70_000, None)


def test_a_mig_instance_does_not_count_what_the_whole_device_draws() -> None:
    told = monitor_of(FakeNVML(divided(0))).sensors("MIG-0")
    assert (told.temperature_c, told.power_mw, told.energy_mj) == (30, None, None)


def test_clients_of_mps_and_programs_that_only_draw_are_told_apart() -> None:
    gpu = FakeGPU(used=GIB, processes={1: MIB, 2: MIB}, mps={2: MIB}, drawing={1: MIB, 3: MIB})
    use = monitor_of(FakeNVML(gpu)).use(gpu.uuid)
    assert {one.pid: one.kind for one in use.processes} == {
        1: ProcessKind.COMPUTE,
        2: ProcessKind.MPS,
        3: ProcessKind.GRAPHICS,
    }
    gpu.fails["nvmlDeviceGetMPSComputeRunningProcesses"] = FUNCTION_NOT_FOUND
    use = monitor_of(FakeNVML(gpu)).use(gpu.uuid)
    assert use.processes[1].kind is ProcessKind.COMPUTE


@pytest.mark.parametrize("version", ["535.183.01", "555.42", "569.99"])
def test_an_old_driver_cannot_checkpoint(version: str) -> None:
    assert f"driver {version} cannot checkpoint: install 570 or newer" in why_not(FakeGPU(), version=version)


@pytest.mark.parametrize("version", ["610.57", "610.57.02"])
def test_a_driver_release_that_crashes_processes_is_refused(version: str) -> None:
    assert "reported to crash it" in why_not(FakeGPU(), version=version)


@pytest.mark.parametrize("version", ["570.00", "580.65.06", "595.71.05", "610.570", "610.58", "700.1"])
def test_other_drivers_are_accepted(version: str) -> None:
    assert driver_refusal(version) == ""


def test_a_version_that_cannot_be_read_is_refused() -> None:
    assert "'new'" in driver_refusal("new")


def test_without_the_bindings_devices_are_shared_but_not_checkpointed() -> None:
    assert why_not(FakeGPU(), bindings="pip install it") == "pip install it"


def test_a_device_that_one_process_may_use_at_a_time_is_a_warning() -> None:
    alone, silent = FakeGPU(compute_mode=3), FakeGPU(compute_mode=3, fails={"nvmlDeviceGetComputeMode": NOT_SUPPORTED})
    monitor = monitor_of(FakeNVML(FakeGPU(), alone, silent))
    assert len(monitor.devices()) == 3
    assert monitor.warnings == (
        "device 1 allows only one process at a time: it cannot be shared; as root: nvidia-smi -i 1 -c DEFAULT",
    )
    alone.compute_mode = 0
    assert len(monitor.devices()) == 3
    assert not monitor.warnings


@pytest.mark.parametrize(
    ("driver", "bindings", "sentence"),
    [
        ("580.65.06", "13.0.2", ""),
        ("610.58", "13.5.0", ""),
        ("580.65.06", None, ""),
        (
            "575.51",
            "13.5.0",
            "the NVIDIA driver 575.51 can only restore kernels on their old device: install 580 or newer",
        ),
        ("new", "13.5.0", "the NVIDIA driver new can only restore"),
        ("580.65.06", "12.9.1", "cuda-bindings 12.9.1 can only restore kernels on their old device: pip install"),
        ("580.65.06", "13.3.0", "cuda-bindings 13.3.0 can only restore"),
    ],
)
def test_who_cannot_move_kernels_is_known_before_one_is_moved(
    monkeypatch: pytest.MonkeyPatch, driver: str, bindings: str | None, sentence: str
) -> None:
    def version(_package: str) -> str:
        if bindings is None:
            raise metadata.PackageNotFoundError
        return bindings

    monkeypatch.setattr(metadata, "version", version)
    assert moving_refusal(driver).startswith(sentence)
    assert bool(moving_refusal(driver)) == bool(sentence)
    (found,) = monitor_of(FakeNVML(FakeGPU(), version=driver)).devices()
    assert found.why_no_move == moving_refusal(driver)


def test_a_machine_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert driver_refusal("580.65.06", machine="x86_64") == ""
    monkeypatch.setattr(support, "_WSL_DEVICE", tmp_path)
    assert "under WSL2" in driver_refusal("580.65.06", machine="x86_64")
    monkeypatch.undo()
    assert "most aarch64 machines: use an x86-64 one" in driver_refusal("580.65.06", machine="aarch64")


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("12.8.0", ""),
        ("13.0.2", ""),
        ("13.5.0", ""),
        ("13.0.0", "can checkpoint but not restore: pip install"),
        ("13.0.1", "can checkpoint but not restore: pip install"),
        ("12.6.2", "12.8 or newer is needed: pip install"),
        ("strange", "pip install"),
        (None, "not installed"),
    ],
)
def test_the_bindings_version_decides_without_importing_them(
    monkeypatch: pytest.MonkeyPatch, version: str | None, sentence: str
) -> None:
    def answer(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", answer)
    told = why_no_bindings()
    assert sentence in told
    assert bool(told) is bool(sentence)


# ---- use -------------------------------------------------------------------------------------------------------------


def test_a_process_that_computes_and_draws_counts_once() -> None:
    gpu = FakeGPU(used=GIB, processes={5: GIB}, drawing={5: GIB, 6: None})
    use = monitor_of(FakeNVML(gpu)).use(gpu.uuid)
    assert use.processes == (
        ProcessUse(pid=5, used_mib=1024),
        ProcessUse(pid=6, used_mib=0, kind=ProcessKind.GRAPHICS),
    )


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        ({5: None}, {5: 4096}),
        ({5: None, 6: GIB}, {5: 3072, 6: 1024}),
        ({5: None, 6: None}, {5: 2048, 6: 2048}),
        ({5: None, 6: 5 * GIB}, {5: 0, 6: 5120}),
    ],
)
def test_what_nvml_does_not_tell_is_shared_by_those_it_does_not_tell_of(
    processes: dict[int, int | None], shares: dict[int, int]
) -> None:
    gpu = FakeGPU(used=4 * GIB, processes=processes)
    use = monitor_of(FakeNVML(gpu)).use(gpu.uuid)
    assert {one.pid: one.used_mib for one in use.processes} == shares


@pytest.mark.parametrize("number", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_a_device_that_cannot_draw_is_no_error(number: int) -> None:
    gpu = FakeGPU(used=GIB, processes={5: GIB}, fails={"nvmlDeviceGetGraphicsRunningProcesses": number})
    assert len(monitor_of(FakeNVML(gpu)).use(gpu.uuid).processes) == 1


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (2, GPUErrorCode.NO_SUCH_DEVICE),
        (3, GPUErrorCode.NOT_SUPPORTED),
        (4, GPUErrorCode.NOT_PERMITTED),
        (6, GPUErrorCode.NO_SUCH_DEVICE),
        (13, GPUErrorCode.NOT_SUPPORTED),
        (15, GPUErrorCode.DEVICE_LOST),
        (16, GPUErrorCode.DEVICE_LOST),
        (17, GPUErrorCode.OPERATING_SYSTEM),
        (28, GPUErrorCode.NO_SUCH_DEVICE),
        (999, GPUErrorCode.UNKNOWN),
    ],
)
@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses"])
def test_each_error_has_its_code(call: str, number: int, code: GPUErrorCode) -> None:
    gpu = FakeGPU(fails={call: number})
    fails(code, f"reading device {gpu.uuid} failed", lambda: monitor_of(FakeNVML(gpu)).use(gpu.uuid))


@pytest.mark.parametrize("call", ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetGraphicsRunningProcesses"])
def test_a_device_lost_half_way_is_told(call: str) -> None:
    gpu = FakeGPU(fails={call: GPU_IS_LOST})
    fails(GPUErrorCode.DEVICE_LOST, "reading", lambda: monitor_of(FakeNVML(gpu)).use(gpu.uuid))


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_a_kernel_sees_its_device_only_and_without_one_it_sees_none() -> None:
    monitor = monitor_of(FakeNVML())
    assert monitor.kernel_environment("GPU-1") == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert monitor.kernel_environment(None) == {"CUDA_VISIBLE_DEVICES": ""}


# ---- handles ---------------------------------------------------------------------------------------------------------


class CountingNVML(FakeNVML):
    """Counts how often a device is looked up by its UUID."""

    lookups = 0

    def nvmlDeviceGetHandleByUUID(self, device_id: str) -> FakeGPU:  # noqa: N802
        self.lookups += 1
        return super().nvmlDeviceGetHandleByUUID(device_id)


def test_a_handle_that_fails_is_looked_up_again() -> None:
    nvml = CountingNVML(FakeGPU(used=MIB))
    monitor, old = monitor_of(nvml), nvml.gpus[0]
    monitor.use(old.uuid)
    old.fails["*"] = GPU_IS_LOST
    fails(GPUErrorCode.DEVICE_LOST, "reading", lambda: monitor.use(old.uuid))
    fails(GPUErrorCode.DEVICE_LOST, "reading", lambda: monitor.use(old.uuid))
    assert nvml.lookups == 3  # each failure is of a device looked up for it
    nvml.gpus[0] = FakeGPU(uuid=old.uuid, used=2 * MIB)
    assert monitor.use(old.uuid).used_mib == 2


def test_a_kept_handle_does_not_hide_the_device_that_took_its_place() -> None:
    nvml = CountingNVML(FakeGPU(used=MIB))
    monitor, old = monitor_of(nvml), nvml.gpus[0]
    monitor.use(old.uuid)
    old.fails["*"] = GPU_IS_LOST
    nvml.gpus[0] = FakeGPU(uuid=old.uuid, used=2 * MIB)
    assert monitor.use(old.uuid).used_mib == 2


def test_a_restarted_library_gives_new_handles() -> None:
    nvml = CountingNVML(FakeGPU())
    monitor = monitor_of(nvml)
    monitor.use(nvml.gpus[0].uuid)
    monitor.close()
    monitor.use(nvml.gpus[0].uuid)
    assert nvml.lookups == 2
