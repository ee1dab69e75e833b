"""The TCP ports of a local kernel, held for it from their choice to its end.

jupyter_client asks the system for a free port, lets it go and hands the number to the kernel, which listens there a second later.
Meanwhile any connection that any process opens may get the port, and so it may whenever the kernel's process is away, as at a restart
(and its own clients, which try to connect again and again, are as good as anybody at getting it): the kernel then ends with "Address
already in use". The more kernels a host has, the oftener it happens.

So each port is bound here, with SO_REUSEADDR and without listening, for as long as the kernel lives, restarts included. On Linux

- the system gives a bound port to nobody who asks for any port: neither to `connect` nor to `bind` with port 0, whatever their options;
- a process that sets SO_REUSEADDR may listen on it. libzmq does so, as do the servers of Go, Java and Rust: without it no kernel
  could be restarted on its ports, which Jupyter does;
- whoever connects to it before the kernel listens is refused, as on a free port.

Two servers that choose at once have different ports without knowing of each other, and nothing is left of a server that was killed.
Ports outside of the range that the system gives away (`ip_local_port_range`) would be no better: that range is the administrator's, may
leave none, and says nothing of other servers, which choose there too. The price is five descriptors of the server for each kernel.
None of it can be had where the kernel listens already: a kernel that an earlier server left has its ports held from its next restart on.
"""

import errno
import functools
import socket
import weakref
from logging import Logger, LoggerAdapter
from typing import Any

from jupyter_client.connect import KernelConnectionInfo, LocalPortCache, port_names
from jupyter_client.localinterfaces import is_local_ip

__all__ = ["KernelPorts"]

_Manager = Any  # jupyter_client's, whose ports are traits without types


class KernelPorts:
    """The ports of one kernel that are ours to choose: those that its manager was not told.

    Not for use by several threads at once.
    """

    def __init__(self, log: "Logger | LoggerAdapter[Any]") -> None:
        self._log = log
        self._chosen: dict[str, int] = {}  # by the manager's names; known after `release` too, for a next start
        self._held: dict[int, socket.socket | None] = {}  # None: the kernel's, and to be held from its next launch on
        weakref.finalize(self, _let_go, self._held)  # whoever forgets a kernel may not clean up

    def secure(self, manager: _Manager) -> bool:
        """Choose the manager's ports before a launch, and hold them; a port that it was given stays as it is.

        Returns False, and does nothing, where jupyter_client is to choose: for another transport, a manager that was told not to
        reserve ports (`cache_ports`), or a system where nobody could listen on a held one. Raises OSError where no port can be had;
        what was held until then still is.
        """
        if manager.transport != "tcp" or not manager.cache_ports or not is_local_ip(manager.ip):
            return False
        if not _lets_others_listen(manager.ip):
            return False
        for name in port_names:
            port = getattr(manager, name)
            if port <= 0:
                self._choose(manager, name)
            elif self._chosen.get(name) == port and self._held.get(port) is None:
                self._hold_again(manager, name, port)
        return True

    def adopt(self, connection: KernelConnectionInfo) -> None:
        """Take the ports of a kernel that runs: nobody of this process gets them, and they are held from its next launch on."""
        if connection.get("transport", "tcp") != "tcp":
            return
        self._chosen = {name: port for name in port_names if isinstance(port := connection.get(name), int)}
        self._held.update(dict.fromkeys(self._chosen.values()))
        LocalPortCache.instance().currently_used_ports.update(self._held)

    def pause(self) -> None:
        """Let them go until the next launch, if there is one, for which they are the same."""
        for port, holder in self._held.items():
            if holder is not None:
                holder.close()
                self._held[port] = None

    def release(self) -> None:
        """Let all of them go. May be called again."""
        _let_go(self._held)

    def _choose(self, manager: _Manager, name: str) -> None:
        """Give the manager a port that is free, and promised to no kernel of this process."""
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
        """Hold a port that was this kernel's; if it is another's by now, only a kernel without clients can have a new one."""
        try:
            held = _bound(manager.ip, port)
        except OSError as error:
            if port in self._held:
                self._log.warning(
                    "Port %s of kernel %s cannot be held for its restart: %s", port, manager.kernel_id, error
                )
            else:
                self._choose(manager, name)
        else:
            self._keep(name, port, held)

    def _keep(self, name: str, port: int, held: socket.socket) -> None:
        self._chosen[name], self._held[port] = port, held
        LocalPortCache.instance().currently_used_ports.add(port)


def _let_go(held: dict[int, socket.socket | None]) -> None:
    cache = LocalPortCache.instance()
    while held:
        port, holder = held.popitem()
        cache.return_port(port)
        if holder is not None:
            holder.close()


def _bound(ip: str, port: int) -> socket.socket:
    """Return a socket, of IPv4 as jupyter_client's, that no process started from here inherits."""
    holder = socket.socket()
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((ip, port))
    except BaseException:
        holder.close()
        raise
    return holder


@functools.cache
def _lets_others_listen(ip: str) -> bool:
    """Whether a port that is held is still one to listen on, as on Linux; tried, for what only looks like it (gVisor) may differ."""
    with _bound(ip, 0) as holder:
        try:
            with _bound(ip, holder.getsockname()[1]) as listener:
                listener.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
