"""The one subscription to the broker, in a thread of its own: the client is synchronous, and the server's loop must not wait."""

import logging
import threading
from collections.abc import Callable

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import unstarted_broker
from fractional_gpu.client.seat import own_seat
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import HostStatus

__all__ = ["Follower"]

log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # nothing signals that a broker has started; looking is one attempt to open a socket
_WAKE_S = 0.1


class Follower:
    """Calls `told(status)` after each change, and `told(None)` when the broker is gone; from its thread."""

    def __init__(self, told: Callable[[HostStatus | None], None]) -> None:
        self._told = told
        self._stopping = threading.Event()
        self._client: BrokerClient | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-news", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Hang up and return when the thread has ended: nothing is told after that."""
        self._stopping.set()
        while self._thread.is_alive():
            if self._client is not None:
                self._client.close()  # again and again: it may just be about to connect
            self._thread.join(_WAKE_S)

    def _run(self) -> None:
        complaint = ""
        while not self._stopping.is_set():
            try:
                complaint = self._follow()
            except FractionalGPUError as error:
                if error.reason != "no-broker" and str(error) != complaint:
                    complaint = str(error)
                    log.info("GPU status: %s", error)
            self._stopping.wait(_AGAIN_S)

    def _follow(self) -> str:
        """Follow until the broker goes away."""
        seat = own_seat()
        self._client = unstarted_broker(token=None if seat is None else seat.token)
        connected = False
        try:
            for status in self._client.events():
                if self._stopping.is_set():
                    break
                connected = True
                self._told(status)
        finally:
            self._client.close()
            if connected and not self._stopping.is_set():
                self._told(None)
        return ""
