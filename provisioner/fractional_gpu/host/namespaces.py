"""Handles processes in other namespaces: translates their pids, and runs code in their network namespaces.

SO_PEERCRED reports the pid a socket's peer has in our namespace, but a pid in a message is from the peer's namespace. `NSpid` in
/proc/PID/status lists both. Open a namespace before identifying its process: a pid can be reused, but an open descriptor always refers to
the same namespace. Never resolve a path below another process's root (/proc/PID/root), because a link there that begins with `/` leads to
the caller's own files.
"""

import ctypes
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from fractional_gpu.host.process import PROC, ProcessIdentity, is_alive, read_of, status_field
from fractional_gpu.host.threads import StartedThreads

T = TypeVar("T")

_CLONE_NEWNET: Final = 0x40000000
_NS_GET_PARENT: Final = 0xB702
_DEEPEST: Final = 32  # Linux's limit for nested pid namespaces

NamespaceId = tuple[int, int]
"""The device and inode numbers of a namespace's file."""


def namespace_of(pid: int, kind: str, *, proc: Path = PROC) -> NamespaceId:
    try:
        status = os.stat(proc / str(pid) / "ns" / kind)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {pid}") from None
    return status.st_dev, status.st_ino


def own_namespace(kind: str, *, proc: Path = PROC) -> NamespaceId:
    status = os.stat(proc / "thread-self" / "ns" / kind)  # noqa: PTH116
    return status.st_dev, status.st_ino


def nested_pids(pid: int, *, proc: Path = PROC) -> list[int]:
    """Return the process's pids in all namespaces from /proc's down to its own. Raises ProcessLookupError."""
    return [int(one) for one in status_field(read_of(pid, "status", proc=proc), b"NSpid").split()]


def pid_meant_by(peer: int, pid: int, *, proc: Path = PROC) -> int:
    """Return our pid for the process that has `pid` in `peer`'s pid namespace. Raises ProcessLookupError or PermissionError."""
    theirs = namespace_of(peer, "pid", proc=proc)
    if theirs == own_namespace("pid", proc=proc):
        return pid
    return _find(pid, theirs, len(nested_pids(peer, proc=proc)), proc)


def own_identity(pid: int, identify: Callable[[int], ProcessIdentity], *, proc: Path = PROC) -> ProcessIdentity:
    """Identify the process with this pid in our namespace, even if /proc shows the pids of an outer namespace (`unshare --pid`).

    `identify` is called with the pid that /proc shows, and its errors are passed on.
    """
    try:
        shown = int(os.readlink(proc / "self"))  # noqa: PTH115
    except (OSError, ValueError):
        return identify(pid)
    if shown == os.getpid():
        return identify(pid)
    ours = namespace_of(shown, "pid", proc=proc)
    there = identify(_find(pid, ours, len(nested_pids(shown, proc=proc)), proc))
    return ProcessIdentity(there.boot_id, pid, there.start_time)


def _find(pid: int, namespace: NamespaceId, depth: int, proc: Path) -> int:
    for name in os.listdir(proc):  # noqa: PTH208 - names are enough
        if name.isascii() and name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it ended or is hidden
                pids = nested_pids(int(name), proc=proc)
                if (
                    len(pids) >= depth
                    and pids[depth - 1] == pid
                    and _is_within(int(name), namespace, len(pids) - depth)
                ):
                    return int(name)
    raise ProcessLookupError(f"no process has the pid {pid} in the caller's pid namespace")


def _is_within(pid: int, namespace: NamespaceId, up: int) -> bool:
    if not up:
        return namespace_of(pid, "pid") == namespace
    descriptor = os.open(PROC / str(pid) / "ns" / "pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(min(up, _DEEPEST)):
            above = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            os.close(descriptor)
            descriptor = above
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return (status.st_dev, status.st_ino) == namespace


def shows_same_folder(pid: int, path: Path, *, proc: Path = PROC) -> bool:
    """Return whether the process sees our folder at this path, without following links in foreign mounts. Raises OSError."""
    if namespace_of(pid, "mnt", proc=proc) == own_namespace("mnt", proc=proc):
        return True
    # Walk step by step, because a link below the process's root would be resolved from our root.
    folder = os.open(proc / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.parts[1:]:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.path.samestat(os.fstat(folder), path.stat())
    finally:
        os.close(folder)


def open_network(identity: ProcessIdentity, *, proc: Path = PROC) -> tuple[int, NamespaceId] | None:
    """Open the process's network namespace and return its descriptor and id, or None if it is the same as ours.

    Raises ProcessLookupError or PermissionError.
    """
    try:
        descriptor = os.open(proc / str(identity.pid) / "ns" / "net", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {identity.pid} has ended") from None
    status = os.fstat(descriptor)
    found = status.st_dev, status.st_ino
    other = found != own_namespace("net", proc=proc)
    alive = is_alive(identity, proc=proc)
    if other and alive:
        return descriptor, found
    os.close(descriptor)
    if not alive:
        raise ProcessLookupError(f"process {identity.pid} has ended")
    return None


def in_network(descriptor: int, work: Callable[[], T]) -> T:
    """Run `work` in a separate thread in the network namespace. Any threads started by `work` stay in the namespace.

    Raises OSError and any error from `work`. PermissionError means that this process lacks CAP_SYS_ADMIN in its own user namespace or in
    the one that owns the network namespace.
    """

    def run() -> T:
        _enter(descriptor)
        return work()

    # Do not use a thread of a pool: it would stay in the namespace, and later work would use the wrong loopback interface.
    with StartedThreads(1, "in-network") as thread:  # the thread ends with the block
        return thread.submit(run).result()


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
