"""Wording lies in golden files, one for each surface that people read; other tests assert codes and fields.

`tests/run golden` rewrites the files: read the difference as if you saw these texts for the first time, and commit it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

__all__ = ["check_golden", "check_wording"]

_WRITE = bool(os.environ.get("JUPYTER_GPU_WRITE_GOLDEN"))


def check_wording(file: Path, passages: Mapping[str, str]) -> None:
    """Compare a surface's texts, by heading, with its golden file; write the file instead if requested."""
    check_golden(file, "\n".join(f"==== {heading}\n{passage.rstrip()}\n" for heading, passage in passages.items()))


def check_golden(file: Path, text: str) -> None:
    """Compare a text with its golden file; write the file instead if requested."""
    if _WRITE:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        pytest.skip(f"{file.name} was written")
    assert text == file.read_text(encoding="utf-8"), f"`tests/run golden` rewrites {file.name}"
