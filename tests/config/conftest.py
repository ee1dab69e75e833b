"""A Jupyter configuration path of our own, and a way to write files into it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fractional_gpu.config import CONFIG_NAME, settings


@pytest.fixture(autouse=True)
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the user's folder and the system's; the user's is the more important one."""
    folders = (tmp_path / "user", tmp_path / "system")
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(settings, "jupyter_config_path", lambda: [str(folder) for folder in folders])
    return folders


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, folder: Path | None = None) -> Path:
        file = (folder or tmp_path) / CONFIG_NAME
        file.write_text(text)
        return file

    return write
