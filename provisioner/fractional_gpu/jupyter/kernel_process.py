"""Manages a kernel's ports and its process, which is either a child of the server or was adopted from an earlier server."""

import errno
import functools
import os
import select
import signal
import socket
import weakref
from collections.abc import Mapping
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo, LocalPortCache, port_names
from jupyter_client.localinterfaces import is_local_ip

from fractional_gpu.host.namespaces import own_identity
from fractional_gpu.host.process import ProcessIdentity, identify, open_pidfd

_EXIT_UNKNOWN = 255  # only a parent learns the exit code


class ProcessGoneError(Exception):
    """The process has ended, or another process has its pid now."""


def identity_of(pid: int) -> dict[str, Any]:
    """Return a process's pid, start_time (in clock ticks since boot) and boot_id. Raises ProcessGoneError."""
    try:
        return own_identity(pid, identify).to_dict()
    except OSError as error:
        raise ProcessGoneError(f"process {pid} is gone") from error


def working_folder(pid: int) -> Path:
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError as error:
        raise ProcessGoneError(f"process {pid} is gone") from error


class AdoptedProcess:
    """A process that is not our child. It has the `subprocess.Popen` methods jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, identity: Mapping[str, Any]) -> None:
        process = ProcessIdentity(**identity)
        self.pid = process.pid
        self.returncode: int | None = None
        try:
            self._pidfd = open_pidfd(process)
        except OSError as error:
            raise ProcessGoneError(f"process {self.pid} is gone") from error

    def poll(self) -> int | None:
        if self.returncode is None and self._has_ended(0):
            self._mark_ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
            self._mark_ended()
        return _EXIT_UNKNOWN

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        if self.returncode is None:
            self._mark_ended()

    def _has_ended(self, timeout_s: float | None) -> bool:
        ready = select.poll()
        ready.register(self._pidfd, select.POLLIN)
        return bool(ready.poll(None if timeout_s is None else timeout_s * 1000))

    def _mark_ended(self) -> None:
        os.close(self._pidfd)
        self.returncode = _EXIT_UNKNOWN


# jupyter_client picks a free port, releases it and passes the number to the kernel, which listens on it a second later. Until then, and at
# each restart, any process may get the port ("Address already in use"). So we bind each port with SO_REUSEADDR while the kernel lives,
# without listening. Linux does not hand out a bound port, but lets a process that sets SO_REUSEADDR (as libzmq does) listen on it, and
# refuses connections until then. The ports of a kernel from an earlier server are held only from its next restart on, because a port cannot
# be bound while another process listens on it.

_Manager = Any  # jupyter_client's manager, whose ports are traits without types


class KernelPorts:
    def __init__(self, log: "Logger | LoggerAdapter[Any]") -> None:
        self._log = log
        self._chosen: dict[str, int] = {}  # by the manager's names; kept after `release` for the next start
        self._held: dict[int, socket.socket | None] = {}  # None while the kernel itself listens on the port
        weakref.finalize(self, _close_all, self._held)  # a manager may drop a kernel without cleanup

    def secure(self, manager: _Manager) -> bool:
        """Choose and hold the manager's ports before a launch, or return False to let jupyter_client choose them.

        Return False for transports other than TCP, if `cache_ports` is off, and on systems where no kernel could listen on a held port.
        Raises OSError if no port is free.
        """
        if manager.transport != "tcp" or not manager.cache_ports or not is_local_ip(manager.ip):
            return False
        if not _can_listen_on_held(manager.ip):
            return False
        for name in port_names:
            port = getattr(manager, name)
            if port <= 0:
                self._choose(manager, name)
            elif self._chosen.get(name) == port and self._held.get(port) is None:
                self._hold_again(manager, name, port)
        return True

    def adopt(self, connection: KernelConnectionInfo) -> None:
        if connection.get("transport", "tcp") != "tcp":
            return
        self._chosen = {name: port for name in port_names if isinstance(port := connection.get(name), int)}
        self._held.update(dict.fromkeys(self._chosen.values()))
        LocalPortCache.instance().currently_used_ports.update(self._held)

    def pause(self) -> None:
        """Stop holding the ports until the kernel's next launch, which reuses them."""
        for port, holder in self._held.items():
            if holder is not None:
                holder.close()
                self._held[port] = None

    def release(self) -> None:
        _close_all(self._held)

    def _choose(self, manager: _Manager, name: str) -> None:
        promised = LocalPortCache.instance().currently_used_ports
        while True:
            held = _bound(manager.ip, 0)
            port = int(held.getsockname()[1])
            if port not in promised and port not in manager.ports:
                break
            held.close()
        setattr(manager, name, port)
        self._keep(name, port, held)

    def _hold_again(self, manager: _Manager, name: str, port: int) -> None:
        """Hold the previous port again. If another process has taken it, choose a new one, unless clients already know the old port."""
        try:
            held = _bound(manager.ip, port)
        except OSError as error:
            if port in self._held:
                self._log.warning(
                    "Could not hold port %s of kernel %s for its restart: %s", port, manager.kernel_id, error
                )
            else:
                self._choose(manager, name)
        else:
            self._keep(name, port, held)

    def _keep(self, name: str, port: int, held: socket.socket) -> None:
        self._chosen[name], self._held[port] = port, held
        LocalPortCache.instance().currently_used_ports.add(port)


def _close_all(held: dict[int, socket.socket | None]) -> None:
    cache = LocalPortCache.instance()
    while held:
        port, holder = held.popitem()
        cache.return_port(port)
        if holder is not None:
            holder.close()


def _bound(ip: str, port: int) -> socket.socket:
    """Return a bound IPv4 socket, like jupyter_client's, that child processes do not inherit."""
    holder = socket.socket()
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((ip, port))
    except BaseException:
        holder.close()
        raise
    return holder


@functools.cache
def _can_listen_on_held(ip: str) -> bool:
    """Return whether a kernel can listen on a held port. Some Linux-like systems, such as gVisor, do not allow this."""
    with _bound(ip, 0) as holder:
        try:
            with _bound(ip, holder.getsockname()[1]) as listener:
                listener.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
