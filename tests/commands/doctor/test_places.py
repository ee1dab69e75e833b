"""What the doctor finds about folders that several hosts share: a ledger and a socket on a network filesystem."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.client import state_folder
from fractional_gpu.client.state_folder import node_name
from fractional_gpu.commands.doctor.setup import check_broker, check_ledgers
from fractional_gpu.config import Settings


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on NFS."""
    folder = tmp_path / "nfs"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(state_folder, "_MOUNTS", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(f"1 0 8:1 / / rw - ext4 d rw\n2 1 0:5 / {folder} rw - nfs4 server:/home rw\n")
    return folder


def test_a_ledger_on_a_network_filesystem_is_warned_of(shared: Path, tmp_path: Path) -> None:
    (shared / "ledger.sqlite").touch()
    found = list(check_ledgers("/nowhere/broker.sock", cast("Settings", SimpleNamespace(state_dir=shared))))
    (warning,) = [one for one in found if "network filesystem" in one.finding]
    assert (warning.severity, "(nfs4)" in warning.finding) == ("warning", True)
    assert "c.GPUBroker.state_dir" in warning.advice
    local = list(check_ledgers("/nowhere/broker.sock", cast("Settings", SimpleNamespace(state_dir=tmp_path / "local"))))
    assert not [one for one in local if "network filesystem" in one.finding]


def test_a_socket_that_another_host_would_replace_is_warned_of(shared: Path) -> None:
    _, found = check_broker(str(shared / "broker.sock"))
    assert [one.severity for one in found] == ["warning", "note"]
    assert "a broker on another host that shares it would replace it" in found[0].finding
    own = shared / f"gpu-{node_name()}"
    own.mkdir(mode=0o700)
    _, found = check_broker(str(own / "broker.sock"))
    assert [one.severity for one in found] == ["note"]
