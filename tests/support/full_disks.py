"""A machine on which no temporary file can be made."""

import tempfile
from typing import NoReturn

import pytest

__all__ = ["no_temporary_files"]


def no_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tempfile` find no place for files, as on a full disk."""

    def fails(*_: object) -> NoReturn:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", fails)
