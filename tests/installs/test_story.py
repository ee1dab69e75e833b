"""The built wheel in a fresh environment, which has the test environment's packages next to it: used, and gone without a trace."""

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installs.story import PACKAGE, Home, Installed, build_wheel, entries, first_hour, run, traces

pytestmark = pytest.mark.promise("first-hour")


@pytest.fixture
def home() -> Iterator[Home]:
    """A user whose folders have a short path: UNIX sockets allow 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="jfg-") as folder:
        yield Home(Path(folder))


def test_the_wheel_is_installed_used_and_uninstalled_without_a_trace(tmp_path: Path, home: Home) -> None:
    wheel, prefix = build_wheel(tmp_path / "dist"), tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (packages,) = prefix.glob("lib/python3*/site-packages")
    # What follows in sys.path; links in it, such as an editable installation of this project, are not followed.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = prefix / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    before = entries(prefix)
    run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--ignore-installed", wheel],
        home.environment,
    )
    where = run([python, "-c", "import fractional_gpu; print(fractional_gpu.__file__)"], home.environment)
    assert Path(where.strip()).is_relative_to(prefix), "it is the wheel that is tested"

    ask = "from jupyter_client.provisioning.factory import KernelProvisionerFactory as f; print(f.instance().default_provisioner_name)"
    assert run([python, "-c", ask], home.environment).strip() == "local-provisioner"
    job = {**home.environment, "JUPYTER_GPU_DEFAULT_PROVISIONER": "fractional-gpu-provisioner"}
    assert run([python, "-c", ask], job).strip() == "fractional-gpu-provisioner"
    assert run([python, "-c", ask], {**job, "JUPYTER_DEFAULT_PROVISIONER_NAME": "another"}).strip() == "another"

    command = first_hour(home, Installed(python, prefix / "bin" / "jupyter-gpu"), prefix)

    assert command == f"{python} -m pip uninstall {PACKAGE}"
    run([*pip, "uninstall", "--quiet", "--yes", PACKAGE], home.environment)
    assert not traces(prefix)
    assert {path for path in entries(prefix) - before if not path.is_dir()} == set()
