"""Moving a simulated process's bytes costs what copying them costs: holes stay holes, and nothing is searched twice."""

import os
from pathlib import Path

import pytest

from fractional_gpu.gpu.simulated.checkpointer import _copy

MIB = 1 << 20


def sparse(path: Path, size: int, data: dict[int, bytes]) -> Path:
    with path.open("wb") as file:
        for offset, content in data.items():
            file.seek(offset)
            file.write(content)
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("size", "data"),
    [
        (0, {}),
        (3, {0: b"abc"}),
        (20 * MIB + 5, {}),
        (20 * MIB + 5, {0: os.urandom(20 * MIB + 5)}),
        (40 * MIB, {0: os.urandom(9 * MIB), 17 * MIB: os.urandom(10 * MIB), 40 * MIB - 1: b"z"}),
        (40 * MIB, {39 * MIB: os.urandom(7)}),
    ],
    ids=["empty", "three bytes", "only a hole", "no hole", "three pieces", "data at the end"],
)
def test_a_copy_has_the_same_bytes_and_takes_no_more_room(tmp_path: Path, size: int, data: dict[int, bytes]) -> None:
    source, target = sparse(tmp_path / "source", size, data), tmp_path / "target"
    _copy(source, target, size)
    assert target.read_bytes() == source.read_bytes()
    more_bytes = 512 * (target.stat().st_blocks - source.stat().st_blocks)
    assert more_bytes < MIB, "a hole was filled: the file system's own tables are smaller"


def test_each_hole_is_looked_for_once_however_much_data_lies_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 64 * MIB
    source = sparse(tmp_path / "source", size, {0: bytes(range(1, 256)) * (size // 255)})
    looks: list[int] = []
    seek = os.lseek

    def counted(descriptor: int, position: int, how: int) -> int:
        if how == os.SEEK_HOLE:  # visits every page of the data: once for each chunk would be quadratic
            looks.append(position)
        return seek(descriptor, position, how)

    monkeypatch.setattr(os, "lseek", counted)
    _copy(source, tmp_path / "target", size)
    assert len(looks) == len(set(looks)) <= 2


def test_memory_that_is_shorter_than_recorded_is_an_error_not_an_endless_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sparse(tmp_path / "source", MIB, {0: b"x" * MIB})
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="shorter than recorded"):
        _copy(source, tmp_path / "target", MIB)
