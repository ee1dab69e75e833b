"""How a broker is started, and what it leaves behind so that it can be started again in the same way.

`broker.json` lies beside the socket, where clients of every version look for it, and in the state folder, which no cleaner empties.
"""

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from fractional_gpu.client.discovery import restart_file, spare_restart_file
from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.host.files import replace_file
from fractional_gpu.protocol.errors import BrokerUnavailableError

__all__ = ["NOT_INHERITED", "BrokerOptions", "RestartFiles"]

log = logging.getLogger(__name__)

_RESTART_ENVIRONMENT = ("JUPYTER_", "PYTHON", "XDG_")
NOT_INHERITED = (
    "JUPYTER_GPU_LEASE",
    "JUPYTER_GPU_TOKEN_FILE",
    "JUPYTER_GPU_NOTICE",
    "JUPYTER_GPU_SEAT_FILE",
    "JUPYTER_GPU_MEMORY_MIB",
    "JUPYTER_GPU_DEVICE_MIB",
    "JUPYTER_GPU_CONTEXT_MIB",
    "JUPYTER_GPU_SIMULATED_DEVICE",
    "JPY_PARENT_PID",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """What `jupyter gpu broker` was told; None means the configured or default value."""

    socket: str | None = None
    config_file: str | None = None
    simulate: str | None = None
    detach: bool = False
    idle_exit: str | None = None
    state_dir: str | None = None
    log_level: str | None = None
    settings: str | None = None  # JSON: settings by their names, which win over the files
    stand_by: bool = False  # where another broker serves, wait until it ends, and serve then


class RestartFiles:
    """`broker.json` in both places. It is made when the broker starts, with its options as they were given and found."""

    def __init__(self, options: BrokerOptions, socket: str) -> None:
        self._socket = socket
        self._beside, self._spare = restart_file(socket), spare_restart_file(socket)
        self._text = json.dumps(_content(options, socket)).encode()
        self._spare_failed = ""

    def write(self) -> None:
        """Write both, in place of an earlier broker's. Raises OSError where it cannot be written beside the socket."""
        replace_file(self._beside, self._text)
        self._write_spare()

    def put_back(self) -> bool:
        """Write what is not there; return whether that was anything. Raises OSError."""
        gone = not os.path.lexists(self._beside)
        if gone:
            replace_file(self._beside, self._text)
        return (not os.path.lexists(self._spare) and self._write_spare()) or gone

    def _write_spare(self) -> bool:
        try:
            make_state_folder(self._socket)
            replace_file(self._spare, self._text)
        except (OSError, BrokerUnavailableError) as error:
            if str(error) != self._spare_failed:
                log.warning("how to start this broker again is written beside its socket only: %s", error)
            self._spare_failed = str(error)
            return False
        return True

    def remove(self) -> None:
        """Leave nothing to be started again: no lease is left."""
        for path in (self._beside, self._spare):
            with suppress(OSError):
                path.unlink()


def _content(options: BrokerOptions, socket: str) -> dict[str, object]:
    # Whoever starts it again wants to know at once that a broker serves.
    argument = {name: value for name, value in asdict(replace(options, stand_by=False)).items() if value is not None}
    return {
        "argv": [
            sys.executable,
            "-P",
            "-m",
            "fractional_gpu.broker",
            "--detach",
            json.dumps({**argument, "socket": socket}),
        ],
        "env": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_RESTART_ENVIRONMENT) and name not in NOT_INHERITED
        },
    }
