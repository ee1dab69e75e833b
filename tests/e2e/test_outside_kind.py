"""A kind of device from another package: kernels take turns on it, and if it is unavailable the reason is given."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.gpu.simulated.host import create, destroy
from tests.support.outside import as_installed
from tests.support.stories import CHECK, fill
from tests.support.world import Server, World, until


@pytest.fixture
def outside(world: World, tmp_path: Path) -> Iterator[World]:
    """A world whose brokers and kernels find the example kind, and whose broker is told to use it."""
    devices = tmp_path / "devices"
    create(devices, "1x256MiB")
    with as_installed("device-kind", tmp_path / "site") as path:
        world.environment["PYTHONPATH"] = f"{path}:{world.environment['PYTHONPATH']}"
        world.environment["EXAMPLE_DEVICES"] = str(devices)
        del world.environment["JUPYTER_GPU_SIMULATE"]
        world.configure("c.GPUBroker.device_kind = 'example'\nc.GPUBroker.device_overhead = 0\n")  # there is no driver
        yield world
        world.end_broker()
        until(lambda: _destroyed(devices), "no process uses the devices")


def _destroyed(devices: Path) -> bool:
    destroy(devices)
    return True


def test_kernels_take_turns_on_it_and_keep_every_byte(outside: World) -> None:
    (name,) = outside.install(750)
    with Server(outside) as server:
        first, second = server.start(name), server.start(name)
        first.must(fill(1))
        second.must(fill(2))
        outside.await_state(first.kernel_id, "suspended")
        assert first.must(CHECK).text == "intact\n"
        assert second.must(CHECK).text == "intact\n"
        assert not outside.status().simulated
        for notebook in (first, second):
            notebook.shut_down()
    said = outside.command("doctor", "--no-try")
    assert "of kind 'example': " in said.stdout


def test_a_kind_that_is_not_installed_or_fails_is_the_reason_that_a_broker_gives(outside: World) -> None:
    for change, reason in (
        ({"device_kind": "other"}, "there is no device kind named 'other'"),
        ({}, "EXAMPLE_DEVICES is not set"),
    ):
        outside.environment["EXAMPLE_DEVICES"] = ""
        outside.configure(f"c.GPUBroker.device_kind = {change.get('device_kind', 'example')!r}\n")
        said = outside.command("broker", "--detach")
        assert said.returncode != 0
        log = Path(outside.socket).with_name("broker.log")
        assert reason in said.stderr + (log.read_text() if log.exists() else "")
