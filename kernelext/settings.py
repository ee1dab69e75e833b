"""What the kernel was told at its start, and how it reaches its broker.

The environment is read once, at load: a cell that changes `os.environ` does not move the kernel to another broker. The token is
read from its file at each connection, because a broker may have renewed it. Everything that costs import time (the client, the
messages) is imported when the first connection is made, never when the kernel starts.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from provisioner.client import BrokerClient

__all__ = ["NOTICE", "Settings"]

LEASE = "JUPYTER_GPU_LEASE"
SOCKET = "JUPYTER_GPU_SOCKET"
TOKEN_FILE = "JUPYTER_GPU_TOKEN_FILE"  # noqa: S105 - the name of a variable that holds a path
NOTICE = "JUPYTER_GPU_NOTICE"

_MAX_TOKEN = 1024
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

        Where the token's file is gone or damaged, the client has none: the broker then knows the kernel by its process.
        """
        from provisioner.client import BrokerClient  # noqa: PLC0415 - costs time that a starting kernel does not have

        return BrokerClient(self.socket_path, token=self._token(), timeout_s=timeout_s)

    def revive(self) -> None:
        """Start the broker if none serves; returns when one does. Blocks up to 30 s.

        Raises BrokerUnavailableError, with the reason "timeout" after 5 s for a broker that is there and does not answer.
        """
        from provisioner.broker_process import ANSWER_S  # noqa: PLC0415 - as above
        from provisioner.discovery import ensure_broker  # noqa: PLC0415 - as above

        token = self._token()
        ensure_broker(self.socket_path, token=token, timeout_s=_REVIVE_TIMEOUT_S, answer_s=ANSWER_S).close()

    def _token(self) -> str | None:
        try:
            descriptor = os.open(self.token_file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                token = os.read(descriptor, _MAX_TOKEN).decode("ascii").strip()
            finally:
                os.close(descriptor)
        except (OSError, UnicodeDecodeError):
            return None
        return token if token and token.isprintable() else None
