"""What the kernel was told at its start, and how it reaches its broker.

The environment is read once, at load: a cell that changes `os.environ` does not move the kernel to another broker. The token is
read from its file at each connection, because a broker may have renewed it; where the file was deleted, the token that was read last
counts, and the file is put back for other programs (the next server's, above all). Everything that costs import time (the client, the
messages) is imported when the first connection is made, never when the kernel starts.
"""

import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient

__all__ = ["NOTICE", "Settings"]

LEASE = "JUPYTER_GPU_LEASE"
SOCKET = "JUPYTER_GPU_SOCKET"
TOKEN_FILE = "JUPYTER_GPU_TOKEN_FILE"  # noqa: S105 - the name of a variable that holds a path
NOTICE = "JUPYTER_GPU_NOTICE"

_MAX_TOKEN = 1024
_seen: dict[str, str] = {}  # tokens by their files
_REVIVE_TIMEOUT_S = 30.0


class Settings(NamedTuple):  # a frozen dataclass takes half a millisecond longer to define, at each kernel's start
    """One lease, and where its broker listens."""

    lease_id: str
    socket_path: str
    token_file: str

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "Settings | None":
        """Return the settings, or None where the kernel has no lease (one of the three variables is missing or empty)."""
        lease_id, socket_path, token_file = (environment.get(name, "") for name in (LEASE, SOCKET, TOKEN_FILE))
        if not (lease_id and socket_path and token_file):
            return None
        return Settings(lease_id, socket_path, token_file)

    def connect(self, timeout_s: float = 30.0) -> "BrokerClient":
        """Return a client with the lease's token; nothing is sent yet.

        Where the token's file is gone or damaged, and was never read, the client has none: the broker then knows the kernel by its
        process.
        """
        from fractional_gpu.client.client import BrokerClient  # noqa: PLC0415 - costs time that a starting kernel does not have

        return BrokerClient(self.socket_path, token=self._token(), timeout_s=timeout_s)

    def revive(self) -> None:
        """Start the broker if none serves; returns when one does. Blocks up to 30 s.

        Raises BrokerUnavailableError, with the reason "timeout" after 5 s for a broker that is there and does not answer.
        """
        from fractional_gpu.client.broker_process import ANSWER_S  # noqa: PLC0415 - as above
        from fractional_gpu.client.discovery import ensure_broker  # noqa: PLC0415 - as above

        token = self._token()
        ensure_broker(self.socket_path, token=token, timeout_s=_REVIVE_TIMEOUT_S, answer_s=ANSWER_S).close()

    def look_after_token(self) -> None:
        """Put the token's file back if it was deleted. For a lease that is known to live: the end of one takes the file along."""
        token = _seen.get(self.token_file)
        if token is None or os.path.lexists(self.token_file):
            return
        from pathlib import Path  # noqa: PLC0415 - as above

        from fractional_gpu.host.files import replace_file  # noqa: PLC0415 - as above

        path = Path(self.token_file)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = path.parent.lstat()
            if stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid() and not folder.st_mode & 0o022:
                replace_file(path, token.encode("ascii"))
        except OSError:
            return  # the next word of the broker is another occasion

    def _token(self) -> str | None:
        try:
            descriptor = os.open(self.token_file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                token = os.read(descriptor, _MAX_TOKEN).decode("ascii").strip()
            finally:
                os.close(descriptor)
        except (OSError, UnicodeDecodeError):
            return _seen.get(self.token_file)
        if not token or not token.isprintable():
            return _seen.get(self.token_file)
        _seen[self.token_file] = token
        return token
