"""The seat that the hub gave this server, in the file that `JUPYTER_GPU_SEAT_FILE` names.

Its pool, fraction and memory are for display. The broker keeps the values that count.
"""

import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fractional_gpu.host.files import replace_file
from fractional_gpu.protocol.errors import FractionalGPUError

__all__ = ["SEAT_FILE_VARIABLE", "Seat", "own_seat", "read_seat", "write_seat"]

SEAT_FILE_VARIABLE = "JUPYTER_GPU_SEAT_FILE"
_LONGEST = 16 * 1024  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What the kernels of this server may use in sum. Fraction in milli-GPU, memory in MiB."""

    seat_id: str
    token: str = field(repr=False)
    pool: str
    fraction_milli: int
    memory_mib: int


def own_seat() -> Seat | None:
    """Return this process's seat, None without one. Raises FractionalGPUError for an unreadable file."""
    path = os.environ.get(SEAT_FILE_VARIABLE)
    return read_seat(path) if path else None


def read_seat(path: str) -> Seat:
    """Return the seat in a file. Raises FractionalGPUError that says what to do."""
    remedy = "stop this server on the hub's page and start it again"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FractionalGPUError(f"{SEAT_FILE_VARIABLE}={path} is not a file; {remedy}")
            text = os.read(descriptor, _LONGEST)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FractionalGPUError(f"{SEAT_FILE_VARIABLE}={path} cannot be read: {reason}; {remedy}") from error
    try:
        content = json.loads(text)
        seat = Seat(**{name: content[name] for name in Seat.__dataclass_fields__})
        whole = all(isinstance(getattr(seat, name), str) for name in ("seat_id", "token", "pool")) and all(
            type(getattr(seat, name)) is int for name in ("fraction_milli", "memory_mib")
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise FractionalGPUError(f"{SEAT_FILE_VARIABLE}={path} does not hold a seat; {remedy}")
    return seat


def write_seat(seat: Seat, path: Path, *, uid: int | None = None, gid: int | None = None) -> None:
    """Write the seat to a new private file of the user `uid` (None: of this process's user). Raises OSError."""

    def give(descriptor: int) -> None:
        if uid is not None:
            os.fchown(descriptor, uid, -1 if gid is None else gid)

    replace_file(path, json.dumps(asdict(seat)).encode(), prepare=give)
