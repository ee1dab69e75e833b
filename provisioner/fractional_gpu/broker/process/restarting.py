"""Restarts or detaches a broker. Defines its options, and the file `broker.json`, which contains the command to start it.

The file is kept next to the socket, where clients read it, and in the state folder, which is not cleaned out automatically.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fractional_gpu.client.discovery import (
    SYSTEM_SOCKET,
    check_above,
    check_folder,
    check_reachable,
    restart_file,
    socket_path,
    spare_restart_file,
)
from fractional_gpu.client.http import is_service_socket
from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.gpu import driver_environment
from fractional_gpu.host.files import make_private_folder, open_own, replace_file
from fractional_gpu.host.workload import own_workload, serves_whole_host
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError

log = logging.getLogger(__name__)
_COMMAND = (sys.executable, "-P", "-m", "fractional_gpu.broker")

# These variables decide where the broker finds its code, configuration, folders and devices. `broker.json` keeps only these, because the
# environment contains secrets, such as JUPYTER_TOKEN.
KEPT_VARIABLES = (
    "JUPYTER_CONFIG_DIR", "JUPYTER_CONFIG_PATH", "JUPYTER_DATA_DIR", "JUPYTER_GPU_SIMULATE", "JUPYTER_NO_CONFIG",
    "JUPYTER_PLATFORM_DIRS", "JUPYTER_PREFER_ENV_PATH", "JUPYTER_RUNTIME_DIR",
    "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONPATH", "PYTHONUSERBASE",
    "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
)  # fmt: skip
# What a broker does not inherit from the kernel, server or command that starts it, in addition to what changes CUDA's driver.
NOT_INHERITED = {
    "JUPYTER_GPU_CLAIM", "JUPYTER_GPU_LEASE", "JUPYTER_GPU_TOKEN_FILE", "JUPYTER_GPU_NOTICE", "JUPYTER_GPU_SEAT_FILE", "JUPYTER_GPU_KIND",
    "JUPYTER_GPU_MEMORY_FRACTION", "JUPYTER_GPU_MEMORY_MIB", "JUPYTER_GPU_DEVICE_MIB", "JUPYTER_GPU_CONTEXT_MIB",
    "JUPYTER_GPU_CAP", "JUPYTER_GPU_CHECKPOINT_JOB", "JUPYTER_GPU_SIMULATED_DEVICE", "JPY_PARENT_PID", driver_environment.PRELOADED_FOR_US,
    "NOTIFY_SOCKET", "TMPDIR", "TEMP", "TMP",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    socket: str | None = None
    config_file: str | None = None
    simulate: str | None = None
    detach: bool = False  # in the background, with a log next to the socket
    idle_exit: str | None = None
    state_dir: str | None = None
    log_level: str | None = None
    settings: str | None = None  # JSON object of settings, which override the configuration files
    service: bool = False  # serves all users of the machine, does not end when idle, and runs outside jobs and pods
    stand_by: bool = False  # whether to wait for the end of a broker that serves already, and then serve
    worker_socket: str | None = None  # of the service that starts the checkpoint worker; if None, the broker starts it


def write_restart_files(options: BrokerOptions, socket: str) -> None:
    """Write `broker.json` next to the socket and in the state folder. Raises OSError if the file next to the socket cannot be written."""
    # A program that starts a broker wants to know at once whether one serves, so the broker must not stand by.
    started = asdict(replace(options, detach=False, stand_by=False, socket=socket))
    argument = json.dumps({name: value for name, value in started.items() if value is not None})
    content = {"argv": [*_COMMAND, "--detach", argument], "env": kept_environment(os.environ)}
    text = json.dumps(content).encode()
    replace_file(restart_file(socket), text)
    try:
        make_state_folder(socket)
        replace_file(spare_restart_file(socket), text)
    except (OSError, BrokerUnavailableError) as error:
        log.warning("cannot write broker.json to the state folder, only next to the socket: %s", error)


def remove_restart_files(socket: str) -> None:
    for path in (restart_file(socket), spare_restart_file(socket)):
        with suppress(OSError):
            path.unlink()


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in KEPT_VARIABLES if name in environment}


# A kernel's first start waits for this code, so it imports little. The new broker reports success or an error through a pipe.


def resolved(options: BrokerOptions) -> BrokerOptions:
    # A detached broker runs in /.
    config_file = str(Path(options.config_file).absolute()) if options.config_file else None
    service = options.service and not os.environ.get("JUPYTER_GPU_SOCKET")
    socket = options.socket or (SYSTEM_SOCKET if service else socket_path())
    return replace(
        options,
        config_file=config_file,
        socket=str(Path(socket).absolute()),
        worker_socket=str(Path(options.worker_socket).absolute()) if options.worker_socket else None,
        simulate=options.simulate or os.environ.get("JUPYTER_GPU_SIMULATE") or None,
    )


def start_detached(options: BrokerOptions) -> int:
    """Start a broker, and return 0 once a broker accepts connections on the socket. Otherwise print the reason to stderr and return 1."""
    try:
        options = resolved(options)
        socket = options.socket or ""
        make_socket_folder(socket, service=options.service)  # before anything is written to it
        said, process = _started(replace(options, detach=True), socket)
    except FractionalGPUError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(cannot_run(options.socket or "its socket", error))
    if said == "ready":
        process.returncode = 0  # it continues to run, and Popen would warn about that
        return 0
    process.wait()
    where = Path(socket).with_name("broker.err")
    return _failed(said or f"the broker ended immediately; check {where}")


def serves_everyone(socket: str) -> bool:
    return os.getuid() == 0 and Path(socket).absolute().parent == Path(SYSTEM_SOCKET).parent


def make_socket_folder(socket: str, *, service: bool = False) -> None:
    """Create and check the socket's folder. Raises OSError.

    With `service`, give all users access to the folder, and refuse to run inside a job or pod.
    """
    if service:
        _check_service()
    # All users share the folder of a system service. The modes of its other files keep them private.
    if not is_service_socket(socket):
        check_above(Path(socket).absolute().parent)
    folder = Path(socket).absolute().parent
    made = not folder.exists()
    if is_service_socket(socket) and not made and not os.access(folder, os.W_OK):
        raise BrokerUnavailableError(
            f"{socket} is the socket of a system service, which an administrator starts; to run your own broker, choose another socket "
            "with --socket"
        )
    if service or serves_everyone(socket):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    else:
        make_private_folder(folder)
    if made and service:
        folder.chmod(0o755)  # whatever the umask is
    check_folder(socket)
    if service:
        check_reachable(socket)


def _check_service() -> None:
    if os.geteuid() != 0:
        raise BrokerUnavailableError(
            f"a broker that serves all users of the machine must run as root, but this is uid {os.geteuid()}: start it with "
            "systemd (docs/operating.md), or leave out --service to run your own broker"
        )
    name = own_workload(os.environ)
    if name and (name.startswith("Slurm") or not serves_whole_host()):
        raise BrokerUnavailableError(
            f"this is {name}: the node's broker must not run in a job or pod, which could end it during a suspend; "
            "start it outside (with systemd, docs/operating.md), or in a DaemonSet's pod with hostPID"
        )


def cannot_run(socket: str, error: OSError) -> str:
    return f"the broker cannot run on {socket}: {error}; fix this, or choose another place with --socket or JUPYTER_GPU_SOCKET"


def _started(options: BrokerOptions, socket: str) -> tuple[str, subprocess.Popen[bytes]]:
    reader, writer = os.pipe()
    with os.fdopen(reader) as report:
        errors, flags = Path(socket).with_name("broker.err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(writer, "w"), os.fdopen(open_own(errors, flags), "w") as log_file:
            process = subprocess.Popen(
                [*_COMMAND, json.dumps({**asdict(options), "ready_fd": writer})],
                env=driver_environment.cleaned({name: os.environ[name] for name in os.environ.keys() - NOT_INHERITED}),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(writer,),
                start_new_session=True,
                cwd="/",
            )
        return report.read().strip(), process


def _failed(sentence: str) -> int:
    sys.stderr.write(f"jupyter gpu broker: {sentence}\n")
    return 1
