"""A stand-in for The Littlest JupyterHub, which is on no index: its hooks (tljh/hooks.py), and what the plugin calls of its modules.

As a program, `python -m tests.support.tljh CONFIGURATION UNIT`, it does what TLJH's installer does with an installed plugin, and prints
the packages that the plugin wants, or with `--after` what it does when they are there.
"""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pluggy
from traitlets.config import Config

__all__ = ["STAND_IN", "Specifications", "put_stand_in"]

hookspec = pluggy.HookspecMarker("tljh")
STAND_IN = {
    "__init__.py": "",
    "config.py": "import os\nUSER_ENV_PREFIX = os.environ['TLJH_USER']\n",
    "configurer.py": "import json, os\ndef load_config():\n    return json.loads(os.environ['TLJH_CONFIG'])\n",
    "normalize.py": "import getpass\ndef generate_system_username(name):\n    return getpass.getuser()\n",
    "user.py": "made = []\ndef ensure_user(name):\n    made.append(name)\n",
}


class Specifications:
    @hookspec
    def tljh_extra_user_conda_packages(self) -> None: ...

    @hookspec
    def tljh_extra_user_pip_packages(self) -> None: ...

    @hookspec
    def tljh_extra_hub_pip_packages(self) -> None: ...

    @hookspec
    def tljh_extra_apt_packages(self) -> None: ...

    @hookspec
    def tljh_custom_jupyterhub_config(self, c: Config) -> None: ...

    @hookspec
    def tljh_config_post_install(self, config: dict[str, Any]) -> None: ...

    @hookspec
    def tljh_post_install(self) -> None: ...

    @hookspec
    def tljh_new_user_create(self, username: str) -> None: ...


def put_stand_in(folder: Path) -> None:
    """Write the package `tljh` into the folder."""
    package = folder / "tljh"
    package.mkdir(parents=True)
    for name, text in STAND_IN.items():
        (package / name).write_text(text)


def _install(configuration: Path, unit: Path, *, after: bool) -> dict[str, Any]:
    from systemdspawner import SystemdSpawner  # noqa: PLC0415

    from fractional_gpu.config import service  # noqa: PLC0415
    from fractional_gpu_hub import tljh_plugin  # noqa: PLC0415 - tests of other parts import this module without the hub

    tljh = pluggy.PluginManager("tljh")
    tljh.add_hookspecs(Specifications)
    tljh.load_setuptools_entrypoints("tljh")
    tljh.check_pending()
    if not after:
        config: dict[str, Any] = {}
        tljh.hook.tljh_config_post_install(config=config)
        hub, user = tljh.hook.tljh_extra_hub_pip_packages(), tljh.hook.tljh_extra_user_pip_packages()
        return {"config": config, "hub": list(chain(*hub)), "user": list(chain(*user))}
    with patch.object(service, "UNIT", unit), patch.multiple(tljh_plugin, CONFIG=configuration, UNIT=unit):
        tljh.hook.tljh_post_install()
    c = Config()
    c.JupyterHub.spawner_class = SystemdSpawner
    tljh.hook.tljh_custom_jupyterhub_config(c=c)
    return {"spawner": c.JupyterHub.spawner_class.__name__}


if __name__ == "__main__":
    print(json.dumps(_install(Path(sys.argv[1]), Path(sys.argv[2]), after=sys.argv[3:] == ["--after"])))  # noqa: T201
