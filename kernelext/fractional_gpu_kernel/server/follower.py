"""The server's one subscription to the broker, in a thread of its own: the client is synchronous, and the server's loop must not wait.

The stream's first line is the whole host's status; each later line holds what has changed, and the client decodes no more than that
(`BrokerClient.events`). A broker of an earlier version sends whole statuses.
"""

import logging
import threading
from collections.abc import Callable

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import unstarted_broker
from fractional_gpu.client.seat import own_seat
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import HostStatus

__all__ = ["StatusFollower"]

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # nothing signals that a broker has started; a try is one attempt to open a socket
_CLOSE_AGAIN_S = 0.1


class StatusFollower:
    """Calls `on_status(status)` after each change, and `on_status(None)` when the broker is gone; from its thread."""

    def __init__(self, on_status: Callable[[HostStatus | None], None]) -> None:
        self._on_status = on_status
        self._stopping = threading.Event()
        self._client: BrokerClient | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-status", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Close the connection and return when the thread has ended: no call comes after that."""
        self._stopping.set()
        while self._thread.is_alive():
            if self._client is not None:
                self._client.close()  # repeatedly: the thread may be about to connect, which one `close` does not find
            self._thread.join(_CLOSE_AGAIN_S)

    def _run(self) -> None:
        complaint = ""
        while not self._stopping.is_set():
            try:
                self._follow()
                complaint = ""
            except FractionalGPUError as error:
                if error.reason != "no-broker" and str(error) != complaint:
                    complaint = str(error)
                    log.info("GPU status: %s", error)
            self._stopping.wait(_RETRY_S)

    def _follow(self) -> None:
        """Follow until the broker goes away. Raises FractionalGPUError."""
        seat = own_seat()
        self._client = unstarted_broker(token=None if seat is None else seat.token)
        is_connected = False
        try:
            for status in self._client.events():
                if self._stopping.is_set():
                    break
                is_connected = True
                self._on_status(status)
        finally:
            self._client.close()
            if is_connected and not self._stopping.is_set():
                self._on_status(None)
