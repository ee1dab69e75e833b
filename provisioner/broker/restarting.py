"""How a broker is started, and what it leaves behind so that it can be started again in the same way.

`broker.json` lies beside the socket, where clients of every version look for it, and in the state folder, which no cleaner empties.
"""

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from provisioner.discovery import restart_file, spare_restart_file
from provisioner.files import replace_file
from provisioner.protocol.errors import BrokerUnavailableError
from provisioner.state_folder import make_state_folder

__all__ = ["NOT_INHERITED", "BrokerOptions", "remove_restart_files", "write_restart_files"]

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


def write_restart_files(options: BrokerOptions, socket: str) -> None:
    """Write how to start this broker again. Raises OSError where it cannot be written beside the socket."""
    # Whoever starts it again wants to know at once that a broker serves.
    argument = {name: value for name, value in asdict(replace(options, stand_by=False)).items() if value is not None}
    content = {
        "argv": [
            sys.executable,
            "-P",
            "-m",
            "provisioner.broker",
            "--detach",
            json.dumps({**argument, "socket": socket}),
        ],
        "env": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_RESTART_ENVIRONMENT) and name not in NOT_INHERITED
        },
    }
    text = json.dumps(content).encode()
    replace_file(restart_file(socket), text)
    try:
        make_state_folder(socket)
        replace_file(spare_restart_file(socket), text)
    except (OSError, BrokerUnavailableError) as error:
        log.warning("how to start this broker again is written beside its socket only: %s", error)


def remove_restart_files(socket: str) -> None:
    """Leave nothing to be started again: no lease is left."""
    for path in (restart_file(socket), spare_restart_file(socket)):
        with suppress(OSError):
            path.unlink()
