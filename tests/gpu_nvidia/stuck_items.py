"""Items that go wrong in every way, for the tests of tests/gpu/items.py."""

import os
import signal
import subprocess
import sys
from typing import Final

from tests.gpu.items import Item, Note, NotHereError, Setting, main

__all__ = ["ITEMS"]


def answers(_setting: Setting, note: Note) -> None:
    note("answer", 42)


def hangs(_setting: Setting, note: Note) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    note("child", child.pid)
    signal.pause()


def crashes(_setting: Setting, note: Note) -> None:
    note("before", "the crash")
    os.kill(os.getpid(), signal.SIGSEGV)


def fails(_setting: Setting, note: Note) -> None:
    note("before", "the failure")
    raise ValueError("this is wrong")


def lacks(_setting: Setting, _note: Note) -> None:
    raise NotHereError("there are no such pages")


ITEMS: Final = {
    "hangs": Item(act=hangs, longest_s=2),
    "stuck": Item(act=hangs, longest_s=600),
    "crashes": Item(act=crashes),
    "fails": Item(act=fails),
    "lacks": Item(act=lacks),
    "torch": Item(act=answers, needs=("no_such_package",)),
    "driver": Item(act=answers, needs=("driver",)),
    "answers": Item(act=answers),
}


if __name__ == "__main__":
    raise SystemExit(main("tests.gpu_nvidia.stuck_items", ITEMS))
