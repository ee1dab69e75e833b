"""A kernel whose command takes the lease: started by a program without provisioners, it is a leased kernel like any other."""

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import factory
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from fractional_gpu.jupyter.kernelspecs import install
from fractional_gpu.jupyter.launcher import main
from tests.support.kernels import plain_manager
from tests.support.managed import client_of, entered, must
from tests.support.stories import CHECK, SLEEPS, fill
from tests.support.world import DEADLINE_S, Server, World, new_world, until


@pytest.fixture
def fresh() -> Iterator[World]:
    """A world without a broker."""
    with new_world() as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    with new_world() as made:
        yield made


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """A world in which no lease is left."""
    yield shared
    if shared.broker_pid() is not None:
        until(lambda: not shared.status().leases, "the test's leases end")


def installed(world: World, milli: int, base: str = "python3") -> str:
    folder = str(world.kernels_dir)
    (spec,) = install("default", [milli], directory=folder, simulated=True, launcher=True, base=base)
    assert spec.launcher
    return spec.name


def command_of(world: World, name: str, connection_file: str) -> list[str]:
    argv = json.loads((world.kernels_dir / name / "kernel.json").read_text())["argv"]
    return [word.replace("{connection_file}", connection_file) for word in argv]


@contextmanager
def started(world: World, name: str, kernel_id: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    path, _ = write_connection_file(str(world.folder / "run" / f"kernel-{kernel_id}.json"))
    process = subprocess.Popen(command_of(world, name, path), env=world.environment, cwd=world.notebooks)
    try:
        yield process, path
    finally:
        process.kill()
        process.wait()


def tokens(world: World) -> set[Path]:
    return set((world.folder / "run" / "gpu").glob("*.token"))


def test_two_launched_kernels_take_turns_keep_every_byte_and_can_be_interrupted(world: World) -> None:
    name = installed(world, 750)
    with entered(world):
        managers = [plain_manager(name) for _ in range(2)]
        for manager in managers:
            manager.start_kernel(cwd=str(world.notebooks))
        try:
            with client_of(managers[0]) as first, client_of(managers[1]) as second:
                must(first, fill(1, 24))
                must(second, fill(2, 24))
                for _ in range(2):
                    for client in (first, second):
                        assert must(client, CHECK) == "intact\n"
                assert (
                    must(first, "import sys; print(sys.flags.safe_path, len(sys.argv))") == "False 3\n"
                )  # program, -f, its file
                pids = {int(must(client, "import os; print(os.getpid())")) for client in (first, second)}
            leases = world.status().leases
            assert {lease.pid for lease in leases} == pids  # the processes that were started are the kernels
            assert all(lease.gated and lease.suspends and lease.spec.fraction_milli == 750 for lease in leases)
            with client_of(managers[0]) as client:
                an_interrupt_means_what_it_always_means(managers[0], client)
        finally:
            for manager in managers:
                manager.shutdown_kernel(now=True)


def an_interrupt_means_what_it_always_means(manager: KernelManager, client: BlockingKernelClient) -> None:
    def interrupt(message: dict[str, Any]) -> None:
        if message["content"].get("text") == "runs\n":
            manager.interrupt_kernel()

    code = f"print('runs', flush=True)\n{SLEEPS}"
    # without stop_on_error: ipykernel aborts what comes in the moment after a failed cell's reply
    reply = client.execute_interactive(code, timeout=DEADLINE_S, output_hook=interrupt, stop_on_error=False)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert must(client, "print('here')") == "here\n"


def test_the_lease_is_the_processs_and_ends_with_it(world: World) -> None:
    name, kernel_id = installed(world, 250), uuid.uuid4().hex
    with started(world, name, kernel_id) as (process, _):
        until(lambda: world.broker_pid() and world.status().leases, "a lease is taken")
        first = world.lease(kernel_id).lease_id
        until(lambda: world.lease(kernel_id).pid == process.pid, "it is attached")
        (token,) = tokens(world)
        assert token.stat().st_mode & 0o777 == 0o600
    until(lambda: not world.status().leases, "the lease ended with the process")
    until(lambda: not token.exists(), "its token's file, too")
    with started(world, name, kernel_id) as (process, _):
        until(lambda: [one.pid for one in world.status().leases] == [process.pid], "the new process alone has a lease")
        assert world.lease(kernel_id).lease_id != first
        assert len(tokens(world)) == 1


def test_a_server_starts_it_like_any_kernel_and_takes_no_second_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = installed(world, 250)
    monkeypatch.setitem(world.environment, "JUPYTER_DEFAULT_PROVISIONER_NAME", "fractional-gpu-provisioner")
    with Server(world) as server:
        notebook = server.start(name)
        notebook.must(fill(1, 24))
        assert world.lease(notebook.kernel_id).state == "resident"
        notebook.restart()
        assert notebook.must("print('again')").text == "again\n"
        until(lambda: world.lease(notebook.kernel_id).gated or None, "the new process's extension connects")
        notebook.shut_down()


def test_without_room_there_is_one_sentence_and_no_kernel(fresh: World) -> None:
    name = installed(fresh, 250)
    fresh.configure("c.GPUBroker.pools = {'other': {}}\n")
    path, _ = write_connection_file(str(fresh.folder / "run" / "kernel-x.json"))
    command = command_of(fresh, name, path)
    done = subprocess.run(command, env=fresh.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("No GPU for this kernel: there is no pool named 'default'")
    assert done.stderr.count("\n") == 1
    assert tokens(fresh) == set()
    assert fresh.status().leases == []


def test_a_command_that_cannot_be_run_leaves_no_lease(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    path, _ = write_connection_file(str(world.folder / "run" / "kernel-y.json"))
    command = [sys.executable, "-P", "-m", "fractional_gpu.jupyter.launcher", "--", "/nowhere/kernel", path]
    done = subprocess.run(command, env=world.environment, check=False)
    assert done.returncode == 1
    assert "Could not run the kernel's command /nowhere/kernel: No such file or directory" in capfd.readouterr().err
    assert world.status().leases == []
    assert tokens(world) == set()


def test_a_command_without_a_connection_file_is_refused_before_anything_is_asked(
    fresh: World, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with entered(fresh):
            assert main(["--", "kernel", "-f", "{connection_file}"]) == 1
            assert main(["--fraction", "lots", "--", "kernel"]) == 1
    finally:
        signal.signal(signal.SIGINT, handler)
    first, second = capsys.readouterr().err.splitlines()
    assert "'kernel -f {connection_file}' does not name a connection file" in first
    assert "fraction 'lots'" in second
    assert fresh.broker_pid() is None


# -- the package is gone -----------------------------------------------------------------------------------------------------------


def test_a_kernel_whose_package_is_gone_says_what_to_do(world: World, tmp_path: Path) -> None:
    name = installed(world, 250)
    command = command_of(world, name, str(tmp_path / "kernel-1.json"))
    command[0] = sys._base_executable  # type: ignore[attr-defined] # an interpreter without the package
    said = subprocess.run(
        [command[0], "-I", *command[1:]], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == (
        "This kernel needs the package jupyter-fractional-gpu, which is no longer installed: reinstall it "
        f"for {sys.executable}, or remove the kernel (`jupyter kernelspec remove {name}`).\n"
    )


def test_an_error_within_the_launcher_is_not_taken_for_a_missing_package(world: World, tmp_path: Path) -> None:
    command = command_of(world, installed(world, 250), str(tmp_path / "kernel-1.json"))
    package = tmp_path / "fractional_gpu" / "jupyter"
    package.mkdir(parents=True)
    for module, text in (("../__init__", ""), ("__init__", ""), ("launcher", "import fractional_gpu_is_broken")):
        (package / f"{module}.py").write_text(text)
    environment = {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, env=environment)
    assert said.returncode == 1
    assert "No module named 'fractional_gpu_is_broken'" in said.stderr


def test_jupyter_hides_a_kernel_whose_provisioner_is_gone_and_says_why(
    fresh: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The documents describe what Jupyter does: none of our code runs then."""
    (spec,) = install("default", [250], directory=str(fresh.kernels_dir))
    KernelProvisionerFactory.instance()  # made below, it would never know a provisioner
    monkeypatch.setattr(factory, "entry_points", lambda **_: [])
    monkeypatch.setattr(KernelProvisionerFactory, "provisioners", {})
    manager = KernelSpecManager(kernel_dirs=[str(fresh.kernels_dir)])
    with pytest.raises(NoSuchKernel), caplog.at_level("WARNING"):
        manager.get_kernel_spec(spec.name)
    sentence = "is referencing a kernel provisioner ('fractional-gpu-provisioner') that is not available. "
    assert sentence in " ".join(caplog.text.split())
