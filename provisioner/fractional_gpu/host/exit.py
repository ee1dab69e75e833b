"""Ending this process at once."""

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """End the process after writing what it still buffers, without the teardown of the interpreter; `atexit` functions are not called.

    For a process that has closed what it used. The teardown takes a fifth of a broker's start and gives back only what the
    system takes back anyway; the next broker of a restart waits for it.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader has ended
            stream.flush()
    os._exit(code)
