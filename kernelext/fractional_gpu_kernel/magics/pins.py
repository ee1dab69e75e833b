"""`%gpu pin always`: a pin that is renewed for as long as the pool lets it.

Each pin is short, so that a kernel that ends leaves little of its user's budget behind. A broker that does not answer suspends nobody:
then there is nothing to renew, and it is asked again later. A refusal ends it and is said at the next cell.
"""

import threading
from collections.abc import Callable

from fractional_gpu.protocol.errors import BrokerUnavailableError, ConflictError, FractionalGPUError
from fractional_gpu.protocol.messages import LeaseStatus, PinRequest
from fractional_gpu_kernel.settings import Settings

__all__ = ["TOO_LONG", "StandingPin"]

TOO_LONG = "pin-too-long"
_DURATIONS_MS = (1_800_000, 900_000, 300_000, 60_000)  # the first that the pool allows
_RENEW_AT = 0.75  # of a pin's time
_ASK_AGAIN_S = 30.0


class StandingPin:
    """The renewed pin of one kernel. `say` takes a sentence to show."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._stop: threading.Event | None = None

    def start(self, pin: Callable[[int], LeaseStatus]) -> LeaseStatus:
        """Pin now with `pin(duration_ms)` and renew from then on. Raises FractionalGPUError."""
        for duration_ms in _DURATIONS_MS:
            try:
                status = pin(duration_ms)
                break
            except ConflictError as error:
                if error.reason != TOO_LONG or duration_ms == _DURATIONS_MS[-1]:
                    raise
        self.stop()
        self._stop = stop = threading.Event()
        threading.Thread(target=self._renew, args=(stop, duration_ms), name="gpu-pin", daemon=True).start()
        return status

    def stop(self) -> None:
        """Renew no more; the pin that there is stays."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _renew(self, stop: threading.Event, duration_ms: int) -> None:
        pause_s = duration_ms / 1000 * _RENEW_AT
        while not stop.wait(pause_s):
            pause_s = duration_ms / 1000 * _RENEW_AT
            try:
                with self._settings.connect() as client:
                    client.pin(self._settings.lease_id, PinRequest(duration_ms=duration_ms))
            except BrokerUnavailableError:
                pause_s = min(pause_s, _ASK_AGAIN_S)
            except FractionalGPUError as error:
                self._say(f"This kernel's pin is not renewed any more: {error}")
                return
