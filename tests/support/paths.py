"""This checkout's folder, and the PYTHONPATH with which a process imports our packages and the tests from it."""

import os
from pathlib import Path
from typing import Final

__all__ = [
    "COMPLETE_PYTHONPATH",
    "DEBUGGER_PYTHONPATH",
    "INJECTED",
    "MCP_AGENT",
    "NO_DEBUGPY",
    "PYTHONPATH",
    "QUICK",
    "RELEASE_ONLY",
    "ROOT",
    "SOURCES",
    "STRANGER",
    "failing",
]

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = tuple(ROOT / folder for folder in ("provisioner", "kernelext", "hub_spawner"))
QUICK: Final = ROOT / "tests" / "support" / "quick"
"""Replaces packages that take long to import and are not used here."""
COMPLETE_PYTHONPATH: Final = os.pathsep.join(str(path) for path in (*SOURCES, ROOT))
"""For benchmarks: with every package that a user's processes import."""
NO_DEBUGPY: Final = ROOT / "tests" / "support" / "no_debugpy"
DEBUGGER_PYTHONPATH: Final = os.pathsep.join((COMPLETE_PYTHONPATH, str(QUICK)))
"""For kernels that are debugged."""
INJECTED: Final = ROOT / "tests" / "support" / "injected"
"""Adds faults of simulated hardware to every process, and failpoints to those that want them."""
PYTHONPATH: Final = os.pathsep.join((str(INJECTED), DEBUGGER_PYTHONPATH, str(NO_DEBUGPY)))
STRANGER: Final = str(ROOT / "tests" / "support" / "stranger.py")
"""The program that holds memory of a simulated device without a lease."""
RELEASE_ONLY: Final = {
    "pages in a browser": (
        "tests/e2e/test_accessible_notebook.py",
        "tests/e2e/test_browser.py",
        "tests/hub/test_service_browser.py",
        "tests/reports/test_page.py",
    ),
    "scripts for GPUs": ("tests/gpu_nvidia/test_experiments.py", "tests/gpu_nvidia/test_run_all.py"),
    "site": ("tests/site/test_build.py",),
    "wheel in use": ("tests/installs/test_story.py",),
}
"""Files of tests that `tests/run release` runs, and the suite does not, by the row of its table."""
MCP_AGENT: Final = str(ROOT / "tests" / "support" / "mcp_agent.py")
"""The program that calls tools over MCP."""


def failing(file: Path) -> dict[str, str]:
    """Return the environment of processes that fail where `file` says so."""
    return {"JUPYTER_GPU_FAILPOINTS": str(file), "PYTHONPATH": PYTHONPATH}
