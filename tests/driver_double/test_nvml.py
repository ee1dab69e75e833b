"""NvidiaMonitor through the real pynvml, the oldest and the newest that is supported, on what the double's NVML tells."""

import time
from collections.abc import Iterator

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessUse
from fractional_gpu.host.clock import since_boot_us
from tests.driver_double import releases
from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import KernelProcess

C = GPUErrorCode
SAMPLES = "nvmlDeviceGetProcessUtilization"


@pytest.fixture(scope="module", params=[releases.oldest("nvidia-ml-py"), releases.newest("nvidia-ml-py")])
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """One process for each release."""
    double = DriverDouble(tmp_path_factory.mktemp("first") / "host")
    with Remote(double, nvml=request.param) as remote:
        yield remote


@pytest.fixture
def remote(process: Remote, double: DriverDouble) -> Remote:
    process.use(double)
    return process


def test_a_device_is_described(double: DriverDouble, remote: Remote, kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(100 << 20)")
    device = double.devices[0]
    first, second = remote.monitor.devices()
    assert (first.device_id, first.name, first.memory_mib) == (device.device_id, device.name, device.mib)
    assert second.device_id == double.devices[1].device_id
    use = remote.monitor.use(device.device_id)
    assert (use.used_mib, use.processes) == (132, (ProcessUse(pid=kernel.pid, used_mib=132),))


def test_memory_that_is_not_told_is_what_is_left(double: DriverDouble, remote: Remote, kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(100 << 20)")
    double.set(nvml_tells_memory=False)
    double.set_device(0, extra_mib=8)
    assert remote.monitor.use(double.devices[0].device_id).processes == (ProcessUse(pid=kernel.pid, used_mib=140),)


def test_a_device_that_is_not_there_is_told(remote: Remote) -> None:
    with pytest.raises(GPUError, match="NVML error 6") as caught:
        remote.monitor.use("GPU-00000000-0000-0000-0000-000000000000")
    assert caught.value.code is C.NO_SUCH_DEVICE


@pytest.mark.parametrize(
    ("results", "seen"),
    [
        ([], {"kernel"}),
        ([6], set()),  # no sample
        ([0], set()),  # none to count: pynvml makes an error of that success
        ([7, 7], {"kernel"}),  # how many there are; and then there were more
    ],
)
def test_who_works_is_read_whatever_order_samples_come_in(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, results: list[int], seen: set[str]
) -> None:
    """Process 7 is one that the device does not list, as one outside of this namespace of pids."""
    kernel.run("!x = cuda.allocate(1 << 20)")
    double.set_device(0, samples=[(kernel.pid, 0, 55, 0), (7, 0, 55, 0)])
    for result in results:
        double.fail(SAMPLES, result)
    activity = remote.monitor.activity(double.devices[0].device_id, since_boot_us() - 2_000_000)
    assert activity is not None
    assert 7 not in activity.worked_us
    assert {"kernel" for pid in activity.worked_us if pid == kernel.pid} == seen
    assert not list((double.folder / "faults").glob("*/*")), "each result was taken"


@pytest.mark.parametrize(
    ("results", "by_pid"),
    [
        ([], [550]),
        ([6], []),  # no sample is newer
        ([7, 7], [550]),  # how many there are; and then there were more
        ([3], None),  # not supported
        ([4], None),  # not permitted
        ([13], None),  # no such function
    ],
)
def test_utilisation_is_read_since_a_time_whatever_the_driver_answers(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, results: list[int], by_pid: list[int] | None
) -> None:
    kernel.run("!x = cuda.allocate(1 << 20)")
    device = double.devices[0].device_id
    old = time.time_ns() // 1000 - 5_000_000
    double.set_device(0, samples=[(kernel.pid, 0, 55, 0), (8, old, 90, 0)], busy_percent=5)
    for result in results:
        double.fail(SAMPLES, result)
    since_us = since_boot_us() - 2_000_000
    found = remote.monitor.utilisation(device, since_us)
    assert found is not None
    values = None if found.by_pid is None else [*found.by_pid.values()]
    assert (values, found.device_milli) == (by_pid, 50)
    assert set(found.by_pid or ()) <= {kernel.pid}
    assert since_us < found.until_us <= since_boot_us()
    (first, *_) = double.calls(SAMPLES)
    asked_us = int(first.arguments["since"]) - (time.time_ns() // 1000 - since_boot_us())
    assert abs(asked_us - since_us) < 100_000, "it asks from that time on, by the wall clock"


def test_a_device_that_is_lost_has_no_utilisation(double: DriverDouble, remote: Remote) -> None:
    double.set_device(0, fails=15)
    with pytest.raises(GPUError) as caught:
        remote.monitor.utilisation(double.devices[0].device_id, 0)
    assert caught.value.code is C.DEVICE_LOST


def test_samples_that_are_never_as_many_as_said_are_an_error(double: DriverDouble, remote: Remote) -> None:
    double.set_device(0, samples=[(7, 0, 55, 0)])
    double.fail(SAMPLES, 7, times=None)
    with pytest.raises(GPUError, match="NVML error 7"):
        remote.monitor.activity(double.devices[0].device_id, 0)


def test_samples_are_told_as_they_were_set_however_absurd(
    double: DriverDouble, remote: Remote, kernel: KernelProcess
) -> None:
    kernel.run("!x = cuda.allocate(1 << 20)")
    device = double.devices[0].device_id
    now = time.time_ns() // 1000
    double.set_device(0, samples=[(kernel.pid, 0, 55, 1), (8, now - 5_000_000, 9, 0), (9, now + 10**12, 37_100, 0)])
    activity = remote.monitor.activity(device, since_boot_us() - 2_000_000)
    assert activity is not None
    assert kernel.pid in activity.worked_us
    assert not {8, 9} & set(activity.worked_us)
    (first, *_) = double.calls("nvmlDeviceGetProcessUtilization")
    assert (first.arguments["room"], first.result) == ("0", 7), "pynvml asks for the number first"


def test_sensors_are_told_as_they_were_set(double: DriverDouble, remote: Remote) -> None:
    double.set_device(1, busy_percent=43, temperature_c=51, power_mw=230_000, energy_mj=-1)
    told = remote.monitor.sensors(double.devices[1].device_id)
    assert (told.busy_percent, told.temperature_c, told.power_mw, told.energy_mj) == (43, 51, 230_000, None)


def test_memory_of_no_process_is_used_and_an_older_form_counts_the_drivers_part(
    double: DriverDouble, remote: Remote
) -> None:
    device = double.devices[0].device_id
    double.set_device(0, extra_mib=100)
    assert remote.monitor.use(device).used_mib == 100
    double.fail("nvmlDeviceGetMemoryInfo_v2", 13, times=None)
    assert remote.monitor.use(device).used_mib == 600
    assert [one.memory_mib for one in remote.monitor.devices()] == [1024 + 500] * 2
