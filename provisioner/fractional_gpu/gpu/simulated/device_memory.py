"""Charges device memory to a shared simulated host's control group, and saved memory to the process's own control group.

Linux charges an in-memory file's pages to the group that first touches them. That would be the wrong group, because the notebook fills its
device memory and root's worker writes the saved copy. So a process that allocates device memory sends the file's descriptor to a thread in
the broker, which reserves the pages. If the thread is not available, the process itself is charged. Before a save, a helper in the
process's control group reserves the copy's pages. If the group has no room, Linux kills the helper and the process is left unchanged.
`reserve` needs only the standard library.
"""

import errno
import os
import select
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.simulated.store import MIB, SOCKET, Store
from fractional_gpu.host.memory import memory_groups
from fractional_gpu.host.peers import peer_credentials

_DONE: Final = b"reserved"
_MOST_ERROR: Final = 300
_ANSWER_S: Final = 60.0  # reserving takes about a second per 2 GiB
_REQUEST_S: Final = 5.0
_MOST_AT_ONCE: Final = 32
_PAUSE_S: Final = 0.5  # when no descriptor is free


def reserve(directory: Path, path: Path) -> None:
    """Charge the file that holds this process's device memory to the host's control group. Do nothing if no server runs. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_ANSWER_S)
        try:
            peer.connect(str(directory / SOCKET))
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            return
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            socket.send_fds(peer, [b"r"], [file])
            answer = peer.recv(_MOST_ERROR)
        except (BrokenPipeError, ConnectionResetError):
            return  # the server has ended in the meantime
        finally:
            os.close(file)
    if answer and answer != _DONE:
        raise OSError(errno.ENOSPC, answer.decode(errors="replace"))


class DeviceMemoryServer:
    """A threaded server that reserves device memory for a shared host's users. Accepts only regular files owned by the peer."""

    def __init__(self, directory: Path) -> None:
        # The store stays open while the service runs: users cannot create the files that SQLite needs next to an open database.
        self._store = Store(directory)
        self._most = max((device.memory_mib for device in self._store.devices()), default=0) * MIB
        self._device = directory.stat().st_dev
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._path = directory / SOCKET
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._path.chmod(0o666)
        self._listener.listen(_MOST_AT_ONCE)
        self._listener.setblocking(False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="simulated-device-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._store.close()

    def _serve(self) -> None:
        # Poll first, because a blocking `accept` would hold a descriptor. A lack of descriptors must not end this service.
        ready = select.poll()
        ready.register(self._listener, select.POLLIN)
        while not self._ended.is_set():
            ready.poll()
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                continue  # the peer has gone
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # the listener was shut down
                self._ended.wait(_PAUSE_S)
                continue
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()
            else:
                peer.close()

    def _answer(self, peer: socket.socket) -> None:
        try:
            with peer, suppress(OSError):  # the peer has closed the connection
                peer.settimeout(_REQUEST_S)
                _, files, _, _ = socket.recv_fds(peer, 1, 1)
                try:
                    pid, uid, _ = peer_credentials(peer)
                    charged_alike = _memory_group(pid) == _memory_group(os.getpid())
                    peer.sendall(_DONE if charged_alike else self._reserved(uid, files))
                finally:
                    for file in files:
                        os.close(file)
        finally:
            self._free.release()

    def _reserved(self, uid: int, files: list[int]) -> bytes:
        if len(files) != 1:
            return b"one file is expected"
        found = os.fstat(files[0])
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid or found.st_dev != self._device:
            return b"it is not a regular file of this user in the simulated host"
        if not 0 < found.st_size <= self._most:
            return b"%d bytes are more than a device has" % found.st_size
        try:
            os.posix_fallocate(files[0], 0, found.st_size)
        except OSError as error:
            return f"{found.st_size // MIB} MiB: {error.strerror}".encode()[:_MOST_ERROR]
        return _DONE


_HELPER: Final = """
import os, sys
with open("/proc/self/oom_score_adj", "w") as file: file.write("1000")
with open(sys.argv[1], "w") as file: file.write(str(os.getpid()))
for part in sys.argv[3:]:
    start, end = map(int, part.split("-"))
    os.posix_fallocate(int(sys.argv[2]), start, end - start)
"""
_MOST_PARTS: Final = 1000  # extents on one command line; if there are more, they are joined


def charge(pid: int, file: int, extents: list[tuple[int, int]]) -> None:
    """Reserve parts of a file and charge them to the process's control group. Raises OSError if the group has no room."""
    import subprocess  # noqa: PLC0415 - notebooks import this module
    import sys  # noqa: PLC0415

    group = _memory_group(pid)
    if not extents or group is None or group == _memory_group(os.getpid()):
        return
    if len(extents) > _MOST_PARTS:
        extents = [(extents[0][0], extents[-1][1])]
    parts = [f"{start}-{end}" for start, end in extents]
    command = [sys.executable, "-I", "-S", "-c", _HELPER, str(group / "cgroup.procs"), str(file), *parts]
    done = subprocess.run(command, pass_fds=(file,), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"ended by signal {-done.returncode}"])[
            -1
        ]
        mib = sum(end - start for start, end in extents) / MIB
        raise OSError(
            errno.ENOMEM, f"{mib:.0f} MiB of saved state did not fit into the control group {group} ({last[:200]})"
        )


def _memory_group(pid: int) -> Path | None:
    groups = memory_groups(pid)
    for version in (1, 2):  # the memory controller is in only one of them, so look in version 1 first
        if folders := groups.get(version):
            return folders[0]
    return None
