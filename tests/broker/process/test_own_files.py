import fcntl
import logging
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from fractional_gpu.broker.process import app
from fractional_gpu.broker.process.own_files import BrokerLock, OwnFiles
from fractional_gpu.client.http import claim_address
from fractional_gpu.client.state_folder import state_folder
from fractional_gpu.host.claims import NameClaim


def _open_descriptors(path: Path) -> int:
    return sum(one.is_symlink() and one.readlink() == path for one in Path("/proc/self/fd").iterdir())


def test_a_folder_that_cannot_be_locked_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where the server may refuse locks: the broker looks again every few seconds."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = state_folder("/run/broker.sock", None)
    folder.mkdir(parents=True)
    base = folder.parent.parent
    ledger = SimpleNamespace(path=folder / "ledger.sqlite")
    files = OwnFiles.__new__(OwnFiles)
    files.__dict__.update(_broker=SimpleNamespace(writer=SimpleNamespace(ledger=ledger)), _guard=-1)

    def refuse(*_: object) -> None:
        raise OSError(37, os.strerror(37))

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(fcntl, "flock", refuse)
        for _ in range(3):
            files._guard_folder()
    assert "No locks available" in caplog.text
    assert _open_descriptors(base) == 0

    for _ in range(3):
        files._guard_folder()
    assert _open_descriptors(base) == 1
    os.close(files._guard)


def test_a_broker_that_meets_one_with_another_filesystem_says_so(tmp_path: Path) -> None:
    socket = str(tmp_path / "broker.sock")
    lock = BrokerLock(socket)
    other = NameClaim.take(claim_address(socket))
    assert isinstance(other, NameClaim)
    with other, closing(lock):
        said = app._take_turn(lock, socket, None, patience_s=-1)
    assert isinstance(said, str)
    assert said.startswith(
        f"process {os.getpid()} serves on a {socket} that is not this one: a broker with another filesystem"
    )
