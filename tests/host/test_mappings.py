"""Promises of fractional_gpu.host.process."""

import mmap
import os
from pathlib import Path

from fractional_gpu.host.process import holds_open, maps


def test_open_and_mapped_files_are_found_by_name_though_they_were_removed(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-uvm"
    path.write_bytes(b"x" * 4096)
    name = str(path)
    assert not holds_open(os.getpid(), lambda one: one == name)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        path.unlink()
        assert holds_open(os.getpid(), lambda one: one == name)
        assert maps(os.getpid(), lambda one: one == name)
    assert not holds_open(os.getpid(), lambda one: one == name)


def test_a_process_that_is_gone_tells_nothing() -> None:
    assert not holds_open(2**22 + 1, lambda _: True)
    assert not maps(2**22 + 1, lambda _: True)
