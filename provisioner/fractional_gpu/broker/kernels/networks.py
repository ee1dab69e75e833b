"""Creates ZeroMQ contexts in kernels' network namespaces, because a kernel in a container listens on the container's loopback interface.

A context opens connections in its own threads, which are in the network namespace of the thread that created the context's first socket. A
context for another namespace is therefore created by a short-lived thread that enters that namespace (`host.namespaces.in_network`). The
broker keeps one context per namespace while it follows a kernel there. Meanwhile, the context's threads keep the namespace alive,
so its id is not reused.
"""

import os
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from fractional_gpu.host.namespaces import NamespaceId, in_network, open_network
from fractional_gpu.host.process import ProcessIdentity

_MOST_SOCKETS = 8192
_MOST_HERE = 512  # sockets that one context may open


@dataclass(eq=False)
class _Network:
    context: zmq.asyncio.Context
    users: set[str] = field(default_factory=set)  # leases


class Networks:
    def __init__(self) -> None:
        self._own = zmq.asyncio.Context()
        self._own.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self._others: dict[NamespaceId, _Network] = {}

    def context_for(self, lease_id: str, identity: ProcessIdentity) -> zmq.asyncio.Context:
        """Return the ZeroMQ context for the process's loopback interface.

        Blocks for a few milliseconds the first time. Raises PermissionError or OSError.
        """
        self.forget(lease_id)
        try:
            opened = open_network(identity)
        except PermissionError:
            return self._own  # other users' namespaces are unreadable, but most of them are ours
        if opened is None:
            return self._own
        descriptor, namespace = opened
        try:
            network = self._others.get(namespace)
            if network is None:
                network = self._others[namespace] = _Network(in_network(descriptor, _new_context))
        finally:
            os.close(descriptor)
        network.users.add(lease_id)
        return network.context

    def forget(self, lease_id: str) -> None:
        for namespace, network in list(self._others.items()):
            network.users.discard(lease_id)
            if not network.users:
                del self._others[namespace]
                network.context.destroy(linger=0)

    def close(self) -> None:
        for network in self._others.values():
            network.context.destroy(linger=0)
        self._others.clear()
        self._own.destroy(linger=0)


def _new_context() -> zmq.asyncio.Context:
    """Return a new context. To start its threads, open a first socket that no event loop uses, and close it again."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, _MOST_HERE)
    zmq.Context.socket(context, zmq.PAIR, socket_class=zmq.Socket).close(linger=0)
    return context
