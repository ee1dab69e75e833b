"""An interrupt at one chosen step of the code, which chance would rarely hit."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["interrupt_at"]


@contextmanager
def interrupt_at(function: Callable[..., Any]) -> Iterator[None]:
    """Raise SIGINT at the very beginning of the function's next call: one of the places where Python handles signals."""

    def strike(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is function.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(strike)
    try:
        yield
    finally:
        sys.setprofile(None)
