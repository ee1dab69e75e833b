"""A wall clock that a test sets: Python imports this at its start where this folder is in PYTHONPATH.

`time.time` and `time.time_ns` are off by the seconds that the file named by `TEST_WALL_CLOCK` says at each call.
"""

import os
import time
from pathlib import Path

import quick_start  # type: ignore[import-not-found]  # noqa: F401 - this file hides the `sitecustomize` of tests/support/quick

_file = Path(os.environ["TEST_WALL_CLOCK"])
_true_ns = time.time_ns


def _off_s() -> int:
    return int(_file.read_text() or "0")


def _set_ns() -> int:
    return _true_ns() + _off_s() * 1_000_000_000


time.time_ns = _set_ns
time.time = lambda: _set_ns() / 1e9
