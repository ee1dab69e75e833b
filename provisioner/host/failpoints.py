"""Points at which a test may kill this process, or have a write fail.

- They lie before and after each step that changes the world, the books or the ledger.
- Off unless `JUPYTER_GPU_FAILPOINTS` names a file when the process starts: then `reach` costs one comparison.
- The file says where, in one line: a point's name, which time it is reached, and `kill` or `fail`, such as `ledger.begin.before 2 kill`.
  It is removed first, so whoever is started anew lives on.
- What was reached is written to the same name with `.reached` appended, one name a line: a list of what there is to try.
"""

import os
import signal
from collections import Counter
from pathlib import Path

__all__ = ["VARIABLE", "enabled", "reach"]

VARIABLE = "JUPYTER_GPU_FAILPOINTS"
_file = os.environ.get(VARIABLE)
_times: Counter[str] = Counter()


def enabled() -> bool:
    """Whether anybody wants to know: for names that cost something to make."""
    return _file is not None


def reach(name: str) -> bool:
    """Die here if the file says so; return whether it says that what is done here fails. Raises OSError if it cannot be used."""
    if _file is None:
        return False
    _times[name] += 1
    record = os.open(f"{_file}.reached", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(record, f"{name}\n".encode())
    finally:
        os.close(record)
    path = Path(_file)
    try:
        wanted, time, action = path.read_text().split()
    except FileNotFoundError:
        return False
    if wanted != name or int(time) != _times[name]:
        return False
    path.unlink()
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return True
