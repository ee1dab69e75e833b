"""A little kernel for tests: runs the cells it reads, answers `begun`, then the value or the error as JSON."""

import importlib
import json
import signal
import sys
import threading
from typing import Any


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def say_when_sigint_is_held() -> None:
    """Report it from another thread when another handler than Python's has SIGINT."""

    def watch() -> None:
        ours = signal.getsignal(signal.SIGINT)
        pause = threading.Event()
        while signal.getsignal(signal.SIGINT) is ours:
            pause.wait(0.001)
        say({"held": True})

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """The argument is the module that cells know as `cuda`: the simulated device's, or `tests.driver_double.device`."""
    cuda = importlib.import_module(arguments[0])
    names = {"cuda": cuda, "b": {}, "say_when_sigint_is_held": say_when_sigint_is_held}
    for line in sys.stdin:
        text = json.loads(line)
        mode = "exec" if text.startswith("!") else "eval"
        try:
            say({"begun": True})
            code = compile(text.removeprefix("!"), "<cell>", mode)
            value = eval(code, names)  # noqa: S307 (running the test's own cells is what this is for)
            say({"value": value})
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the test decides what it expected)
            say({"error": type(error).__name__, "message": str(error)})
    return 0
