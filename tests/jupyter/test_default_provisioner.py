"""As the default provisioner: every kernelspec gets a lease where a broker serves, and starts without one where none can."""

import logging
from pathlib import Path

import pytest
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from fractional_gpu.jupyter import provisioner
from fractional_gpu.jupyter.kernelspecs import PROVISIONER_NAME
from fractional_gpu.protocol.errors import BadRequestError, NoRoomError
from tests.jupyter.conftest import Places
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import evaluate, running_kernel, talking_to


@pytest.fixture(autouse=True)
def default_provisioner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What JUPYTER_DEFAULT_PROVISIONER_NAME does in a new process."""
    monkeypatch.setattr(KernelProvisionerFactory.instance(), "default_provisioner_name", PROVISIONER_NAME)


@pytest.fixture
def no_broker(broker: FakeBroker) -> FakeBroker:
    broker.stop()
    settings = Path(broker.path).with_name("broker.json")
    settings.write_text('{"argv": ["/bin/sh", "-c", "echo no NVIDIA driver was found >&2; exit 1"]}')
    settings.chmod(0o600)
    return broker


def test_a_plain_kernelspec_gets_the_default_lease(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_DEFAULT_POOL", "small")
    monkeypatch.setenv("JUPYTER_GPU_DEFAULT_FRACTION", "1/8")
    assert (places.specs / "env").exists()
    with running_kernel("env"):
        request = broker.only_lease()[1].request
        assert (request["pool"], request["fraction_milli"], request["gated"]) == ("small", 125, True)


def test_without_a_gpu_and_a_broker_the_kernel_is_an_ordinary_one(
    places: Places, no_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provisioner, "_NVIDIA_PATHS", (str(places.work / "nothing"),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with caplog.at_level(logging.WARNING), running_kernel("env") as manager, talking_to(manager) as client:
        assert evaluate(client, "__import__('os').environ['CUDA_VISIBLE_DEVICES']") == "'7'"
        assert evaluate(client, "__import__('os').environ.get('JUPYTER_GPU_NOTICE')") == "None"
        assert evaluate(client, "gpu_extension").startswith("NameError")
    lines = [record.getMessage() for record in caplog.records if "ordinary" in record.getMessage()]
    assert len(lines) == 1
    assert "no NVIDIA driver was found" in lines[0]
    assert no_broker.leases == {}


def test_with_a_gpu_but_no_broker_the_kernel_does_not_take_the_gpu_unasked(
    places: Places, no_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provisioner, "_NVIDIA_PATHS", (str(places.work),))
    with running_kernel("env") as manager, talking_to(manager) as client:
        assert evaluate(client, "__import__('os').environ['CUDA_VISIBLE_DEVICES']") == "''"
        assert "no NVIDIA driver" in evaluate(client, "__import__('os').environ['JUPYTER_GPU_NOTICE']")
    assert no_broker.leases == {}


def test_without_room_the_kernel_starts_and_says_so(places: Places, broker: FakeBroker) -> None:
    assert places.python
    broker.fail["create"] = NoRoomError("nothing is free")
    with running_kernel("env") as manager, talking_to(manager) as client:
        assert "nothing is free" in evaluate(client, "__import__('os').environ['JUPYTER_GPU_NOTICE']")


def test_a_default_that_makes_no_sense_is_named(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert places.python
    monkeypatch.setenv("JUPYTER_GPU_DEFAULT_FRACTION", "lots")
    with pytest.raises(BadRequestError, match="invalid fraction 'lots'"), running_kernel("env"):
        pass
    assert broker.calls == []
