"""Where this checkout is, and what a process needs on its PYTHONPATH to import our packages and the tests from it."""

import os
from pathlib import Path
from typing import Final

__all__ = ["PYTHONPATH", "ROOT", "SOURCES"]

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = tuple(ROOT / folder for folder in ("provisioner", "kernelext", "hub_spawner"))
_QUICK: Final = ROOT / "tests" / "support" / "quick"
"""Stands in for a package that takes long to import and that nothing here uses."""
PYTHONPATH: Final = os.pathsep.join(str(path) for path in (*SOURCES, ROOT, _QUICK))
