"""Points at which a test may kill this process, block the thread that reaches them, or have a write fail.

- They lie before and after each step that changes the world, the books or the ledger.
- Off unless `JUPYTER_GPU_FAILPOINTS` names a file when the process starts: then `reach` costs one comparison.
- The file has one line: the name of a point, the number of the time it is reached, and `kill`, `hang` or `fail`, such as
  `ledger.begin.before 2 kill`. It is removed first, so that a restarted process lives on.
- Each point that is reached is appended to the same path with `.reached`, one name a line: a list of the points to try. The times are
  counted there, over all processes with the variable; removing that file starts the count again.
"""

import errno
import fcntl
import os
import re
import signal
import threading
from pathlib import Path

VARIABLE = "JUPYTER_GPU_FAILPOINTS"
_file = os.environ.get(VARIABLE)


def enabled() -> bool:
    """Return whether failpoints are on: for callers whose names cost something to make."""
    return _file is not None


def reach(name: str) -> bool:
    """Die or hang here if the file says so; return True if it says that the step here fails. Raises OSError if it cannot be used."""
    if _file is None:
        return False
    record = os.open(f"{_file}.reached", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(record, fcntl.LOCK_EX)  # one process at a time, so that each time has its own number
        os.write(record, f"{name}\n".encode())
        times = os.pread(record, os.fstat(record).st_size, 0).split(b"\n").count(name.encode())
        path = Path(_file)
        try:
            wanted, time, action = _parsed(path.read_bytes())
        except FileNotFoundError:
            return False
        if wanted != name or time != times:
            return False
        path.unlink()
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os.close(record)
    if action == "hang":
        threading.Event().wait()
    return True


def _parsed(line: bytes) -> tuple[str, int, str]:
    """Return the point, which time, and what to do there. Raises OSError for anything else: such a test would test nothing."""
    words = line.decode("ascii", "replace").split()
    if len(words) != 3 or not re.fullmatch("[0-9]{1,9}", words[1]) or words[2] not in ("kill", "hang", "fail"):
        raise OSError(errno.EINVAL, f"a failpoint is `NAME TIME kill`, `... hang` or `... fail`, not {line[:200]!r}")
    return words[0], int(words[1]), words[2]
