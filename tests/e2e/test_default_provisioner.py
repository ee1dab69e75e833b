"""As the default provisioner for all kernelspecs: plain kernels, kernels without our extension, and other languages take turns too."""

import json
import logging
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from fractional_gpu.jupyter import provisioner
from fractional_gpu.jupyter.kernelspecs import PROVISIONER_NAME
from tests.support import tiny_kernel
from tests.support.managed import client_of, entered, must
from tests.support.paths import ROOT
from tests.support.shared_server import SharedServer
from tests.support.stories import CHECK, SLEEPS, UNINTERRUPTIBLE, fill
from tests.support.world import Notebook, Server, World, until

REPOSITORY = ROOT
TURNS = 2


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "bare.pth").write_text(sysconfig.get_path("purelib"))
    (site / "fractional_gpu").symlink_to(REPOSITORY / "provisioner" / "fractional_gpu")
    return str(home / "bin" / "python")


def ours_by_default(world: World) -> None:
    """Make every kernel without a stanza ours: three quarters of the only device."""
    world.environment["JUPYTER_DEFAULT_PROVISIONER_NAME"] = PROVISIONER_NAME
    world.environment["JUPYTER_GPU_DEFAULT_FRACTION"] = "3/4"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[SharedServer]:
    shared = SharedServer(ours_by_default)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def world(shared_server: SharedServer) -> Iterator[World]:
    """One broker for all tests of this file."""
    with shared_server.borrowed() as lent:
        yield lent


def write_spec(world: World, name: str, argv: list[str], **fields: object) -> str:
    folder = world.kernels_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    content = {"argv": argv, "display_name": name, "language": "python", **fields}
    (folder / "kernel.json").write_text(json.dumps(content))
    return name


def bare_spec(world: World, python: str) -> str:
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    return write_spec(world, "bare", argv, env={"PYTHONPATH": ""})


def tiny_spec(world: World) -> str:
    argv = [sys.executable, str(tiny_kernel.__file__), "{connection_file}"]
    return write_spec(world, "tiny", argv, language="tiny")


def take_turns(world: World, *notebooks: Notebook) -> None:
    for _ in range(TURNS):
        for running in notebooks:
            assert running.must(CHECK).text == "intact\n"
            # A kernel without a gate continues as soon as the driver lets it, a moment before the broker has noted that.
            world.await_state(running.kernel_id, "resident")
            for other in notebooks:
                assert other is running or world.lease(other.kernel_id).state == "suspended"


def test_kernels_with_and_without_our_extension_and_of_another_make_take_turns(
    world: World, server: Server, bare_python: str
) -> None:
    plain = server.start("python3")
    until(lambda: world.lease(plain.kernel_id).gated, "its gate is there")
    lease = world.lease(plain.kernel_id)
    assert (lease.spec.fraction_milli, lease.state) == (750, "unarmed")
    plain.must(fill(1))
    bare = server.start(
        bare_spec(world, bare_python)
    )  # the first is suspended for it: its device was assigned at its start
    lease = world.lease(bare.kernel_id)
    assert (lease.gated, lease.spec.fraction_milli, lease.state) == (False, 750, "resident")
    assert world.lease(plain.kernel_id).state == "suspended"
    assert bare.must("print('fractional_gpu_kernel' in __import__('sys').modules)").text == "False\n"
    bare.must(fill(2))
    tiny = server.start(tiny_spec(world))
    lease = world.lease(tiny.kernel_id)
    assert (lease.gated, lease.spec.fraction_milli, lease.state) == (False, 750, "resident")
    assert world.lease(bare.kernel_id).state == "suspended"
    tiny.must(fill(3))
    take_turns(world, plain, bare, tiny)


def test_a_kernel_without_our_extension_is_interrupted_once_it_is_back_and_restarted_and_shut_down_in_the_ordinary_time(
    world: World, server: Server, bare_python: str
) -> None:
    first = server.start(bare_spec(world, bare_python))
    first.must(UNINTERRUPTIBLE + fill(1))
    second = server.start("python3")
    second.must(fill(2))
    world.await_state(first.kernel_id, "suspended")
    cell = first.send(f"read = buffer.read()\n{SLEEPS}")  # blocked; the fact that it is busy brings the memory back
    world.await_state(first.kernel_id, "resident")
    first.interrupt()
    assert first.wait(cell).error.startswith("KeyboardInterrupt")
    assert first.must(CHECK).text == "intact\n"

    assert second.must(CHECK).text == "intact\n"
    lease = world.await_state(first.kernel_id, "suspended")
    begun = time.monotonic()
    first.restart()
    restarted = world.lease(first.kernel_id)
    assert restarted.pid != lease.pid
    assert restarted.state == "resident"  # room had to be made for it again
    assert world.lease(second.kernel_id).state == "suspended"
    first.shut_down()
    assert time.monotonic() - begun < 30
    assert [each.kernel_id for each in world.status().leases] == [second.kernel_id]
    assert second.must(CHECK).text == "intact\n"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_where_no_broker_can_be_had_kernels_start_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_gpu: bool
) -> None:
    nowhere = world.folder / "file"
    nowhere.touch()
    signs = (str(nowhere),) if has_gpu else ()
    with entered(world):
        monkeypatch.setattr(provisioner, "_NVIDIA_PATHS", signs)
        monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(nowhere / "broker.sock"))
        # jupyter_client reads its variable once per process, perhaps in an earlier test.
        factory = KernelProvisionerFactory.instance(parent=None)
        monkeypatch.setattr(factory, "default_provisioner_name", PROVISIONER_NAME)
        manager = KernelManager(kernel_name="python3")
        with caplog.at_level(logging.WARNING):
            manager.start_kernel()
        try:
            with client_of(manager) as client:
                ours = "import os\nprint([name for name in os.environ if name in ('JUPYTER_GPU_LEASE', 'JUPYTER_GPU_NOTICE')])"
                said = must(client, ours)
        finally:
            manager.shutdown_kernel(now=True)
    lines = [record.getMessage() for record in caplog.records if "GPU" in record.getMessage()]
    assert len(lines) == 1
    if has_gpu:  # it must not reach a device that others share: it gets no GPU, and a sentence that says why
        assert "['JUPYTER_GPU_NOTICE']" in said
    else:
        assert said == "[]\n"
        assert "ordinary" in lines[0]
