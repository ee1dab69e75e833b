"""Runs a broker: `python -m fractional_gpu.broker [--detach | --check] OPTIONS-AS-JSON`.

Brokers use this to start other brokers; people run `jupyter gpu broker` instead. `--check` only tests whether the configuration can be
read.
"""

import gc
import json
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which would take a fifth of a broker's startup time. The system frees everything."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader has ended
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.disable()  # a kernel's start waits for the broker, and imports leave no garbage
    if sys.argv[1:2] == ["--detach"]:
        from fractional_gpu.broker.process.restarting import BrokerOptions, start_detached

        exit_now(start_detached(BrokerOptions(**json.loads(sys.argv[2]))))
    from fractional_gpu.broker.process.app import check_options, run_options

    if sys.argv[1] == "--check":
        exit_now(check_options(sys.argv[2]))
    gc.freeze()  # later collections skip the objects that imports made
    gc.enable()
    exit_now(run_options(sys.argv[1]))
