"""The listening sockets of a broker that may run out of descriptors: they pause, and whoever knocks waits in the backlog.

The event loop's own way is to fail, be called again at once because somebody still knocks, and fail: a full core and a full log.
"""

import asyncio
import errno
import logging
import socket
from typing import Any, Self

from tornado.ioloop import IOLoop

from fractional_gpu.host.claims import NameClaim

__all__ = ["PatientListener", "keep_drained"]

log = logging.getLogger(__name__)

_PAUSE_S = 0.5


class PatientListener(socket.socket):
    """A listening socket for Tornado's servers."""

    _paused: object | None = None

    @classmethod
    def of(cls, listener: socket.socket) -> Self:
        """Take the descriptor of a listening socket over."""
        patient = cls(fileno=listener.detach())
        patient.setblocking(False)
        return patient

    def accept(self) -> tuple[socket.socket, Any]:
        """As usual, but without a descriptor for the connection nobody is accepted for a moment."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.error("no connection can be accepted: %s; again in %g s", error, _PAUSE_S)  # noqa: TRY400 - nothing failed
            loop = IOLoop.current()
            loop.update_handler(self.fileno(), 0)
            self._paused = loop.call_later(_PAUSE_S, loop.update_handler, self.fileno(), IOLoop.READ)
            raise BlockingIOError(errno.EAGAIN, "no descriptor is free") from error

    def close(self) -> None:
        """Stop listening."""
        if self._paused is not None:
            IOLoop.current().remove_timeout(self._paused)
            self._paused = None
        super().close()


def keep_drained(claim: NameClaim) -> None:
    """Forget whoever asks who holds the device, for as long as the running loop lives; the claim must be held until then."""
    loop = asyncio.get_running_loop()

    def drain() -> None:
        try:
            claim.drain()
        except OSError as error:
            log.error("who asks about a device cannot be heard: %s; again in %g s", error, _PAUSE_S)  # noqa: TRY400 - nothing failed
            loop.remove_reader(claim.fileno())
            loop.call_later(_PAUSE_S, keep_drained, claim)

    loop.add_reader(claim.fileno(), drain)
