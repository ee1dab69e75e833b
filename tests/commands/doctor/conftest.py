"""Jupyter folders for the test alone, so that the doctor sees a machine on which nothing is set up."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def jupyter_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    for name in ("data", "runtime", "config"):
        (home / name).mkdir(parents=True, mode=0o700)
        monkeypatch.setenv(f"JUPYTER_{name.upper()}_DIR", str(home / name))
    monkeypatch.setenv("JUPYTER_PATH", str(home / "data"))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(home / "config"))
    for name in ("JUPYTER_GPU_SIMULATE", "JUPYTER_GPU_SOCKET", "JUPYTERHUB_SERVICE_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return home
