"""Where a broker's state lies: one folder for each host and socket, private, on a local disk."""

import os
import stat
from pathlib import Path

import pytest

from fractional_gpu.client import state_folder as module
from fractional_gpu.client.discovery import restart_command, restart_file, spare_restart_file
from fractional_gpu.client.state_folder import (
    SERVICE_STATE,
    filesystem_type,
    is_network,
    make_state_folder,
    state_folder,
)
from fractional_gpu.protocol.errors import BrokerUnavailableError

pytestmark = pytest.mark.promise("state-folder", "shared-home")

SOCKET = "/somewhere/gpu/broker.sock"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a /var/tmp, a machine's id and a list of mounts of this test's own."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "vartmp").mkdir()
    (tmp_path / "machine-id").write_text("0123\n")
    monkeypatch.setattr(module, "_VAR_TMP", tmp_path / "vartmp")
    monkeypatch.setattr(module, "_MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(module, "_MOUNTS", tmp_path / "mountinfo")
    mounted(tmp_path, ("/", "ext4"))
    return tmp_path / "home"


def mounted(tmp_path: Path, *mounts: tuple[str, str]) -> None:
    lines = [f"1 0 8:1 / {point} rw,relatime shared:1 - {kind} server:/export rw\n" for point, kind in mounts]
    (tmp_path / "mountinfo").write_text("".join(lines))


def test_a_folder_that_is_configured_on_a_network_filesystem_is_one_for_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    mounted(tmp_path, ("/", "ext4"), (str(shared), "nfs4"))
    folders = set()
    for machine_id in ("0123\n", "uninitialized\n", ""):
        for host in ("node-a", "node-b"):
            (tmp_path / "machine-id").write_text(machine_id)
            monkeypatch.setattr("socket.gethostname", lambda host=host: host)
            folders.add(state_folder(SOCKET, shared))
            assert state_folder(SOCKET, tmp_path / "local") == tmp_path / "local"
    assert {folder.parent for folder in folders} == {shared}
    assert len(folders) == 4, "an id that is not made yet is none, and of nodes with one id the names count"
    shared.mkdir()
    (shared / "ledger.sqlite").touch()
    assert state_folder(SOCKET, shared) == shared, "a ledger that lies there is found"


def test_an_image_without_an_id_of_its_own_tells_hosts_apart_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machine-id").write_text("uninitialized\n")
    found = []
    for host in ("node-a", "node-b"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        found.append(state_folder(SOCKET))
    assert found[0] != found[1]


def spare(tmp_path: Path) -> Path:
    return tmp_path / "vartmp" / f"jupyter-gpu-{os.geteuid()}"


def test_it_is_in_the_users_state_folder_by_host_and_socket(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_state_folder(SOCKET)
    assert folder.parent.parent == home / ".local" / "state" / "jupyter-gpu"
    assert {stat.S_IMODE(one.stat().st_mode) for one in (folder, folder.parent, folder.parent.parent)} == {0o700}
    assert make_state_folder(SOCKET) == folder
    assert state_folder("/somewhere/else.sock").parent == folder.parent
    assert state_folder("/somewhere/else.sock") != folder
    (tmp_path / "machine-id").write_text("4567\n")
    assert state_folder(SOCKET).parent.parent == folder.parent.parent
    assert state_folder(SOCKET).parent != folder.parent, "another host that shares the home"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "named"))
    assert state_folder(SOCKET).is_relative_to(tmp_path / "named" / "jupyter-gpu")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder(SOCKET).is_relative_to(home)


def test_folders_above_it_that_are_missing_are_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        make_state_folder(SOCKET)
    finally:
        os.umask(before)
    above = (home / ".local", home / ".local" / "state")
    assert [stat.S_IMODE(one.stat().st_mode) for one in above] == [0o700, 0o700]


def test_a_machine_without_an_id_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine-id").unlink()
    folders = set()
    for name in ("node-1", "node-2"):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        folders.add(state_folder(SOCKET))
    assert len(folders) == 2


def test_a_setting_names_the_very_folder(tmp_path: Path) -> None:
    assert make_state_folder(SOCKET, tmp_path / "mine") == tmp_path / "mine"
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


def test_a_system_service_has_the_systems_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert state_folder("/run/jupyter-gpu/broker.sock") != SERVICE_STATE, "only root's broker is the machine's"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert state_folder("/run/jupyter-gpu/broker.sock") == SERVICE_STATE
    assert state_folder("/run/user/0/broker.sock") != SERVICE_STATE


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse.sshfs", "fuse.new"]
)
def test_where_the_home_is_on_a_network_it_is_in_var_tmp(home: Path, tmp_path: Path, kind: str) -> None:
    mounted(tmp_path, ("/", "ext4"), (str(home), kind))
    assert is_network(home / "not" / "there" / "yet")
    folder = make_state_folder(SOCKET)
    assert folder.parent.parent == spare(tmp_path)
    assert stat.S_IMODE(spare(tmp_path).stat().st_mode) == 0o700
    mounted(tmp_path, ("/", "ext4"))
    assert state_folder(SOCKET) == folder, "a folder that is there wins, whatever is mounted later"


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "zfs", "overlay", "fuse.fuse-overlayfs"])
def test_a_local_home_is_used(home: Path, tmp_path: Path, kind: str) -> None:
    mounted(tmp_path, ("/", "nfs4"), (str(home), kind))
    assert state_folder(SOCKET).is_relative_to(home)


def test_the_type_is_that_of_the_innermost_and_last_mount(home: Path, tmp_path: Path) -> None:
    spaced = home / "a b"
    spaced.mkdir()
    mounted(
        tmp_path, ("/", "ext4"), (str(home), "nfs4"), (str(spaced).replace(" ", r"\040"), "xfs"), (str(home), "ext3")
    )
    assert filesystem_type(spaced / "x") == "xfs"
    assert filesystem_type(home / "x") == "ext3"
    assert filesystem_type(Path(f"{home}-not")) == "ext4"
    (tmp_path / "mountinfo").unlink()
    assert filesystem_type(home) == ""
    assert not is_network(home)


@pytest.mark.parametrize("what", ["another's", "a link", "a file"])
def test_a_folder_in_var_tmp_that_another_could_have_made_is_refused(home: Path, tmp_path: Path, what: str) -> None:
    mounted(tmp_path, ("/", "ext4"), (str(home), "nfs"))
    place = spare(tmp_path)
    if what == "another's":
        place.mkdir(mode=0o777)
        os.chown(place, 65534, 65534)
    elif what == "a link":
        place.symlink_to(home)
    else:
        place.touch()
    before = place.lstat()
    with pytest.raises(
        BrokerUnavailableError, match=r"another user \(uid 65534\)|is a symbolic link or not a folder"
    ) as caught:
        make_state_folder(SOCKET)
    assert str(place) in str(caught.value)
    assert "--state-dir" in str(caught.value)
    assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert list(home.iterdir()) == []


def test_root_with_anothers_home_makes_nothing_in_it(home: Path, tmp_path: Path) -> None:
    """As with `sudo -E`: the home's owner could not use what root creates there."""
    before = make_state_folder(SOCKET)
    os.chown(home, 65534, 65534)
    assert make_state_folder(SOCKET) == before, "a folder that is there keeps its ledger"
    folder = make_state_folder("/somewhere/else.sock")
    assert folder.is_relative_to(spare(tmp_path))
    assert before.parent.parent.stat().st_uid == os.geteuid()
    assert list(before.parent.iterdir()) == [before]


def test_another_users_folder_in_var_tmp_changes_nothing(home: Path, tmp_path: Path) -> None:
    tail = state_folder(SOCKET).relative_to(home / ".local" / "state" / "jupyter-gpu")
    (spare(tmp_path) / tail).mkdir(parents=True)
    os.chown(spare(tmp_path), 65534, 65534)
    assert state_folder(SOCKET).is_relative_to(home)


def test_what_others_could_read_is_made_private() -> None:
    folder = make_state_folder(SOCKET)
    folder.chmod(0o755)
    folder.parent.parent.chmod(0o755)
    assert make_state_folder(SOCKET) == folder
    assert {stat.S_IMODE(one.stat().st_mode) for one in (folder, folder.parent.parent)} == {0o700}


def test_how_to_start_the_broker_is_found_without_the_runtime_folder(tmp_path: Path) -> None:
    socket = str(tmp_path / "run" / "broker.sock")
    make_state_folder(socket)
    spare_restart_file(socket).write_text('{"argv": ["spare"]}')
    spare_restart_file(socket).chmod(0o600)
    assert restart_command(socket) == (["spare"], {})
    (tmp_path / "run").mkdir()
    restart_file(socket).write_text('{"argv": ["first"]}')
    restart_file(socket).chmod(0o600)
    assert restart_command(socket) == (["first"], {})
