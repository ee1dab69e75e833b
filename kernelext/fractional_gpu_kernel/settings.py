"""Holds the settings a kernel needs to reach its broker, and explains failed calls.

The environment is read only once, when the extension is loaded, so a cell cannot move the kernel to another broker by changing
`os.environ`. Each connection reads the token from its file. If the file has been deleted, the token last read from it is used, and the file
is restored for other programs, such as the next server.

A cell can break its own process, for example by replacing standard library functions, using up all file descriptors or switching to another
user. `LOCAL_FAILURES` lists the resulting errors; restarting the broker or the kernel does not help.
"""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient

LEASE = "JUPYTER_GPU_LEASE"
SOCKET = "JUPYTER_GPU_SOCKET"
TOKEN_FILE = "JUPYTER_GPU_TOKEN_FILE"  # noqa: S105 - the name of a variable that holds a path
NOTICE = "JUPYTER_GPU_NOTICE"

_MAX_TOKEN = 1024
_last_read: dict[str, str] = {}  # the tokens, by the paths of their files
_REVIVE_TIMEOUT_S = 30.0


class Settings(NamedTuple):  # defining a frozen dataclass would take half a millisecond more at each kernel start
    lease_id: str
    socket_path: str
    token_file: str

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "Settings | None":
        lease_id, socket_path, token_file = (environment.get(name, "") for name in (LEASE, SOCKET, TOKEN_FILE))
        if not (lease_id and socket_path and token_file):
            return None
        return Settings(lease_id, socket_path, token_file)

    def connect(self, timeout_s: float = 30.0) -> "BrokerClient":
        """Return an unconnected client with the lease's token. Without a token, the broker identifies the client by its process."""
        from fractional_gpu.client.client import BrokerClient  # noqa: PLC0415 - would slow down the kernel's start

        return BrokerClient(self.socket_path, token=self._token(), timeout_s=timeout_s)

    def revive(self) -> None:
        """Start a broker if none is running. Raises BrokerUnavailableError, with the reason "timeout" if the broker does not answer."""
        from fractional_gpu.client.discovery import ensure_broker  # noqa: PLC0415 - as above
        from fractional_gpu.client.http import ANSWER_S  # noqa: PLC0415 - as above

        token = self._token()
        ensure_broker(self.socket_path, token=token, timeout_s=_REVIVE_TIMEOUT_S, answer_s=ANSWER_S).close()

    def restore_token_file(self) -> None:
        """Restore the token file if it was deleted. Call this only while the lease exists, because ending the lease removes the file."""
        token = _last_read.get(self.token_file)
        if token is None or os.path.lexists(self.token_file):
            return
        from pathlib import Path  # noqa: PLC0415 - as above

        from fractional_gpu.host.files import make_private_folder, replace_file  # noqa: PLC0415 - as above

        path = Path(self.token_file)
        with suppress(OSError):  # at the next command of the broker, this is tried again
            make_private_folder(path.parent)
            # Another user who can write to the folder could replace the file.
            folder = path.parent.lstat()
            if stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid() and not folder.st_mode & 0o022:
                replace_file(path, token.encode("ascii"))

    def _token(self) -> str | None:
        with suppress(OSError, UnicodeDecodeError):
            descriptor = os.open(self.token_file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                token = os.read(descriptor, _MAX_TOKEN).decode("ascii").strip()
            finally:
                os.close(descriptor)
            if token and token.isprintable():
                _last_read[self.token_file] = token
        return _last_read.get(self.token_file)


LOCAL_FAILURES: tuple[type[Exception], ...] = (
    AttributeError,  # replaced functions of the standard library
    ImportError,  # a late import failed after a change of `sys.path` or of files
    LookupError,
    MemoryError,
    OSError,  # no descriptors or no access
    RuntimeError,  # no threads, or a package that forbids sockets
    TypeError,  # replaced functions
    ValueError,  # a closed descriptor
)
_LOCAL_REASONS = frozenset({"no-descriptor", "no-access"})


def is_local(error: Exception) -> bool:
    """Return whether this process, rather than the broker, caused the call to fail."""
    return getattr(error, "reason", None) in _LOCAL_REASONS or isinstance(error, LOCAL_FAILURES)


def describe(error: Exception) -> str:
    return str(error) if hasattr(error, "reason") else f"{type(error).__name__}: {error}"


def explain(error: Exception) -> str:
    if getattr(error, "reason", "") == "unknown-lease":
        from fractional_gpu.protocol.errors import RESTART  # noqa: PLC0415 - off the kernel's start

        return f"An administrator or a command ended this kernel's lease: for a new one {RESTART}."
    return str(error)
