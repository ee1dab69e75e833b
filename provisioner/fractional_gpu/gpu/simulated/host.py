"""Creates and deletes simulated hosts, for brokers, commands and tests.

Devices can be replaced only while no process is using the host. All users can write to a shared host's database and memory folder, but each
process's folder belongs to that process's user.
"""

import os
import re
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.simulated.processes import empty_trash, processes_of, reap
from fractional_gpu.gpu.simulated.store import (
    DATABASE,
    SOCKET,
    VERSION,
    Device,
    SimulatedHostError,
    Store,
    own_namespace,
)
from fractional_gpu.host.files import temporary_folder

MAX_DEVICES: Final = 64
_MAX_MIB: Final = 16 << 20  # 16 TiB
_ENOUGH_BYTES: Final = 1 << 30
_DEVICES: Final = re.compile(r"\s*(?:(\d{1,6})\s*x\s*)?(\d{1,9})\s*(MiB|GiB|TiB)\s*", re.IGNORECASE)
_MIB_PER: Final = {"mib": 1, "gib": 1024, "tib": 1024 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHost:
    directory: Path
    devices: tuple[Device, ...]


def parse_devices(text: str) -> list[int]:
    """Parse `2x80GiB`, `80GiB` or `2x80GiB,1x40GiB`, and return each device's memory in MiB. Raises SimulatedHostError."""
    sizes: list[int] = []
    for part in text.split(","):
        match = _DEVICES.fullmatch(part)
        count, mib = (int(match[1] or "1"), int(match[2]) * _MIB_PER[match[3].lower()]) if match else (0, 0)
        if count < 1 or not 1 <= mib <= _MAX_MIB or len(sizes) + count > MAX_DEVICES:
            raise SimulatedHostError(
                f"the simulated devices {text[:80]!r} are invalid or too many; expected COUNTxMEMORY such as 2x80GiB, 4x512MiB or "
                f"2x80GiB,1x40GiB, at most {MAX_DEVICES} devices of 1 MiB to 16 TiB each"
            )
        sizes += [mib] * count
    return sizes


def choose_directory(name: str) -> Path:
    """Return the folder for a host with this name: in memory if 1 GiB is free there, otherwise in the temporary folder.

    An existing folder for this name is reused. `name` may contain letters, digits, `-`, `_` and `.`. Raises SimulatedHostError for other
    names.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", name):
        raise SimulatedHostError(
            f"{name!r} is not a valid name for a simulated host: use up to 64 letters, digits, '-', '_' and '.'"
        )
    folder = f"jupyter-gpu-simulated-{os.getuid()}-{name}"
    memory, temporary = Path("/dev/shm"), temporary_folder()  # noqa: S108 (create() checks whose the folder is)
    for parent in (memory, temporary):
        if (parent / folder / DATABASE).is_file():
            return parent / folder
    if memory.is_dir() and os.access(memory, os.W_OK):
        status = os.statvfs(memory)
        if status.f_bavail * status.f_frsize >= _ENOUGH_BYTES:
            return memory / folder
    return temporary / folder


def create(directory: str | Path, devices: str, *, shared: bool = False) -> SimulatedHost:
    """Create a simulated host, or open an existing one. `devices` is in the format accepted by `parse_devices`.

    If `shared`, other users' processes can use the host too. The host then belongs to root, and only root checkpoints processes and cleans
    up. Raises SimulatedHostError if the devices are invalid, if other users can write to the folder, or if the host has different devices
    that processes are using.
    """
    sizes = parse_devices(devices)
    path = Path(directory).absolute()
    _own(path)
    if shared:
        _open_to_users(path)
    with closing(Store(path, create=True)) as store:
        for folder in (store.memory, store.trash):
            folder.mkdir(mode=0o700, exist_ok=True)
            if shared:
                folder.chmod(0o1777)
        reap(store)
        with store.transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES ('version', ?)", (str(VERSION),))
            present = [row[0] for row in db.execute("SELECT memory_mib FROM devices ORDER BY idx")]
            living = [row[0] for row in db.execute("SELECT pid FROM processes")]
            # The keys of live processes are valid in the recorded pid namespace, so keep that.
            verb = "INSERT OR IGNORE" if living else "INSERT OR REPLACE"
            db.execute(verb + " INTO meta VALUES ('namespace', ?)", (own_namespace(),))
            if present != sizes:
                if living:
                    pids = ", ".join(str(pid) for pid in living[:8])
                    raise SimulatedHostError(
                        f"the simulated host in {path} has devices of {present} MiB and processes are using them ({pids}), so it cannot "
                        f"change to {sizes} MiB; end those processes first, or request the same devices"
                    )
                db.execute("DELETE FROM devices")
                rows = [(f"SIM-{uuid.uuid4()}", index, _name(mib), mib) for index, mib in enumerate(sizes)]
                db.executemany("INSERT INTO devices (id, idx, name, memory_mib) VALUES (?, ?, ?, ?)", rows)
        return SimulatedHost(directory=store.directory, devices=tuple(store.devices()))


def destroy(directory: str | Path) -> None:
    """Delete the host. Raises SimulatedHostError if processes are using it."""
    with closing(Store(directory)) as store:
        reap(store)
        if living := processes_of(store):
            pids = ", ".join(str(process.pid) for process in living)
            raise SimulatedHostError(f"the host in {store.directory} is in use by processes {pids}: end them first")
        empty_trash(store)
    for folder in (store.memory, store.trash):
        folder.rmdir()
    for file in (*store.directory.glob(f"{DATABASE}*"), store.directory / SOCKET):
        file.unlink(missing_ok=True)
    store.directory.rmdir()


def _own(path: Path) -> None:
    """Create the folder, or check that this user owns it. In a shared temporary folder, another user could have created it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if path.is_symlink() or not path.is_dir() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SimulatedHostError(
            f"{path} cannot hold a simulated host: it must be your own folder, not a link, and not writable by other users; remove it "
            "or choose another place"
        )


def _open_to_users(path: Path) -> None:
    """Let all users read the folder and write to its database. SQLite creates its other files with the same mode as the database."""
    path.chmod(0o755)
    file = os.open(path / DATABASE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(file, 0o666)
    os.close(file)
    for each in path.glob(f"{DATABASE}-*"):
        each.chmod(0o666)


def _name(mib: int) -> str:
    size = f"{mib // 1024} GiB" if mib % 1024 == 0 else f"{mib} MiB"
    return f"Simulated GPU {size}"
