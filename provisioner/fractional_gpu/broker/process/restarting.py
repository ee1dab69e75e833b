"""The options of a broker, and the file `broker.json` with the command that starts it again in the same way.

The file is beside the socket, where clients of every version read it, and in the state folder, which no cleaner empties.
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
    """The options of `jupyter gpu broker`; None means the configured or default value."""

    socket: str | None = None
    config_file: str | None = None
    simulate: str | None = None
    detach: bool = False
    idle_exit: str | None = None
    state_dir: str | None = None
    log_level: str | None = None
    settings: str | None = None  # JSON: settings by their names, which win over the files
    stand_by: bool = False  # if another broker serves, wait for its end and serve then


class RestartFiles:
    """`broker.json` in both places, with the options of the running broker."""

    def __init__(self, options: BrokerOptions, socket: str) -> None:
        self._socket = socket
        self._beside, self._spare = restart_file(socket), spare_restart_file(socket)
        self._text = json.dumps(_content(options, socket)).encode()
        self._spare_failed = ""

    def write(self) -> None:
        """Write both; they replace an earlier broker's. Raises OSError if the one beside the socket cannot be written."""
        replace_file(self._beside, self._text)
        self._write_spare()

    def put_back(self) -> bool:
        """Write the missing ones; return whether one was missing. Raises OSError."""
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
                log.warning("broker.json is beside the socket only, not in the state folder: %s", error)
            self._spare_failed = str(error)
            return False
        return True

    def remove(self) -> None:
        """Remove both: no lease is left for which the broker would have to start again."""
        for path in (self._beside, self._spare):
            with suppress(OSError):
                path.unlink()


def _content(options: BrokerOptions, socket: str) -> dict[str, object]:
    # A starter wants to know at once whether a broker serves, so it must not stand by.
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
