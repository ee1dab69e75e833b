"""Runs a program repeatedly and reports each successful run as a unit of work. This script imports only the standard library.

    python -I -S repeat.py COMMAND [ARGUMENTS]

A report is also written just before the first run, to mark when it began. The script exits with the status of the first failed run.
"""

import os
import subprocess
import sys
import time


def main() -> int:
    file = os.open(os.environ["JUPYTER_GPU_MEASURE"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    while True:
        os.write(file, b"%d 1\n" % time.monotonic_ns())
        code = subprocess.call(sys.argv[1:])
        if code:
            return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
