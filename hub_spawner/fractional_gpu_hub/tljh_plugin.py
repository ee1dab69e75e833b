"""A plugin for The Littlest JupyterHub (TLJH). Installs packages, kernels, and the broker as a system service, and configures the hub.

TLJH finds the plugin through the entry point `tljh`. The `fractional_gpu` section of TLJH's config.yaml contains `configure`'s arguments.

TLJH's hub runs in a unit without access to devices (`PrivateDevices`), so the broker gets its own unit. Servers run as system users, which
TLJH creates when their servers first start. Our spawner creates them earlier, because a seat is tied to a uid.
"""

import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

import pluggy
from traitlets.config import Config

from fractional_gpu.config import ConfigError, load
from fractional_gpu.config.service import CONFIG, UNIT, requirement, service_files
from fractional_gpu.core.units import format_fraction
from fractional_gpu_hub.configuration import configure
from fractional_gpu_hub.mixin import FractionalGPUMixin, ids_of_user

SECTION: Final = "fractional_gpu"
_FRACTIONS: Final = ("1/8", "1/4", "1/2", "1")
_OF_TLJH: Final = frozenset({"c", "spawner"})  # arguments of `configure` that the plugin sets


hookimpl = pluggy.HookimplMarker("tljh")  # the same as TLJH's own marker


@hookimpl
def tljh_extra_user_pip_packages() -> list[str]:
    return [requirement("lab,cuda")]


@hookimpl
def tljh_extra_hub_pip_packages() -> list[str]:
    return [requirement("hub,cuda")]


@hookimpl
def tljh_config_post_install(config: MutableMapping[str, Any]) -> None:
    config.setdefault(SECTION, {"pools": {"default": {"fractions": list(_FRACTIONS)}}})


@hookimpl
def tljh_custom_jupyterhub_config(c: Config) -> None:
    section = _section()
    section.pop("pools", None)  # `tljh_post_install` has written them into the broker's file
    configure(c, spawner=spawner_class(c.JupyterHub.spawner_class), **{"broker": "system", **section})


@hookimpl
def tljh_post_install() -> None:
    """Write the broker's configuration and unit, start the broker, and install the kernels for the users.

    Raises ConfigError if the section is invalid, and CalledProcessError if systemd or installing the kernels fails.
    """
    from tljh.config import USER_ENV_PREFIX  # noqa: PLC0415 - only TLJH has this module

    pools = _section().get("pools", {"default": {}})
    settings = load(None, {"pools": pools})  # a mistake must stop the installation, or else the broker would not start
    CONFIG.parent.mkdir(parents=True, exist_ok=True)
    CONFIG.write_text(
        f"# Written by the plugin for The Littlest JupyterHub from the section {SECTION} of its config.yaml.\n"
        f"c.GPUBroker.pools = {pools!r}\nc.GPUBroker.seats_required = True\n"
    )
    UNIT.write_text(service_files(sys.prefix)[UNIT])
    for command in (("daemon-reload",), ("enable", UNIT.name), ("restart", UNIT.name)):
        subprocess.run(["systemctl", *command], check=True)
    for pool in settings.pools:
        fractions = [format_fraction(milli) for milli in pool.fractions] or list(_FRACTIONS)
        program = str(Path(USER_ENV_PREFIX, "bin", "jupyter-gpu"))
        install = [program, "kernels", "install", "--sys-prefix", "--pool", pool.name, "--fraction", *fractions]
        subprocess.run(install, check=True)


def spawner_class(base: type) -> type:
    from systemdspawner import SystemdSpawner  # noqa: PLC0415 - TLJH installs it

    from fractional_gpu_hub.systemd import FractionalGPUSystemdSpawner  # noqa: PLC0415

    ours = FractionalGPUSystemdSpawner if issubclass(base, SystemdSpawner) else FractionalGPUMixin
    return type("FractionalGPUTLJHSpawner", (_SystemUser, ours, base), {})


class _SystemUser(FractionalGPUMixin):
    def gpu_user_ids(self) -> tuple[int, int] | None:
        return ids_of_user(self._system_name())

    async def start(self) -> Any:  # noqa: ANN401 - the result of the spawner below
        from tljh import user  # noqa: PLC0415 - only TLJH has this module

        user.ensure_user(self._system_name())
        return await super().start()

    def _system_name(self) -> str:
        from tljh.normalize import generate_system_username  # noqa: PLC0415 - as above

        name: str = generate_system_username(f"jupyter-{self.user.name}")
        return name


def _section() -> dict[str, Any]:
    from tljh.configurer import load_config  # noqa: PLC0415 - only TLJH has this module

    section = load_config().get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigError(f"config.yaml: {SECTION} is {section!r}; expected keys such as `pools: {{default: {{}}}}`")
    wrong = [key for key in section if not isinstance(key, str) or key in _OF_TLJH]
    if wrong:
        raise ConfigError(
            f"config.yaml: invalid key {wrong[0]!r} in {SECTION}; expected `pools` or an argument of `fractional_gpu_hub.configure` "
            "other than `spawner`, because TLJH sets its own"
        )
    return dict(section)
