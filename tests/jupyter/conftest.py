"""Real kernels in a separate environment, whose extension is a stand-in that only reports that it was loaded.

The stand-in lies in the `site-packages` of a virtual environment, as an installed extension does: on `sys.path`, ipykernel puts the
notebook's folder before it, so a module of that folder can shadow it.
"""

import json
import os
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from fractional_gpu.client import discovery
from fractional_gpu.jupyter.kernel_command import MARK
from fractional_gpu.jupyter.kernelspecs import PROVISIONER_NAME
from tests.support.fake_broker import FakeBroker
from tests.support.paths import ROOT

REPOSITORY = ROOT
_STAND_IN = f"""
{MARK}

def load_ipython_extension(shell):
    shell.user_ns["gpu_extension"] = __file__
"""


@dataclass(frozen=True)
class Places:
    """The folders of this test's Jupyter."""

    python: str
    specs: Path
    work: Path

    def write_spec(self, name: str, argv: list[str] | None = None, **fields: Any) -> str:  # noqa: ANN401 - kernel.json
        """Write a kernelspec, by default of ipykernel, and return its name."""
        folder = self.specs / name
        folder.mkdir(parents=True)
        argv = argv or [self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        content: dict[str, Any] = {"argv": argv, "display_name": name, "language": "python"} | fields
        (folder / "kernel.json").write_text(json.dumps(content))
        return name

    def write_gpu_spec(self, name: str = "gpu", argv: list[str] | None = None, **config: object) -> str:
        """Write a kernelspec that names our provisioner with this config."""
        stanza = {"provisioner_name": PROVISIONER_NAME, "config": config}
        return self.write_spec(name, argv, metadata={"kernel_provisioner": stanza})


@pytest.fixture(scope="session")
def kernel_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with ipykernel, our packages and the stand-in."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "tests-environment.pth").write_text(sysconfig.get_path("purelib"))
    (site / "fractional_gpu_kernel").mkdir()
    (site / "fractional_gpu_kernel" / "__init__.py").write_text(_STAND_IN)
    (site / "fractional_gpu_kernel" / "__main__.py").symlink_to(
        REPOSITORY / "kernelext" / "fractional_gpu_kernel" / "__main__.py"
    )
    (site / "fractional_gpu").symlink_to(REPOSITORY / "provisioner" / "fractional_gpu")
    return str(home / "bin" / "python")


@pytest.fixture
def places(tmp_path: Path, kernel_python: str, monkeypatch: pytest.MonkeyPatch) -> Places:
    for name in ("DATA", "CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for name in [name for name in os.environ if name.startswith(("JUPYTER_GPU_", "JUPYTER_DEFAULT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    entry = EntryPoint(
        PROVISIONER_NAME,
        "fractional_gpu.jupyter.provisioner:FractionalGPUProvisioner",
        KernelProvisionerFactory.GROUP_NAME,
    )
    # The process's one factory adds its provisioners to the class's when it is made, and finds none again that is missing later: made
    # only now, it would lose ours with the end of this test.
    KernelProvisionerFactory.instance()
    monkeypatch.setitem(KernelProvisionerFactory.provisioners, PROVISIONER_NAME, entry)
    monkeypatch.setattr(discovery, "SYSTEM_SOCKET", str(tmp_path / "no-system.sock"))
    work = tmp_path / "work"
    work.mkdir()
    places = Places(python=kernel_python, specs=tmp_path / "data" / "kernels", work=work)
    about = {"debugger": True, "supported_encryption": ["curve"]}
    places.write_spec("env", display_name="Python 3 (ipykernel)", metadata=about, kernel_protocol_version="5.5")
    return places


@pytest.fixture
def broker(
    tmp_path_factory: pytest.TempPathFactory, places: Places, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeBroker]:
    assert places.python != sys.executable
    socket = tmp_path_factory.mktemp("s") / "b.sock"
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(socket))
    with FakeBroker(str(socket)) as broker:
        yield broker
