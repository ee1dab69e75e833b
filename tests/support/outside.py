"""Packages of examples/ as if they were installed: modules can be imported and entry points are found, here and in other processes."""

import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support.paths import ROOT

__all__ = ["as_installed"]


@contextmanager
def as_installed(example: str, folder: Path) -> Iterator[str]:
    """Install `examples/EXAMPLE`: its metadata are written into `folder`. Yields the start of PYTHONPATH for its processes."""
    source = ROOT / "examples" / example
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [
        line
        for group, names in groups
        for line in (f"[{group}]", *(f"{name} = {leads}" for name, leads in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    paths = [str(source), str(folder)]
    with patch("sys.path", [*paths, *sys.path]):
        yield os.pathsep.join(paths)
