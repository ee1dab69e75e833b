"""Where this checkout is, and what a process needs on its PYTHONPATH to import our packages and the tests from it."""

import os
from pathlib import Path
from typing import Final

__all__ = ["PYTHONPATH", "ROOT", "SOURCES"]

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = tuple(ROOT / folder for folder in ("provisioner", "kernelext", "hub_spawner"))
PYTHONPATH: Final = os.pathsep.join(str(path) for path in (*SOURCES, ROOT))
