"""A broker that cannot start explains why in one sentence, which reaches the caller, and changes nothing."""

import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.broker.kernels.kernel import launch_environment, sharing_environment
from fractional_gpu.broker.process import driver_start
from fractional_gpu.broker.process.driver_start import BackendError, open_backend
from fractional_gpu.broker.process.restarting import KEPT_VARIABLES, NOT_INHERITED
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.core.model import LeaseSpec, PoolSpec, Sharing
from fractional_gpu.gpu.interface import DeviceInfo, GPUError, GPUErrorCode
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.errors import BrokerUnavailableError
from tests.support.paths import SOURCES
from tests.support.world import World, new_world


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world that uses this process's environment, so that it starts brokers as a provisioner does."""
    with new_world() as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


def complaint(world: World) -> str:
    """Return the error that the caller of a broker gets; no broker serves."""
    with pytest.raises(BrokerUnavailableError) as caught:
        ensure_broker(world.socket)
    assert world.broker_pid() is None
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def ledger_of(world: World) -> Path:
    return make_state_folder(world.socket) / "ledger-simulated.sqlite"


def garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database" * 100)


def emptiness(path: Path) -> None:
    path.touch()


def folder(path: Path) -> None:
    path.mkdir()


def newer(path: Path) -> None:
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 999")


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
        connection.commit()
    path.chmod(0o600)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (garbage, ["is not a database", "restore a backup"]),
        (emptiness, ["is empty (zero bytes)", "restore a backup"]),
        (folder, ["cannot be opened for writing: ", "Is a directory", "choose another state_dir"]),
        (newer, ["was written by another version (schema 999", "install that version again"]),
        (foreign, ["is a database that belongs to another program", "choose another state_dir"]),
    ],
)
def test_an_unreadable_ledger_stops_the_broker_and_is_left_as_it_is(
    world: World, spoil: Callable[[Path], None], says: list[str]
) -> None:
    path = ledger_of(world)
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    message = complaint(world)
    assert message.startswith(f"the ledger {path} ")
    assert all(part in message for part in says), message
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            "c.GPUBroker.pools = {'default': {'fractions': [1.5]}}",
            ["['fractions']", "1.5", "more than 0 and at most 1"],
        ),
        (
            "c.GPUBroker.pools = {'default': {'devices': [7]}}",
            ["['devices']", "there is no such device; this host has: 0 SIM-"],
        ),
        ("c.GPUBroker.pools = {", ["jupyter_gpu_config.py, line 1", "'{' was never closed"]),
    ],
)
def test_a_bad_configuration_stops_the_broker_with_the_place_and_what_is_allowed(
    world: World, config: str, says: list[str]
) -> None:
    world.configure(config)
    message = complaint(world)
    assert not message.startswith("jupyter gpu broker: ")  # a dialog does not need the command's name
    assert str(world.folder / "config" / "jupyter_gpu_config.py") in message
    assert all(part in message for part in says), message


def test_without_a_gpu_the_sentence_says_why_and_how_to_try_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class NoDevices:
        kind = "nvidia"
        why_none = "the NVIDIA driver is not installed"

        def devices(self) -> list[DeviceInfo]:
            return []

        def close(self) -> None:
            closed.append(self)

    closed: list[NoDevices] = []
    monkeypatch.setattr(driver_start, "open_monitor", lambda _: NoDevices())
    with pytest.raises(BackendError) as caught, open_backend(None, str(tmp_path / "s")):
        pass
    assert str(caught.value) == (
        "no GPU was found: the NVIDIA driver is not installed; to try things out without one, set "
        "JUPYTER_GPU_SIMULATE=1x2GiB in the environment before you start Jupyter"
    )
    assert len(closed) == 1


def test_a_service_waits_for_its_first_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At boot a service may start before the driver's kernel module is loaded, or before the driver works."""
    device = DeviceInfo(device_id="GPU-0", index=0, name="G", memory_mib=1, simulated=False, checkpointable=True)
    looks: list[list[DeviceInfo] | GPUError] = [[], [], GPUError(GPUErrorCode.UNKNOWN, "it fails"), [device]]

    class Late:
        kind = "nvidia"
        why_none = "the kernel module is not loaded"

        def devices(self) -> list[DeviceInfo]:
            look = looks.pop(0)
            if isinstance(look, GPUError):
                raise look
            return look

        def close(self) -> None:
            """There is nothing to close."""

    pauses: list[float] = []
    monkeypatch.setattr(driver_start, "open_monitor", lambda _: Late())
    monkeypatch.setattr("time.sleep", pauses.append)
    with open_backend(None, str(tmp_path / "s"), patient=True) as opened:
        assert opened.devices == (device,)
    assert pauses == [1, 2, 4]
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        (
            " no GPU was found: the kernel module is not loaded; to try things out without one, set JUPYTER_GPU_SIMULATE=1x2GiB in the "
            "environment before you start Jupyter"
        ),
        " it fails",
    ]


# -- all the way to the person ---------------------------------------------------------------------------------------------------


STARTER = """
import os, resource, signal, sys
os.nice(7)
os.umask(0o077)
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
resource.setrlimit(resource.RLIMIT_CPU, (10_000, hard))
os.environ |= {"TMPDIR": sys.argv[2], "LD_PRELOAD": "libm.so.6", "CUDA_LAUNCH_BLOCKING": "1"}
from fractional_gpu.client.discovery import ensure_broker
ensure_broker(sys.argv[1]).close()
"""


def test_a_broker_for_all_kernels_has_nothing_of_the_program_that_starts_it(world: World, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", STARTER, world.socket, str(tmp_path)], env=world.environment, check=True)
    pid = world.broker_pid()
    assert pid is not None
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    by_python = sum(1 << number - 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))
    assert (int(status["SigBlk"], 16), int(status["SigIgn"], 16), status["Umask"]) == (0, by_python, "0022")
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    assert os.sched_getscheduler(pid) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, pid) == (-10 if os.geteuid() == 0 else 7)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
    assert soft == hard
    environment = Path(f"/proc/{pid}/environ").read_text()
    assert not any(f"{name}=" in environment for name in ("TMPDIR", "LD_PRELOAD", "CUDA_LAUNCH_BLOCKING"))


def test_a_broker_that_a_kernel_starts_is_not_bound_to_the_kernel_s_share(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = "/nowhere/libvgpu.so"  # HAMi-core would show the broker a device of the kernel's size
    pool = PoolSpec(name="p", devices=(), hami_library=library)
    spec = LeaseSpec(lease_id="abc", pool="p", owner="ann", fraction_milli=250, reserve_mib=100)
    theirs = launch_environment(pool, spec) | sharing_environment(replace(pool, sharing=Sharing.MPS), spec, 100, [])
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    ensure_broker(world.socket).close()
    pid = world.broker_pid()
    environment = Path(f"/proc/{pid}/environ").read_text()
    assert not any(f"{name}=" in environment for name in theirs)


# Variables that the broker and the programs it starts do not read, although other processes do.
READ_ELSEWHERE = {
    "JUPYTER_GPU_AGENT",  # names whoever starts kernels and programs
    "JUPYTER_GPU_BROKER_IN_WORKLOAD",  # names the process that starts a broker
    "JUPYTER_GPU_DEFAULT_FRACTION",  # for Jupyter servers and commands, as are the next ones
    "JUPYTER_GPU_DEFAULT_POOL",
    "JUPYTER_GPU_DEFAULT_PROVISIONER",
    "JUPYTER_GPU_MEASURE",
    "JUPYTER_GPU_MEMORY_INFO",  # a kernel
    "JUPYTER_GPU_POD_SHARE",
    "JUPYTER_GPU_PAGE_COMPONENT",  # for the hub's page
    "JUPYTER_GPU_PAGE_NAMESPACE",
    "JUPYTER_GPU_PAGE_NODES",
    "JUPYTER_GPU_SIMULATED_DIR",
    "JUPYTER_GPU_SOCKET",  # a starter names the socket
}


def test_each_variable_of_ours_is_kept_for_the_next_broker_or_known_not_to_be_needed() -> None:
    code = "\n".join(path.read_text() for folder in SOURCES for path in folder.rglob("*.py"))
    ours = set(re.findall(r"JUPYTER_GPU_[A-Z_]*[A-Z]", code))
    not_kept = {name for name in NOT_INHERITED if name.startswith("JUPYTER_GPU_")} | READ_ELSEWHERE
    assert ours == {name for name in KEPT_VARIABLES if name.startswith("JUPYTER_GPU_")} | not_kept
    assert not_kept.isdisjoint(KEPT_VARIABLES)
