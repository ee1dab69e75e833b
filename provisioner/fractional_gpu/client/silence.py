"""Notices that a broker does not answer while a longer call to it is under way.

An `acquire`, a `resize` or a `suspend` may rightly take an hour, and a stream says nothing while nothing changes: from the call alone a
broker that hangs cannot be told from one that has nothing to say. So a thread asks it the simplest question now and then. A broker that is
gone is no concern here: the call itself breaks.
"""

import threading
from collections.abc import Callable

from fractional_gpu.client.broker_process import ANSWER_S
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError

__all__ = ["PATIENCE_S", "SilenceWatch"]

_PAUSE_S = 1.5  # between two questions
PATIENCE_S = ANSWER_S - _PAUSE_S - 0.5  # for an answer: both together, with the time that a busy machine takes, are 5 s


class SilenceWatch:
    """Watches from `start` to `stop`, in a thread of its own.

    `connect` makes a client from a timeout in seconds. `tell` is called in that thread: with the error each time that the broker did not
    answer, and with None when it answers again.
    """

    def __init__(
        self,
        connect: Callable[[float], BrokerClient],
        tell: Callable[[BrokerUnavailableError | None], None],
    ) -> None:
        self._connect = connect
        self._tell = tell
        self._stop = threading.Event()
        self._started = False

    def start(self) -> None:
        """Watch; a second call changes nothing. A process that can have no more threads is told nothing."""
        if self._started:
            return
        self._started = True
        try:
            threading.Thread(target=self._run, name="gpu-silence", daemon=True).start()
        except RuntimeError:
            return

    def stop(self) -> None:
        """Tell nothing any more. Returns at once; the thread ends a few seconds later at the latest."""
        self._stop.set()

    def _run(self) -> None:
        silent = False
        while not self._stop.wait(_PAUSE_S):
            error = self._silence()
            if self._stop.is_set():
                return
            if error is not None or silent:
                self._tell(error)
            silent = error is not None

    def _silence(self) -> BrokerUnavailableError | None:
        """Ask once. Returns the error if there was no answer in time; a refusal, or nobody who could answer, is none."""
        try:
            with self._connect(PATIENCE_S) as client:
                client.ping()
        except BrokerUnavailableError as error:
            return error if error.reason == "timeout" else None
        except FractionalGPUError:
            return None
        return None
