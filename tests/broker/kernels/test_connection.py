"""Where a kernel's sockets may be."""

import os
from pathlib import Path

import pytest

from fractional_gpu.broker.kernels.connection import Connection, check_endpoints, connection_from_json

OWN, OTHER = os.getuid(), os.getuid() + 1


def ipc(folder: Path) -> Connection:
    return connection_from_json({"transport": "ipc", "ip": str(folder / "k"), "iopub_port": 1, "shell_port": 2})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "above" / "sockets"
    made.mkdir(parents=True)
    return made


def test_a_folder_that_only_its_user_can_write_is_a_place_for_sockets(folder: Path, tmp_path: Path) -> None:
    check_endpoints(ipc(folder), OWN, os.getpid())
    folder.parent.chmod(0o1777)  # sticky: others may write there but not replace our files
    check_endpoints(ipc(folder), OWN, os.getpid())
    (tmp_path / "link").symlink_to(folder)
    check_endpoints(ipc(tmp_path / "link"), OWN, os.getpid())


@pytest.mark.parametrize(
    ("own", "above", "says"),
    [
        (0o770, 0o700, "mode 0770"),
        (0o702, 0o700, "mode 0702"),
        (0o1777, 0o700, "mode 1777"),
        (0o700, 0o770, "replaced by other users.*above"),
    ],
)
def test_a_folder_that_others_can_write_or_exchange_is_none(folder: Path, own: int, above: int, says: str) -> None:
    folder.parent.chmod(above)
    folder.chmod(own)
    with pytest.raises(ValueError, match=says):
        check_endpoints(ipc(folder), OWN, os.getpid())


@pytest.mark.parametrize("name", ["iopub_port", "shell_port"])
def test_a_systems_port_is_nobodys_but_roots(name: str) -> None:
    connection = connection_from_json({"ip": "::1", "iopub_port": 5000, "shell_port": 5001, name: 22})
    with pytest.raises(ValueError, match=r"22 .*1024"):
        check_endpoints(connection, 1000, os.getpid())
    check_endpoints(connection, 0, os.getpid())
    check_endpoints(connection_from_json({"iopub_port": 1024, "shell_port": 65535}), 1000, os.getpid())
