"""Somebody at the door while the service gets ready. Standard library only.

JupyterHub 5 gives a managed service ten seconds until it answers anything at all, and does not start without it; on a busy machine the
service's libraries take as long to be imported. So the port is taken first, and whoever comes is told to come again (425) until the
service itself takes over: to the hub that is an answer.
"""

import errno
import socket
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

__all__ = ["Doorman"]

_PATIENCE_S = 30.0  # with a port that the service of an earlier hub may still hold for a moment
_PAUSE_S = 0.2
_LOOK_S = 0.1
_PEER_S = 2.0
_BACKLOG = 128
_MOST_BYTES = 65536
_PAGE = (
    b'<!DOCTYPE html><html lang="en"><meta http-equiv="refresh" content="1"><title>GPUs</title>'
    b"<p>The page is being started, and comes by itself.</p></html>\n"
)
_LATER = (
    b"HTTP/1.1 425 Too Early\r\nRetry-After: 1\r\nContent-Type: text/html\r\nCache-Control: no-store\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_PAGE), _PAGE)
)


class Doorman:
    """Listens where the hub says, from its construction on. Raises OSError if somebody else does so for too long."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._socket = _bound(place.hostname or "127.0.0.1", place.port or 80)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def hand_over(self) -> socket.socket:
        """Answer nobody any more and return the listening socket: who comes now waits at it."""
        self._over.set()
        self._thread.join()
        self._socket.setblocking(False)
        return self._socket

    def _answer(self) -> None:
        self._socket.settimeout(_LOOK_S)
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
