"""Entry points for a checkout that was not installed: Jupyter finds provisioners by the metadata of installed packages only."""

import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from fractional_gpu import __version__
from tests.support.paths import PYTHONPATH, ROOT

__all__ = ["entry_points_installed"]

_GROUP = "jupyter_client.kernel_provisioners"


@contextmanager
def entry_points_installed() -> Iterator[None]:
    """Make the project and its entry points visible to this process and its children, unless it is installed."""
    root = ROOT
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wanted: dict[str, str] = pyproject["project"]["entry-points"][_GROUP]
    if set(wanted) <= {entry.name for entry in metadata.entry_points(group=_GROUP)}:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="jgl-metadata-") as folder:
        info = Path(folder, f"jupyter_fractional_gpu-{__version__}.dist-info")
        info.mkdir()
        name = pyproject["project"]["name"]
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {__version__}\n")
        lines = "".join(f"{entry} = {target}\n" for entry, target in wanted.items())
        (info / "entry_points.txt").write_text(f"[{_GROUP}]\n{lines}")
        before = os.environ.get("PYTHONPATH")
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, PYTHONPATH, *([before] if before else [])])
        try:
            yield
        finally:
            sys.path.remove(folder)
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
