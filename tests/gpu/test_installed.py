"""A checkout that was not installed: kernels and this process still find the provisioner."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from tests.gpu.installed import entry_points_installed

GROUP = "jupyter_client.kernel_provisioners"
ASK = f"from importlib import metadata; print([entry.value for entry in metadata.entry_points(group={GROUP!r})])"


def other_process() -> str:
    """What a process sees that has no installed packages at all."""
    done = subprocess.run([sys.executable, "-S", "-c", ASK], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_entry_points_are_made_visible_where_an_installation_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    before = list(sys.path)
    with entry_points_installed():
        assert other_process() == "['fractional_gpu.jupyter.provisioner:FractionalGPUProvisioner']"
        assert any(entry.name == "fractional-gpu-provisioner" for entry in real(group=GROUP))
    assert other_process() == "[]"
    assert sys.path == before
    assert "PYTHONPATH" not in os.environ


def test_an_installation_is_left_alone() -> None:
    before = list(sys.path)
    with entry_points_installed():
        assert sys.path == before
