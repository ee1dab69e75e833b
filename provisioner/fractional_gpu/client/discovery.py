"""Finds the broker's socket, and starts a broker on it.

- The socket is `$JUPYTER_GPU_SOCKET`, or else the system service's socket, or else a socket in the user's Jupyter runtime folder. If
  several hosts share that folder (for example, a home on NFS), each host has a subfolder. Clients send connection keys to the socket, so
  only this user or root may have write access to its folder.
- If no broker is running, one is started, except in two cases. A system service is started by its administrator. In a job or pod, no broker
  is started, because it would end with the job or pod. Concurrent starts do not conflict: all succeed once one broker is up.
- A broker writes its start command to `broker.json`, next to the socket and in its state folder. A kernel in another environment uses this
  command to start the next broker from the environment in which the broker is installed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_runtime_dir

from fractional_gpu.client.http import claim_holder, is_service_socket
from fractional_gpu.client.state_folder import is_network, make_own_folder, node_name, state_folder
from fractional_gpu.host.files import foreign_above, make_private_folder, temporary_folder
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.names import SYSTEM_UNIT, refusal

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient

SYSTEM_SOCKET = "/run/jupyter-gpu/broker.sock"
IN_WORKLOAD = "JUPYTER_GPU_BROKER_IN_WORKLOAD"
"""If this variable is `1`, brokers are started automatically even inside a job or a pod."""
_LONGEST_PATH = 100  # bytes; Linux allows 107, and brokers put temporary names next to their sockets
_SIMULATE = "JUPYTER_GPU_SIMULATE"
_PAUSE_S = 0.05
_LOCK_PAUSE_S = 0.01
_RESTART_S = 5.0  # enough for a service to restart and serve again
_LONGEST_COMPLAINT = 2000  # bytes
_LONGEST_SETTINGS = 64 * 1024  # bytes


def runtime_dir() -> Path:
    """Return this host's folder for sockets, token files and kernel records, creating it with mode 0700 if needed.

    Raises BrokerUnavailableError.
    """
    folder = runtime_place()
    if foreign_above(folder) is not None:  # another user owns the home, as with sudo or in a container
        return Path(_short_path(str(folder / "broker.sock"))).parent
    _make_private(folder)
    return folder


def runtime_place() -> Path:
    """Return this host's folder inside Jupyter's runtime folder. It may not exist, or may be owned by another user."""
    try:
        runtime = Path(jupyter_runtime_dir()).absolute()
    except RuntimeError as error:
        raise BrokerUnavailableError(
            f"there is nowhere to put the GPU broker's socket: {error} Set HOME, or JUPYTER_RUNTIME_DIR, to a folder of your own"
        ) from error
    return runtime / (f"gpu-{node_name()}" if is_network(runtime) else "gpu")


def socket_path() -> str:
    """Return the absolute path of the broker's socket, which has at most 100 bytes. Raises BrokerUnavailableError."""
    named = os.environ.get("JUPYTER_GPU_SOCKET", "")
    if named:
        named = str(Path(named).absolute())  # brokers and kernels run in other working folders
        if len(os.fsencode(named)) > _LONGEST_PATH:
            raise BrokerUnavailableError(
                f"JUPYTER_GPU_SOCKET={named} is longer than {_LONGEST_PATH} bytes, which UNIX sockets do not allow; "
                "choose a shorter path"
            )
        return named
    if _is_system_service_there():
        return SYSTEM_SOCKET
    path = str(runtime_dir() / "broker.sock")
    return path if len(os.fsencode(path)) <= _LONGEST_PATH else _short_path(path)


def _is_system_service_there() -> bool:
    """Return whether the machine has a system service.

    There is one if the service's socket, the lock of a stopped service, or the service's unit exists. A file that this process is not
    permitted to access counts as existing. A user's broker must not start before the service or during its restart, because it would take
    the devices, and the service would be unable to start.
    """
    for name in (SYSTEM_SOCKET, f"{SYSTEM_SOCKET}.lock", SYSTEM_UNIT):
        try:
            os.stat(name)  # noqa: PTH116 - without access, `Path.exists` is False or raises, depending on Python's version
        except PermissionError:
            return True
        except OSError:
            continue
        return True
    return False


def ensure_broker(
    socket: str | None = None,
    *,
    token: str | None = None,
    timeout_s: float = 30.0,
    answer_s: float | None = None,
    command: tuple[list[str], dict[str, str]] | None = None,
    simulate: str | None = None,
) -> "BrokerClient":
    """Return a client for the broker on `socket` (by default `socket_path()`), starting a broker if none is running there.

    `timeout_s` is the time limit, in seconds, for starting the broker and for each of the client's calls. `answer_s` is the limit for a
    running broker's first answer (by default `timeout_s`). `command` starts a broker (by default `restart_command`). `simulate` describes
    the simulated devices of a newly started broker, if the environment doesn't describe any. This function blocks, so an event loop must
    call it in a thread. Raises BrokerUnavailableError.
    """
    path = socket if socket is not None else socket_path()
    _check_folder_if_there(path)
    client = _new_client(path, token, timeout_s)
    try:
        if not _answers(client, timeout_s if answer_s is None else answer_s):
            if not _came_back(client, timeout_s):
                if command is None:
                    _check_may_start(path)
                if simulate and command is None and not os.environ.get(_SIMULATE) and restart_command(path) is None:
                    command = _start_command(path)[0], {_SIMULATE: simulate}
                _start_once(client, timeout_s, command)
            check_folder(path)
            client.ping()
    except BaseException:
        client.close()
        raise
    return client


def unstarted_broker(*, token: str | None = None, timeout_s: float = 30.0) -> "BrokerClient":
    """Return a client for the broker on `socket_path()` without starting a broker.

    Raises BrokerUnavailableError if the folder is unsafe.
    """
    path = socket_path()
    check_folder(path)
    return _new_client(path, token, timeout_s)


def _new_client(path: str, token: str | None, timeout_s: float) -> "BrokerClient":
    # Imported here because code that starts a broker needs no client, and a kernel's start waits for this import.
    from fractional_gpu.client.client import BrokerClient  # noqa: PLC0415

    return BrokerClient(path, token=token, timeout_s=timeout_s)


def _check_may_start(path: str) -> None:
    """Raise BrokerUnavailableError if this process must not start a broker.

    It must not do so on a service's socket, or in a job or pod that could end in the middle of a suspend and kill the broker.
    """
    if _is_service(path):
        raise BrokerUnavailableError(
            f"the GPU broker at {path} is a system service that is not running; "
            "an administrator must start it (`sudo systemctl enable --now jupyter-gpu`; on Kubernetes, its DaemonSet), or, if "
            "a broker is no longer wanted, remove its unit and folder"
        )
    if os.environ.get(IN_WORKLOAD) == "1":
        return
    from fractional_gpu.host.workload import own_workload  # noqa: PLC0415 - only if none serves

    if name := own_workload(os.environ):
        raise BrokerUnavailableError(
            f"no GPU broker is running at {path}, and none is started inside {name}, because the broker would end when {name} ends, "
            f"perhaps in the middle of a suspend. An administrator must start the node's broker (`jupyter gpu broker --service`), which "
            f"serves all its jobs and pods, and JUPYTER_GPU_SOCKET must be set to its socket. If no other job or pod "
            f"uses the GPUs of {name}, set {IN_WORKLOAD}=1 to start a broker in it",
            reason="in-workload",
        )


def _is_service(path: str) -> bool:
    """Return whether the socket belongs to a service, or is in a root-owned folder that this user cannot write to."""
    try:
        return is_service_socket(path) or Path(path).absolute().parent.stat().st_uid == 0 != os.geteuid()
    except OSError:
        return False


def _answers(client: "BrokerClient", answer_s: float) -> bool:
    """Return whether a broker answers on the socket. Return False only if no process is listening on it.

    Raises BrokerUnavailableError if the broker hangs or is incompatible.
    """
    try:
        pong = client.ping(answer_s)
    except BrokerUnavailableError as error:
        if error.reason in {"no-broker", "hung-up"} and not isinstance(error.__cause__, PermissionError):
            return False
        raise
    if why := refusal(broker=f"{pong.version}; protocol={pong.protocol}"):
        raise BrokerUnavailableError(f"{why} (its socket is {client.socket_path})", reason="version")
    return True


def _check_folder_if_there(path: str) -> None:
    """Check the socket's folder if it exists.

    A missing folder is not an error if a running broker, or the next one, will recreate it.
    """
    try:
        check_folder(path)
    except BrokerUnavailableError as error:
        gone = isinstance(error.__cause__, FileNotFoundError)
        if not gone or not (claim_holder(path) is not None or spare_restart_file(path).exists()):
            raise


def _came_back(client: "BrokerClient", timeout_s: float) -> bool:
    """Wait while a broker starts, exits or restores its deleted socket, or a service restarts. Return whether a broker is reachable.

    Raises BrokerUnavailableError, with a message that names the process, if the broker remains unreachable.
    """
    path, begun_s = client.socket_path, time.monotonic()
    deadline_s, restarts_until_s = begun_s + timeout_s, begun_s + min(timeout_s, _RESTART_S if _is_service(path) else 0)
    while (holder := claim_holder(path)) is not None or time.monotonic() < restarts_until_s:
        if holder is not None and time.monotonic() > deadline_s:
            raise BrokerUnavailableError(
                f"the GPU broker at {path} is running (process {holder}), but its socket was deleted and not restored within "
                f"{timeout_s:g} s; see its log. `jupyter gpu broker --restart --socket {path}` restarts it; kernels lose nothing"
            )
        time.sleep(_PAUSE_S)
        if _answers(client, timeout_s):
            return True
    return False


def _start_once(client: "BrokerClient", timeout_s: float, command: tuple[list[str], dict[str, str]] | None) -> None:
    """Start a broker, unless another thread or process is already starting one. Concurrent starts would slow each other down."""
    path, deadline_s = client.socket_path, time.monotonic() + timeout_s
    try:
        folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # the folder was deleted, and the broker creates it again
        _start(path, timeout_s, command)
        return
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            while time.monotonic() < deadline_s:  # a stopped starter keeps the lock
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_PAUSE_S)
        if not _answers(client, timeout_s):
            _start(path, timeout_s, command)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
        os.close(folder)


def _start(path: str, timeout_s: float, command: tuple[list[str], dict[str, str]] | None = None) -> None:
    """Run the start command, which exits once a broker accepts connections. Raises BrokerUnavailableError."""
    argv, environment = command or _start_command(path)
    # The file is in memory, because the disk may be full. It is not a pipe, because the broker may keep its end open.
    with os.fdopen(os.memfd_create("gpu-start"), "r+b") as complaint:
        try:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **environment, "JUPYTER_GPU_SOCKET": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaint,
                start_new_session=True,  # Ctrl-C in the notebook or the terminal must not reach the broker
            )
        except OSError as error:
            raise BrokerUnavailableError(
                f"the GPU broker could not be started: {argv[0]}: {error.strerror}; if its Python environment was removed, "
                f"delete {restart_file(path)}"
            ) from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BrokerUnavailableError(
                f"the GPU broker at {path} did not start within {timeout_s:g} s; run `jupyter gpu broker` to see why"
            ) from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code != 0:
            complaint.seek(0)
            lines = complaint.read()[-_LONGEST_COMPLAINT:].decode(errors="replace").strip().splitlines()
            nothing = f"the GPU broker could not be started (exit code {code}); run `jupyter gpu broker` to see why"
            raise BrokerUnavailableError(lines[-1].strip().removeprefix("jupyter gpu broker: ") if lines else nothing)


def restart_file(path: str) -> Path:
    """Return the file in which this socket's broker records how to restart it. The file exists while leases may be active."""
    return Path(path).with_name("broker.json")


def spare_restart_file(path: str) -> Path:
    """Return the path of a second copy of the restart file. It is needed because the system may empty the socket's folder."""
    return state_folder(path) / "broker.json"


def has_restart_file(path: str) -> bool:
    """Return whether this socket's broker crashed, or exited while leases were active."""
    return restart_file(path).exists() or spare_restart_file(path).exists()


def _start_command(path: str) -> tuple[list[str], dict[str, str]]:
    # `jupyter gpu broker --detach`, without the import of the command line parser.
    default = [sys.executable, "-P", "-m", "fractional_gpu.broker", "--detach", json.dumps({"socket": path})]
    return restart_command(path) or (default, {})


def restart_command(path: str) -> tuple[list[str], dict[str, str]] | None:
    """Return the command and the environment recorded by this socket's last broker, or None.

    Raises BrokerUnavailableError.
    """
    return _read_restart_file(restart_file(path)) or _read_restart_file(spare_restart_file(path))


def _read_restart_file(settings: Path) -> tuple[list[str], dict[str, str]] | None:
    try:
        descriptor = os.open(settings, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BrokerUnavailableError(
            f"{settings} cannot be read ({error.strerror}); delete it and try again"
        ) from error
    try:
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid in {os.geteuid(), 0}
        # At most one link, since a second name could be in someone else's folder. The count is 0 while the file is being replaced.
        if not ours or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_nlink > 1:
            raise BrokerUnavailableError(
                f"{settings} contains the command that starts the GPU broker, but another user could have written it. It must be a regular "
                "file that belongs to you or root and that only its owner can write to. Delete it or fix its permissions"
            )
        text = os.read(descriptor, _LONGEST_SETTINGS)
    finally:
        os.close(descriptor)
    try:
        content = json.loads(text)
        argv, environment = content["argv"], content.get("env", {})
        sound = bool(argv) and all(
            isinstance(word, str) for word in [*argv, *environment.keys(), *environment.values()]
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise BrokerUnavailableError(
            f'{settings} is not of the form {{"argv": ["..."], "env": {{"NAME": "value"}}}}; delete it and try again'
        )
    return list(argv), dict(environment)


def check_folder(path: str) -> None:
    """Raise BrokerUnavailableError if another user could have created the socket. Sockets in /run are safe: only root can write there."""
    folder = Path(path).absolute().parent
    if is_service_socket(path):
        return
    try:
        link, status = folder.lstat(), folder.stat()
    except OSError as error:
        raise BrokerUnavailableError(
            f"cannot use the folder of the GPU broker's socket, {folder}: {error.strerror}"
        ) from error
    foreign = next((one.st_uid for one in (link, status) if one.st_uid not in {os.geteuid(), 0}), None)
    if foreign is not None:
        raise BrokerUnavailableError(
            f"the folder of the GPU broker's socket, {folder}, belongs to another user (uid {foreign}); "
            "set JUPYTER_GPU_SOCKET to a path in a folder that you own, or under /run for a system service"
        )
    check_above(folder)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BrokerUnavailableError(
            f"other users can write to the folder of the GPU broker's socket, {folder} (mode "
            f"{stat.S_IMODE(status.st_mode):04o}); "
            "set JUPYTER_GPU_SOCKET to a path in a folder that only you can write to"
        )


def check_reachable(path: str) -> None:
    """Raise BrokerUnavailableError if other users cannot enter the socket's folder.

    A missing folder is accepted, because this package creates it with access for all users.
    """
    folder = Path(path).absolute().parent
    for one in (folder, *folder.parents):
        if one.exists() and not one.stat().st_mode & stat.S_IXOTH:
            raise BrokerUnavailableError(
                f"users cannot enter {one}, so they could not reach the service's socket in {folder}; choose another socket, such as "
                f"{SYSTEM_SOCKET}, or let them enter (chmod o+x {one})"
            )


def check_above(folder: Path) -> None:
    """Raise BrokerUnavailableError if another user could replace the folder. The folder need not exist."""
    if (found := foreign_above(folder)) is not None:
        above, uid = found
        raise BrokerUnavailableError(
            f"the folder of the GPU broker's socket, {folder}, is inside {above}, which belongs to another user (uid {uid}), who could "
            "replace it; set JUPYTER_GPU_SOCKET to a path in which every folder belongs to you or root"
        )


def _make_private(folder: Path) -> None:
    try:
        make_private_folder(folder.parent)
        wrong = make_own_folder(folder)
    except OSError as error:
        wrong = f"cannot be created: {error.strerror}"
    if wrong:
        raise BrokerUnavailableError(
            f"the folder {folder} for the GPU broker's socket and tokens {wrong}; remove it, or set JUPYTER_RUNTIME_DIR to a folder that "
            "you own"
        )


def _short_path(path: str) -> str:
    """Return the path of a socket in a short private folder whose name is derived from `path`."""
    name = f"jupyter-gpu-{os.geteuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    for parent in (temporary_folder(), Path("/tmp")):  # noqa: S108 - we check that it is this user's and private
        short = parent / name / "broker.sock"
        if len(os.fsencode(str(short))) <= _LONGEST_PATH:
            _make_private(short.parent)
            return str(short)
    raise AssertionError("bug: even the socket's path in /tmp is too long for a UNIX socket")
