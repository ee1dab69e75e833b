"""Sets up a hub from `jupyterhub_config.py`: the pools, the broker as a managed service, and the spawner.

    from fractional_gpu_hub import configure
    configure(c, spawner="fractional-gpu-local", pools={"default": {"fractions": ["1/4", "1/2"], "wait_bound": "10%"}})

Invalid settings stop the hub at startup. The error names the key, its value and the allowed values. If the hub runs as root, the broker
serves all users of the machine at `/run/jupyter-gpu/broker.sock` and keeps its ledger in `/var/lib/jupyter-gpu`. Otherwise, both are in the
Jupyter folders of the user running the hub. If a system broker is running, the hub uses it, and the pools are set in its configuration.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_data_dir
from traitlets.config import Config
from traitlets.log import get_logger

from fractional_gpu.client.discovery import SYSTEM_SOCKET, check_reachable, restart_file, runtime_dir
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.client.state_folder import SERVICE_STATE, is_network
from fractional_gpu.config import ConfigError, load
from fractional_gpu.jupyter.kernel_command import SIMULATED
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu_hub.base import GPUChoiceMixin
from fractional_gpu_hub.engines import EngineGPUMixin
from fractional_gpu_hub.mixin import FractionalGPUMixin
from fractional_gpu_hub.seats import BROKER_SERVICE, expect_service, start_with_hub

SPAWNERS = ("fractional-gpu-local", "fractional-gpu-simple", "fractional-gpu-systemd", "fractional-gpu-docker")
_WHERE = "jupyterhub_config.py"
_LONGEST_PATH = 100  # in bytes, as for every socket of the broker
_ROOT_AND_SIMPLE = (
    f"{_WHERE}: spawner = 'fractional-gpu-simple': this hub runs as root, so its users' servers would too. Each of them could "
    "administer the GPU broker and the machine, and Jupyter does not start as root by default. Set spawner='fractional-gpu-local', "
    "which runs servers as the machine's users; or run the hub as another user; or, just to try it out, set c.Spawner.args = "
    "['--allow-root']"
)


def configure(
    c: Config,
    *,
    spawner: str | type = "fractional-gpu-local",
    pools: Mapping[str, Any] | None = None,
    broker: str = "auto",
    socket: str | None = None,
    config_file: str | None = None,
    simulate: str | None = None,
    **settings: Any,  # noqa: ANN401 - every setting has its own type
) -> None:
    """Set up the hub. Raises ConfigError.

    `spawner` is one of `SPAWNERS`, or the registered name or class of another spawner that uses the mixin. `pools` and the other `settings`
    configure the broker and override `jupyter_gpu_config.py`. Set `broker` to `managed` to have the hub run the broker, to `system` if a
    system broker is already running, or to `auto`. `socket` is the path of the broker's socket. `simulate` replaces the hardware with
    simulated devices, such as `2x80GiB`.
    """
    kind = _registered(spawner) if isinstance(spawner, str) else spawner
    if issubclass(kind, EngineGPUMixin):
        name = spawner if isinstance(spawner, str) else spawner.__name__
        raise ConfigError(
            f"{_WHERE}: spawner = {name!r}: its servers get their GPUs from the cluster's nodes, so the hub needs no broker; remove "
            f"configure(...), and set c.JupyterHub.spawner_class = {name!r} and its own settings (docs/hub.md, A cluster)"
        )
    if simulate is not None and SIMULATED.fullmatch(simulate) is None:
        raise ConfigError(
            f"{_WHERE}: simulate = {simulate!r}: expected COUNTxMEMORY such as '2x8GiB' or '2x80GiB,1x40GiB'"
        )
    if broker not in {"auto", "managed", "system"}:
        raise ConfigError(f"{_WHERE}: broker = {broker!r}: expected 'auto', 'managed' or 'system'")
    if not isinstance(socket, str | None):
        raise ConfigError(f"{_WHERE}: socket = {socket!r}: expected the path of the broker's socket, as a string")
    path = socket or _socket(broker)
    if broker == "system" or (broker == "auto" and socket is None and _is_system_service(path)):
        broker_only = {"pools": pools, "config_file": config_file, "simulate": simulate}
        _check_system(path, [*(name for name, value in broker_only.items() if value is not None), *sorted(settings)])
    else:
        given = {**settings, **({"pools": dict(pools)} if pools is not None else {})}
        everyone = _is_root() and getattr(kind, "gpu_user_ids", None) is not FractionalGPUMixin.gpu_user_ids
        _add_service(c, path, given, config_file=config_file, simulate=simulate, everyone=everyone)
    if spawner == "fractional-gpu-simple" and _is_root():
        get_logger().warning(_ROOT_AND_SIMPLE)
    start_with_hub(path)
    c.FractionalGPUMixin.gpu_socket = path
    c.JupyterHub.spawner_class = spawner


def _registered(name: str) -> type:
    registered = entry_points(group="jupyterhub.spawners")
    if name not in registered.names:
        raise ConfigError(
            f"{_WHERE}: spawner = {name!r}: expected {', '.join(SPAWNERS)}, a class with FractionalGPUMixin, or the name of such a "
            "class that a package registers (entry points `jupyterhub.spawners`)"
        )
    try:
        kind = registered[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{_WHERE}: spawner = {name!r}: {registered[name].value} could not be imported: {error}"
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, GPUChoiceMixin)):
        raise ConfigError(
            f"{_WHERE}: spawner = {name!r}: {registered[name].value} does not extend FractionalGPUMixin; choose "
            f"{', '.join(SPAWNERS)}, or a spawner that does"
        )
    return kind


def _socket(broker: str) -> str:
    if broker == "system" or _is_root():
        return SYSTEM_SOCKET
    try:
        return (
            str(runtime_dir() / "hub" / "broker.sock")
            if broker == "managed" or not _answers(SYSTEM_SOCKET)
            else SYSTEM_SOCKET
        )
    except FractionalGPUError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error


def _is_root() -> bool:
    return os.geteuid() == 0


def _answers(path: str) -> bool:
    try:
        with SeatClient(path, timeout_s=5) as client:
            client.ping()
    except FractionalGPUError:
        return False
    return True


def _is_system_service(path: str) -> bool:
    """Return whether a broker that this hub did not start is listening on the socket at `path`."""
    if path != SYSTEM_SOCKET or not _answers(path):
        return False
    try:
        argument = json.loads(json.loads(restart_file(path).read_text())["argv"][-1])
    except (OSError, ValueError, LookupError, TypeError):
        return True  # this hub may not read it, or no hub wrote it
    return not (isinstance(argument, dict) and argument.get("settings"))


def _check_system(path: str, given: Sequence[str]) -> None:
    if given:
        raise ConfigError(
            f"{_WHERE}: {', '.join(given)} was given, but a system broker is serving on {path} and reads its settings from "
            "/etc/jupyter/jupyter_gpu_config.py; move them there, or stop that service and pass broker='managed'"
        )
    try:
        with SeatClient(path, timeout_s=5) as client:
            notes = [pool.note for pool in client.pools().pools if pool.note]
    except FractionalGPUError as error:
        raise ConfigError(f"{_WHERE}: cannot use the system's GPU broker on {path}: {error}") from error
    for note in notes:  # a broker that the hub runs logs its own notes
        get_logger().info(note)


def _check_socket(path: str, *, everyone: bool) -> None:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(f"the path is longer than {_LONGEST_PATH} bytes; pass a shorter path as socket")
    if path == SYSTEM_SOCKET and not _is_root():
        raise ConfigError("only a hub that runs as root can use this path; leave socket out")
    if everyone:
        check_reachable(path)


def _add_service(
    c: Config, path: str, given: dict[str, Any], *, config_file: str | None, simulate: str | None, everyone: bool
) -> None:
    """Add the broker to the hub's managed services. `everyone` is set if the hub's servers run as other users."""
    try:
        _check_socket(path, everyone=everyone)
    except (ConfigError, FractionalGPUError) as error:
        raise ConfigError(f"{_WHERE}: socket = {path!r}: {error}") from None
    given.setdefault("seats_required", True)
    given.setdefault("idle_exit", "never")
    if path == SYSTEM_SOCKET:
        given.setdefault("state_dir", str(SERVICE_STATE))
    else:
        folder = Path(jupyter_data_dir()) / "gpu-hub"
        if not is_network(folder):  # on a network filesystem, the broker chooses a folder on a local disk
            given.setdefault("state_dir", str(folder))
    try:
        load(config_file, given, origin=_WHERE)
    except ConfigError as error:
        raise ConfigError(str(error)) from None  # the hub prints the whole traceback, so keep it short
    try:
        text = json.dumps(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_WHERE}: the broker's settings must be plain values: {error}") from error
    # With -P, no module in the hub's working directory can replace ours.
    command = [sys.executable, "-P", str(Path(__file__).with_name("attendant.py"))]
    command += [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--socket", path, "--stand-by"]
    command += ["--service"] if everyone and path != SYSTEM_SOCKET else []
    command += ["--settings", text]
    if config_file is not None:
        command += ["--config", str(Path(config_file).absolute())]
    if simulate is not None:
        command += ["--simulate", simulate]
    kept = {
        name: os.environ[name]
        for name in os.environ
        if name.startswith("JUPYTER_") and name.endswith(("_DIR", "_PATH"))
    }
    c.JupyterHub.services.append({"name": BROKER_SERVICE, "command": command, "environment": kept})
    expect_service(BROKER_SERVICE, "configure(...)")
