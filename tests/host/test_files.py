"""A replaced file is completely the old one or the new one, at any failure."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fractional_gpu.broker.process.restarting import BrokerOptions, write_restart_files
from fractional_gpu.client.seat import Seat, read_seat, write_seat
from fractional_gpu.host.files import open_own, replace_file
from fractional_gpu.jupyter.kernel_record import RecordFile, unlocked_records

pytestmark = pytest.mark.promise("small-files")


def in_small_pieces(monkeypatch: pytest.MonkeyPatch, *, room: int) -> None:
    """Let the system take three bytes a call, and be full after `room` bytes."""
    real, left = os.write, room

    def write(descriptor: int, data: bytes) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(descriptor, bytes(data[: min(3, left)]))
        left -= taken
        return taken

    monkeypatch.setattr(os, "write", write)


def fails(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "record"
    found.write_bytes(b"the old content")
    return found


def test_a_write_that_the_system_takes_in_pieces_is_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_pieces(monkeypatch, room=100)
    assert replace_file(path, b"the new content") == -1
    assert path.read_bytes() == b"the new content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("room", [0, 1, 7, 14])
def test_a_full_disk_leaves_the_old_content_and_no_other_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    in_small_pieces(monkeypatch, room=room)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"the new content")
    assert path.read_bytes() == b"the old content"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_what_cannot_be_brought_to_the_disk_does_not_take_the_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os if name == "fsync" else Path, name, fails)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(path, b"the new content")
    monkeypatch.undo()
    assert path.read_bytes() == b"the old content"
    assert list(path.parent.iterdir()) == [path]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_rename(one: Path, other: Path) -> Path:
        steps.append("rename")
        return rename(one, other)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    replace_file(path, b"the new content")
    assert steps == ["file", "rename", "folder"]


def test_a_link_is_replaced_and_not_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    replace_file(link, b"the new content")
    assert not link.is_symlink()
    assert path.read_bytes() == b"the old content"


# The files that are written so


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordFile]:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "run"))
    found = RecordFile.create("a-kernel")
    assert found is not None
    found.write({"pid": 1})
    yield found
    found.close()


def test_a_record_that_cannot_be_written_stays_as_it_was(record: RecordFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        in_small_pieces(full, room=10)
        with pytest.raises(OSError, match="No space left"):
            record.write({"pid": 2, "connection_file": "/somewhere"})
    assert record.read() == {"pid": 1}
    record.close()
    (found,) = unlocked_records()
    assert found.read() == {"pid": 1}, "the next server finds the old one whole"
    found.close()


def test_a_record_with_another_name_is_left_alone_and_the_others_are_found(
    record: RecordFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.write_text("{}")
    record.path.with_name("a-linked-kernel.json").hardlink_to(other)
    record.close()
    (found,) = unlocked_records()
    assert found.path == record.path
    found.close()
    (said,) = caplog.messages
    assert "a-linked-kernel.json" in said
    assert "2 hard links" in said
    assert other.stat().st_nlink == 2


def test_a_record_is_held_while_and_after_it_is_rewritten(record: RecordFile) -> None:
    early = os.open(record.path, os.O_RDWR)  # as another server that has opened it and not yet locked it
    try:
        record.write({"pid": 2})
        assert list(unlocked_records()) == []
        assert RecordFile.open(record.path) is None
        assert record.read() == {"pid": 2}
    finally:
        os.close(early)
    record.close()
    (found,) = unlocked_records()
    found.close()


def write_one_seat(path: Path) -> None:
    write_seat(Seat(seat_id="s-2", token=secrets.token_hex(4), pool="default", fraction_milli=500, memory_mib=1), path)


def write_one_restart_file(path: Path) -> None:
    write_restart_files(BrokerOptions(), str(path.with_name("broker.sock")))


@pytest.mark.parametrize(("name", "write"), [("seat.json", write_one_seat), ("broker.json", write_one_restart_file)])
def test_other_files_that_matter_are_replaced_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    write(path)
    before = path.read_bytes()
    in_small_pieces(monkeypatch, room=10)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write(path)
    assert len(synced) >= 2, "the file and its folder"


@pytest.mark.parametrize("what", ["link", "hard link", "fifo", "another's", "folder"])
def test_only_a_plain_file_of_ours_with_one_name_is_opened(tmp_path: Path, what: str) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_text("keep")
    if what == "link":
        path.symlink_to(other)
    elif what == "hard link":
        path.hardlink_to(other)
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.touch()
        os.chown(path, 1, 1)
    before = path.lstat()
    with pytest.raises(OSError, match=str(path)):
        open_own(path, os.O_RDWR | os.O_CREAT)
    assert path.lstat() == before
    assert other.read_text() == "keep"


def test_a_file_of_ours_is_made_private_and_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        descriptor = open_own(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
        os.close(descriptor)


def test_a_seat_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_one_seat(tmp_path / "seat.json")
    assert read_seat(str(tmp_path / "seat.json")).seat_id == "s-2"
