"""Placeholder HTTP server that answers 425 until the service has started. Standard library only.

JupyterHub 5 waits ten seconds for any answer of a managed service, and does not start without one; on a busy machine the import of the
service's libraries takes as long. So the port is bound first, and each request gets "too early, try again" (425) until the service itself
takes the socket over: to the hub that is an answer.
"""

import errno
import socket
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

__all__ = ["StartupPlaceholder"]

_PATIENCE_S = 30.0  # for a port that the service of an earlier hub may still hold for a moment
_PAUSE_S = 0.2
_POLL_S = 0.1
_PEER_S = 2.0
_BACKLOG = 128
_MOST_BYTES = 65536
_PAGE = (
    b'<!DOCTYPE html><html lang="en"><meta http-equiv="refresh" content="1"><title>GPUs</title>'
    b"<p>The page about the GPUs is starting; it appears by itself in a moment.</p></html>\n"
)
_LATER = (
    b"HTTP/1.1 425 Too Early\r\nRetry-After: 1\r\nContent-Type: text/html\r\nCache-Control: no-store\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_PAGE), _PAGE)
)


class StartupPlaceholder:
    """Listens at the hub's address for the service, from its construction on. Raises OSError if the port stays in use."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._socket = _bound(place.hostname or "127.0.0.1", place.port or 80)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def hand_over(self) -> socket.socket:
        """Answer no more requests and return the listening socket: later connections wait in its backlog."""
        self._over.set()
        self._thread.join()
        self._socket.setblocking(False)
        return self._socket

    def _answer(self) -> None:
        self._socket.settimeout(_POLL_S)
        while not self._over.is_set():
            with suppress(OSError):
                peer, _ = self._socket.accept()
                with peer:
                    peer.settimeout(_PEER_S)
                    peer.recv(_MOST_BYTES)
                    peer.sendall(_LATER)


def _bound(host: str, port: int) -> socket.socket:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_server((host, port), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise
        time.sleep(_PAUSE_S)
