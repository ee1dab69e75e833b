"""Finds or creates the folder for a broker's state: its ledger, its audit log and its start command.

The system may empty runtime folders, and SQLite's write-ahead log does not work on network filesystems. Each broker socket on each host
therefore has a state folder on a local disk:

- A system service uses `/var/lib/jupyter-gpu`.
- A user's broker uses `$XDG_STATE_HOME/jupyter-gpu/HOST/SOCKET` (`~/.local/state` by default), or `/var/tmp/jupyter-gpu-UID/HOST/SOCKET` if
  that folder is on a network filesystem, not writable, or below another user's folder. If one of the two already exists, the broker uses
  that one.
- The `state_dir` setting can name another folder. If that folder is on a network filesystem and has no ledger, each node uses a subfolder
  (`node_name`).
"""

import hashlib
import os
import socket as socket_module
import stat
from contextlib import suppress
from pathlib import Path

from fractional_gpu.host.files import foreign_above, make_private_folder, mount_table
from fractional_gpu.protocol.errors import BrokerUnavailableError

SERVICE_STATE = Path("/var/lib/jupyter-gpu")
LEDGER_NAMES = ("ledger.sqlite", "ledger-simulated.sqlite")
_SERVICE_FOLDER = Path("/run/jupyter-gpu")
_VAR_TMP = Path("/var/tmp")  # noqa: S108 - we check that our folder below it is private
_MACHINE_ID = Path("/etc/machine-id")
_MOUNTS = Path("/proc/self/mountinfo")
# fmt: off
_NETWORK = frozenset({
    "9p", "acfs", "afs", "afp", "beegfs", "ceph", "cifs", "coda", "davfs", "exfs", "fhgfs", "gfs", "gfs2",
    "glusterfs", "gpfs", "kafs", "lustre", "mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2",
    "shfs", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs",
})
# fmt: on
_LOCAL_FUSE = frozenset({"fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs"})


def ledger_name(*, simulated: bool) -> str:
    """Return the ledger's file name."""
    return LEDGER_NAMES[1] if simulated else LEDGER_NAMES[0]


def state_folder(socket: str, configured: Path | None = None) -> Path:
    """Return the state folder of this socket's broker, even if it does not exist. `configured` is the `state_dir` setting."""
    if configured is not None:
        has_ledger = any(os.path.lexists(configured / name) for name in LEDGER_NAMES)
        return configured / node_name() if is_network(configured) and not has_ledger else configured
    if os.geteuid() == 0 and Path(socket).parent == _SERVICE_FOLDER:
        return SERVICE_STATE
    # Links are not followed. If a link replaced a deleted folder, it could lead a broker away from its ledger.
    tail = Path(_host(), hashlib.sha256(os.fsencode(Path(socket).absolute())).hexdigest()[:12])
    bases = [base for base in (_state_home(), _spare_base()) if base is not None]
    for base in bases:
        if _is_ours(base) and (base / tail).is_dir():
            return base / tail
    # With `sudo -E`, root would create files in another user's home that the owner could not use.
    suits = _is_writable(bases[0]) and not is_network(bases[0]) and foreign_above(bases[0]) is None
    return (bases[0] if suits else bases[-1]) / tail


def make_state_folder(socket: str, configured: Path | None = None) -> Path:
    """Return the broker's folder, creating it as a private folder if it is missing.

    Raises BrokerUnavailableError if another user owns the folder.
    """
    folder = state_folder(socket, configured)
    base = own_base(folder)
    try:
        if base is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the ledger checks its owner
            return folder
        make_private_folder(base.parent)
        for one in (base, folder.parent, folder):
            if wrong := make_own_folder(one, or_link=one != _spare_base()):
                raise _unusable(one, wrong)
    except OSError as error:
        raise _unusable(folder, f"cannot be created: {error.strerror}") from error
    return folder


def own_base(folder: Path) -> Path | None:
    """Return the folder that contains `folder` and the state of this user's other brokers, or None if `folder` was configured."""
    base = folder.parent.parent
    return base if base in (_state_home(), _spare_base()) else None


def own_host_folders() -> list[Path]:
    """Return this user's existing state folders for this host. Each has one subfolder per broker."""
    bases = [base for base in (_state_home(), _spare_base()) if base is not None]
    return [base / _host() for base in bases if _is_ours(base) and (base / _host()).is_dir()]


def filesystem_type(path: Path) -> str:
    """Return the type of the filesystem that contains the path, or "" if /proc does not list it. The path need not exist."""
    try:
        table = mount_table(_MOUNTS)
    except OSError:
        return ""
    real = Path(os.path.realpath(path))
    above = [mount for mount in table if real.is_relative_to(mount.point)]
    # If two filesystems are mounted at the same point, the later one hides the earlier one.
    nearest = max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)
    return "" if nearest is None else nearest.kind


def is_network(path: Path) -> bool:
    """Return whether the filesystem that contains the path may be shared by several hosts. The path need not exist.

    Unknown FUSE filesystems are assumed to be shared.
    """
    kind = filesystem_type(path)
    return kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def _state_home() -> Path | None:
    """Return this package's folder in the user's state folder, or None if the user has no home."""
    named = os.environ.get("XDG_STATE_HOME", "")
    if Path(named).is_absolute():  # the specification says to ignore a relative path
        return Path(named) / "jupyter-gpu"
    try:
        return Path.home() / ".local" / "state" / "jupyter-gpu"
    except RuntimeError:
        return None


def _spare_base() -> Path:
    return _VAR_TMP / f"jupyter-gpu-{os.geteuid()}"


def node_name() -> str:
    """Return a stable name for this host, derived from the machine id and the host name.

    The machine id alone is not enough, because nodes that boot the same image may share it.
    """
    return _hashed(f"jupyter-gpu {_machine_id()} {socket_module.gethostname()}")


def _host() -> str:
    """Return a name for this host that survives reboots and differs between hosts that share a home folder."""
    return _hashed(f"jupyter-gpu {_machine_id() or socket_module.gethostname()}")


def _machine_id() -> str:
    """Return the machine's id, or "" if it has none yet, as in a system image (`uninitialized`, see machine-id(5))."""
    try:
        identity = _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return "" if identity == "uninitialized" else identity


def _hashed(text: str) -> str:
    """Return a hash of `text` as a folder name, because machine-id(5) says not to expose the machine's id unhashed."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_ours(folder: Path) -> bool:
    try:
        link, status = folder.lstat(), folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and {link.st_uid, status.st_uid} == {os.geteuid()}


def _is_writable(folder: Path) -> bool:
    for one in (folder, *folder.parents):
        if os.path.lexists(one):
            return os.access(one, os.W_OK | os.X_OK)
    return False


def make_own_folder(folder: Path, *, or_link: bool = False) -> str:
    """Create the folder with mode 0700. Return what is wrong with an existing folder, or "" if it is usable. Raises OSError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    link, status = folder.lstat(), folder.stat()
    if not stat.S_ISDIR(status.st_mode) or (stat.S_ISLNK(link.st_mode) and not or_link):
        return "is a symbolic link or not a folder"
    foreign = next((one.st_uid for one in (link, status) if one.st_uid != os.geteuid()), None)
    if foreign is not None:
        return f"belongs to another user (uid {foreign})"
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
    return ""


def _unusable(folder: Path, wrong: str) -> BrokerUnavailableError:
    return BrokerUnavailableError(
        f"the folder {folder} for the GPU broker's ledger {wrong}; fix that, or choose another folder with --state-dir or "
        "c.GPUBroker.state_dir: an absolute path on a local disk"
    )
