"""What a notebook sees only in the simulation; tests/gpu_behaviour has what CUDA also does."""

import os
import subprocess
import sys

import pytest

from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from tests.gpu_sim.kernels import MIB, Kernel, KernelError
from tests.support.paths import STRANGER


def test_the_notebook_side_needs_only_the_standard_library(kernel: Kernel) -> None:
    kernel.run("cuda.memory_info()")
    loaded = kernel.run("[name for name in __import__('sys').modules]")
    tests = {"tests", "sitecustomize", "quick_start", "injections"}  # at each start, the first is Debian's elsewhere
    own = {*sys.stdlib_module_names, "__main__", "__mp_main__", *tests}
    foreign = {name.partition(".")[0] for name in loaded} - own
    assert {name for name in foreign if not name.startswith(("_", "sphinxcontrib"))} <= {"fractional_gpu"}
    rooms = {name for name in loaded if name.startswith("provisioner.") and not name.startswith("fractional_gpu.gpu")}
    assert rooms == set()


@pytest.mark.parametrize(
    "line", ["x.write(b'12345', 6)", "x.read(11)", "x.read(1, -1)", "x.read(offset=11)", "x.fill(b'')"]
)
def test_a_range_outside_of_the_buffer_is_refused(kernel: Kernel, line: str) -> None:
    kernel.run("!x = cuda.allocate(10)")
    with pytest.raises(KernelError) as caught:
        kernel.run(line)
    assert caught.value.name == "ValueError"
    assert kernel.run("x.read() == bytes(10)")


@pytest.mark.parametrize("size", ["0", "-1", "True", "1.5", "'1'"])
def test_a_size_that_is_none_is_refused(kernel: Kernel, size: str) -> None:
    with pytest.raises(KernelError, match="whole number") as caught:
        kernel.run(f"cuda.allocate({size})")
    assert caught.value.name == "ValueError"


def test_dropping_the_last_reference_frees(kernel: Kernel) -> None:
    before = kernel.run("cuda.memory_info()[0]")
    kernel.run("!x = [cuda.allocate(2**20) for _ in range(5)]")
    kernel.run("!x = None")
    assert kernel.run("cuda.memory_info()[0]") == before


def test_the_cap_is_named_counts_the_context_and_may_grow(simulated: host.SimulatedHost) -> None:
    with Kernel(simulated, {"JUPYTER_GPU_MEMORY_MIB": "64"}) as kernel:
        kernel.run("!x = cuda.allocate(32 * 2**20)")
        with pytest.raises(KernelError, match=r"its cap of 64 MiB \(JUPYTER_GPU_MEMORY_MIB\)") as caught:
            kernel.run("cuda.allocate(1)")
        assert caught.value.name == "SimulatedOutOfMemory"
        kernel.run("!import os; os.environ['JUPYTER_GPU_MEMORY_MIB'] = '65'")
        kernel.run("!y = cuda.allocate(2**20)")


def test_the_cap_is_shared_by_the_processes_of_a_lease(simulated: host.SimulatedHost) -> None:
    lease = {"JUPYTER_GPU_MEMORY_MIB": "100", "JUPYTER_GPU_LEASE": "one"}
    with Kernel(simulated, lease) as first, Kernel(simulated, lease) as second:
        first.run("!x = cuda.allocate(30 * 2**20)")
        second.run("!x = cuda.allocate(6 * 2**20)")
        with pytest.raises(KernelError, match="cap of 100 MiB"):
            second.run("cuda.allocate(1)")
        with Kernel(simulated, {**lease, "JUPYTER_GPU_LEASE": "two"}) as stranger:
            stranger.run("!x = cuda.allocate(60 * 2**20)")
        first.kill()
        second.run("!y = cuda.allocate(62 * 2**20)")


def test_a_lease_of_several_devices_has_its_cap_on_each(simulated: host.SimulatedHost) -> None:
    first, second = (device.device_id for device in simulated.devices[:2])
    lease = {"JUPYTER_GPU_MEMORY_MIB": "100", "JUPYTER_GPU_LEASE": "one"}
    both = {**lease, "JUPYTER_GPU_SIMULATED_DEVICE": f"{first},{second}"}
    with Kernel(simulated, both) as root, Kernel(simulated, lease, device=1) as rank:
        assert root.run("cuda.device().device_id") == first
        root.run("!x = cuda.allocate(60 * 2**20)")
        rank.run("!x = cuda.allocate(60 * 2**20)")
        with pytest.raises(KernelError, match="cap of 100 MiB"):
            rank.run("cuda.allocate(20 * 2**20)")


@pytest.mark.parametrize("cap", ["0", "-5", "1.5", "much"])
def test_a_cap_that_is_none_is_refused(simulated: host.SimulatedHost, cap: str) -> None:
    with (
        Kernel(simulated, {"JUPYTER_GPU_MEMORY_MIB": cap}) as kernel,
        pytest.raises(KernelError, match="whole number of MiB"),
    ):
        kernel.run("cuda.allocate(1)")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JUPYTER_GPU_SIMULATED_DIR", "", "JUPYTER_GPU_SIMULATED_DIR is not set"),
        ("JUPYTER_GPU_SIMULATED_DIR", "/nowhere", "no simulated GPU host in /nowhere"),
        ("JUPYTER_GPU_SIMULATED_DEVICE", "", "JUPYTER_GPU_SIMULATED_DEVICE is not set"),
        ("JUPYTER_GPU_SIMULATED_DEVICE", "SIM-x", "there is no simulated device 'SIM-x'"),
    ],
)
def test_a_process_without_a_device_is_told_why(
    simulated: host.SimulatedHost, name: str, value: str, message: str
) -> None:
    with Kernel(simulated, {name: value}) as kernel:
        assert kernel.run("cuda.is_available()") == bool(value)
        with pytest.raises(KernelError, match=message) as caught:
            kernel.run("cuda.memory_info()")
        assert caught.value.name == "SimulatedCudaError"


def test_contents_that_the_machine_cannot_hold_are_refused_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    large = host.create(tmp_path_factory.mktemp("large") / "host", "1x16TiB")
    with Kernel(large) as kernel:
        with pytest.raises(KernelError, match=r"this machine has too little memory for.*smaller --simulate") as caught:
            kernel.run("cuda.allocate(8 << 40)")
        assert caught.value.name == "SimulatedOutOfMemory"
        assert kernel.run("cuda.memory_info()[0]") == (16 << 40) - 32 * MIB


FORK = """!
import os
reading, writing = os.pipe()
child = os.fork()
if not child:
    try:
        x.read()
    except cuda.SimulatedCudaError as error:
        os.write(writing, str(error).encode())
    y = cuda.allocate(2**20)
    os.write(writing, b"|%d" % cuda.memory_info()[0])
    os._exit(0)
os.waitpid(child, 0)
told = os.read(reading, 4096).decode()
"""


def test_a_forked_child_is_a_separate_process(
    kernel: Kernel, simulated: host.SimulatedHost, monitor: SimulatedMonitor
) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'parent')")
    kernel.run(FORK)
    told, _, free = kernel.run("told").partition("|")
    assert "belongs to another context" in told
    assert int(free) == (256 - 32 - 1 - 32 - 1) * MIB
    assert kernel.run("x.read(6).decode()") == "parent"
    assert monitor.use(simulated.devices[0].device_id).used_mib == 33


def test_a_stranger_holds_memory_without_a_lease_until_its_input_ends(
    simulated: host.SimulatedHost, monitor: SimulatedMonitor
) -> None:
    device = simulated.devices[1].device_id
    command = [sys.executable, "-P", STRANGER, str(simulated.directory), device]
    environment = {**os.environ, "JUPYTER_GPU_MEMORY_MIB": "40", "JUPYTER_GPU_LEASE": "somebody"}
    with subprocess.Popen(
        [*command, "100"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"holding %d\n" % stranger.pid
        assert [process.used_mib for process in monitor.use(device).processes] == [132]
        refused = subprocess.run([*command, "200"], capture_output=True, text=True, check=False, input="")
        assert refused.returncode == 1
        assert "out of memory" in refused.stderr
    assert stranger.returncode == 0
    assert monitor.use(device).used_mib == 0
    for arguments in ([], ["0"], ["much"]):
        wrong = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert (wrong.returncode, "usage" in wrong.stderr) == (2, True)
