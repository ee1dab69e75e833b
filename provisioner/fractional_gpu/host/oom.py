"""The system's out-of-memory killer: which process it takes first, and whether it has killed one.

The rules:
- The killer takes the process with the most memory, including swapped-out memory. A process's adjustment is added, in thousandths of the
  memory that is full: the machine's, or a control group's. -1000 exempts a process; nothing here goes below `LEAST`.
- A user may raise the adjustment of own processes, and lower it again down to the value that a privileged process set last (else 0).
  Below that floor it takes CAP_SYS_RESOURCE. The floor cannot be read, only found by trying.
- A child inherits the adjustment, and the floor.
- An adjustment is written through a descriptor of the process's file in /proc, after its identity was checked: never to another process
  with that pid.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fractional_gpu.host.memory import memory_groups
from fractional_gpu.host.process import PROC, ProcessIdentity, is_alive

__all__ = ["LEAST", "adjustment", "kill_count", "kill_counter", "lower", "put_back", "was_killed"]

KERNEL_MESSAGES: Final = Path("/dev/kmsg")
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"  # a constant of the kernel
_LONGEST_MESSAGE: Final = 8192

LEAST: Final = -900  # a control group in which every process is exempt would hang instead of losing one
_COUNTER: Final = {1: "memory.oom_control", 2: "memory.events"}


def adjustment(pid: int, *, proc: Path = PROC) -> int:
    """Return the process's adjustment. Raises ProcessLookupError, OSError and ValueError for what cannot be read."""
    try:
        return int((proc / str(pid) / "oom_score_adj").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {pid}") from None


def lower(identity: ProcessIdentity, target: int) -> int:
    """Lower the process's adjustment to the target, or as far towards it as is permitted; return the new value.

    It never raises the adjustment. Raises ProcessLookupError, and OSError for what is not a matter of permission.
    """
    with _opened(identity) as file:
        # The floor cannot be read: bisect between the lowest value that was allowed and the highest that was refused.
        allowed = adjustment(identity.pid)
        refused = target - 1  # the target itself has not been tried
        while allowed - refused > 1:
            value = target if refused < target else (allowed + refused) // 2
            if _permitted(file, value):
                allowed = value
            else:
                refused = value
        return allowed


def put_back(identity: ProcessIdentity, value: int) -> None:
    """Raise the process's adjustment to the value, unless it is higher already, and the floor with it where that is permitted.

    Raises ProcessLookupError and OSError.
    """
    with _opened(identity) as file:
        os.write(file, b"%d" % max(value, adjustment(identity.pid)))


def kill_counter(pid: int, *, proc: Path = PROC) -> Path:
    """Return the file that counts the kills among the processes of this one's control group; without one, in the whole system.

    Raises ProcessLookupError, OSError and ValueError for what cannot be read.
    """
    for version, folders in memory_groups(pid, proc=proc).items():
        file = folders[0] / _COUNTER[version]
        if file.exists():
            return file
    return proc / "vmstat"


def kill_count(counter: Path) -> int:
    """Return how many processes the killer has ended so far, 0 where the kernel is too old to count. Raises OSError, ValueError."""
    for line in counter.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def was_killed(identity: ProcessIdentity, *, messages: Path = KERNEL_MESSAGES) -> bool | None:
    """Return whether the system's log says that the killer ended this process; None if this user may not read the log.

    The log has the pids of the first pid namespace: within a container it cannot be used.
    """
    if (PROC / "self/ns/pid").readlink().name != _FIRST_PID_NAMESPACE:
        return None
    try:
        lines = _messages(messages)
    except PermissionError:
        return None
    since_us = identity.start_time * 1_000_000 // os.sysconf("SC_CLK_TCK")
    said = f"Killed process {identity.pid} ("
    return any(said in text for at_us, text in lines if at_us >= since_us)


def _messages(messages: Path) -> list[tuple[int, str]]:
    """Return the system's log, oldest first: microseconds since boot, and the text. Raises OSError."""
    found: list[tuple[int, str]] = []
    log = os.open(messages, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(log, _LONGEST_MESSAGE)
            except BrokenPipeError:  # it was overwritten meanwhile: the next one is read
                continue
            except BlockingIOError:
                return found
            head, _, text = record.decode(errors="replace").partition(";")
            found.append((int(head.split(",")[2]), text))
    finally:
        os.close(log)


@contextmanager
def _opened(identity: ProcessIdentity) -> Iterator[int]:
    try:
        file = os.open(PROC / str(identity.pid) / "oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {identity.pid}") from None
    try:
        if not is_alive(identity):
            raise ProcessLookupError(f"process {identity.pid}, started at tick {identity.start_time}, is gone")
        yield file
    finally:
        os.close(file)


def _permitted(file: int, value: int) -> bool:
    try:
        os.write(file, b"%d" % value)
    except PermissionError:
        return False
    return True
