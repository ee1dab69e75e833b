"""Detects a broker that does not answer while a long call to it is under way.

An `acquire`, a `resize` or a `suspend` may take an hour, and a stream sends nothing while nothing changes: the call alone cannot
distinguish a broker that hangs from one that has nothing to send. So a thread pings the broker now and then. A broker that is gone needs no
detection: the call itself breaks.
"""

import threading
from collections.abc import Callable

from fractional_gpu.client.broker_process import ANSWER_S
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError

__all__ = ["PATIENCE_S", "SilenceWatch"]

_PAUSE_S = 1.5  # between two pings
PATIENCE_S = ANSWER_S - _PAUSE_S - 0.5  # for an answer: with the pause and half a second for a busy machine, 5 s


class SilenceWatch:
    """Watches from `start` to `stop`, in a thread of its own.

    `connect` makes a client from a timeout in seconds. The thread calls `report` with the error each time that the broker did not answer,
    and with None when it answers again.
    """

    def __init__(
        self,
        connect: Callable[[float], BrokerClient],
        report: Callable[[BrokerUnavailableError | None], None],
    ) -> None:
        self._connect = connect
        self._report = report
        self._stop = threading.Event()
        self._started = False

    def start(self) -> None:
        """Watch; a second call changes nothing. In a process that can have no more threads there is no watch."""
        if self._started:
            return
        self._started = True
        try:
            threading.Thread(target=self._run, name="gpu-silence", daemon=True).start()
        except RuntimeError:
            return

    def stop(self) -> None:
        """Report nothing more. Returns at once; the thread ends within a few seconds."""
        self._stop.set()

    def _run(self) -> None:
        silent = False
        while not self._stop.wait(_PAUSE_S):
            error = self._ping()
            if self._stop.is_set():
                return
            if error is not None or silent:
                self._report(error)
            silent = error is not None

    def _ping(self) -> BrokerUnavailableError | None:
        """Ping once. Returns the error if no answer came in time; a refusal, or a broker that is gone, is not silence."""
        try:
            with self._connect(PATIENCE_S) as client:
                client.ping()
        except BrokerUnavailableError as error:
            return error if error.reason == "timeout" else None
        except FractionalGPUError:
            return None
        return None
