"""A kernel known not to survive a checkpoint is not even locked; each refusal has its own reason."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import HostSnapshot
from fractional_gpu.broker.swap.checkpointability import why_not_checkpointable
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.gpu.interface import DeviceUse, ProcessKind, ProcessState
from fractional_gpu.host.process import identify, maps, scan
from tests.broker.driver import Driver, journal, kernel_of, suspend_of, swaps_of

MAPPER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
held = mmap.mmap(file, 4096)
if sys.argv[2] == "remove":
    os.unlink(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def mapping(path: Path, then: str = "") -> Iterator[int]:
    """A process that has the file mapped; with `remove`, the file's name is deleted."""
    argv = [sys.executable, "-S", "-c", MAPPER, str(path), then]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm", f"nccl-of-tests-{uuid.uuid4()}")  # noqa: S108 - where NCCL has them
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("then", ["", "remove"])
def test_a_mapping_is_found_by_its_name_also_when_the_file_is_gone(segment: Path, then: str) -> None:
    with mapping(segment, then) as pid:
        assert maps(pid, lambda path: path == str(segment))
        assert not maps(pid, lambda path: path.endswith("/other"))
    assert not maps(pid, lambda _path: True), "a process that is gone maps nothing"


NOTHING = HostSnapshot(processes=scan(), uses={})


async def test_members_of_a_collective_are_left_alone_and_a_single_process_is_not(segment: Path) -> None:
    kernel = Kernel(lease_id="lease", uid=0, token_sha256="")
    with ExitStack() as stack:
        pids = [stack.enter_context(mapping(segment, "remove")) for _ in range(2)]
        members = [identify(pid) for pid in pids]
        why = await why_not_checkpointable(Arbiter(), kernel, members, NOTHING)
        assert f"{min(pids)}, {max(pids)} share NCCL memory" in why
        assert await why_not_checkpointable(Arbiter(), kernel, members[:1], NOTHING) == ""


class MpsDevice(Driver):
    def use(self, device_id: str) -> DeviceUse:
        use = super().use(device_id)
        return replace(use, processes=tuple(replace(one, kind=ProcessKind.MPS) for one in use.processes))


async def test_a_client_of_the_mps_server_is_refused_before_anything_is_locked() -> None:
    driver = MpsDevice()
    async with kernel_of(1, {"close": "closed", "shrink": "done"}) as (kernel, _, (pid,)):
        driver.has_context(pid, ProcessState.RUNNING, 300)
        swaps = swaps_of(driver, check=partial(why_not_checkpointable, Arbiter()))
        outcome, _, sentence = await swaps.suspend(kernel, suspend_of(kernel), journal([]))
    assert outcome is SuspendOutcome.IMPOSSIBLE
    assert f"process {pid} is a client of the MPS server" in sentence
    assert driver.calls == []


SLEEPER = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("library", "attached"),
    [
        ("libToolsInjection64.so", True),
        ("libToolsInjectionProxy64.so", True),
        ("libcuda-injection.so", True),
        ("libInterceptorInjectionTarget.so", True),
        ("libsanitizer-collection.so", True),
        ("libcudainj64.so.12.4", True),
        ("libcupti.so.12", False),  # torch and JAX link it
        ("libcupti.so.13", False),
    ],
)
async def test_an_injected_profiler_is_seen_and_a_linked_interface_is_not_one(
    tmp_path: Path, library: str, attached: bool
) -> None:
    kernel = Kernel(lease_id="lease", uid=0, token_sha256="")
    with mapping(tmp_path / library) as pid:
        why = await why_not_checkpointable(Arbiter(), kernel, [identify(pid)], NOTHING)
    assert bool(why) is attached
    assert (f"a profiler or debugger is attached to process {pid}" in why) is attached


@contextmanager
def started_with(environment: dict[str, str]) -> Iterator[int]:
    """A process started with this environment."""
    argv = [sys.executable, "-S", "-c", SLEEPER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


async def test_a_profiler_that_the_driver_was_told_to_load_is_seen() -> None:
    kernel = Kernel(lease_id="lease", uid=0, token_sha256="")
    with started_with({"CUDA_INJECTION64_PATH": "/opt/mine/libprofile.so"}) as pid:
        why = await why_not_checkpointable(Arbiter(), kernel, [identify(pid)], NOTHING)
    assert "(CUDA_INJECTION64_PATH=/opt/mine/libprofile.so)" in why
