"""The plugin for The Littlest JupyterHub, called as TLJH's plugin manager calls it, and its configuration run by a real hub.

TLJH itself is not installed: there is a stand-in. Its installer, systemd and traefik are not run.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pluggy
import pytest
from jupyterhub.spawner import SimpleLocalProcessSpawner
from systemdspawner import SystemdSpawner
from traitlets.config import Config

from fractional_gpu import __version__
from fractional_gpu.config import ConfigError, load, service
from fractional_gpu_hub import tljh_plugin
from fractional_gpu_hub.mixin import FractionalGPUMixin
from fractional_gpu_hub.systemd import FractionalGPUSystemdSpawner
from tests.support.hub import new_hub
from tests.support.stories import CHECK, fill
from tests.support.tljh import Specifications, put_stand_in
from tests.support.world import new_world


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    put_stand_in(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TLJH_USER", str(tmp_path / "user"))
    monkeypatch.setenv("TLJH_CONFIG", "{}")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "tljh"]:
        del sys.modules[name]


@pytest.fixture
def tljh() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("tljh")
    manager.add_hookspecs(Specifications)
    (point,) = [one for one in entry_points(group="tljh") if one.value == "fractional_gpu_hub.tljh_plugin"]
    manager.register(point.load())
    manager.check_pending()
    return manager


_WHEEL = "file:///srv/jupyter_fractional_gpu-0.1.0-py3-none-any.whl"
_GIT = {"url": "https://git.example.org/gpu", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (None, f"=={__version__}"),
        ({"url": _WHEEL, "archive_info": {}}, f" @ {_WHEEL}"),
        (_GIT, " @ git+https://git.example.org/gpu@abc"),
    ],
)
def test_hub_and_users_get_the_package_from_where_the_plugin_is(
    tljh: pluggy.PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: object, wanted: str
) -> None:
    info = tmp_path / "jupyter_fractional_gpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jupyter-fractional-gpu\nVersion: 0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for hook, extras in (("tljh_extra_hub_pip_packages", "hub,cuda"), ("tljh_extra_user_pip_packages", "lab,cuda")):
        assert getattr(tljh.hook, hook)() == [[f"jupyter-fractional-gpu[{extras}]{wanted}"]]


def test_a_section_that_is_there_stays(tljh: pluggy.PluginManager) -> None:
    config: dict[str, Any] = {}
    tljh.hook.tljh_config_post_install(config=config)
    assert load(None, config["fractional_gpu"]).pools[0].name == "default"
    mine = {"fractional_gpu": {"pools": {"teaching": {}}}, "users": {"admin": ["grace"]}}
    tljh.hook.tljh_config_post_install(config=mine)
    assert mine == {"fractional_gpu": {"pools": {"teaching": {}}}, "users": {"admin": ["grace"]}}


@pytest.mark.usefixtures("stand_in")
def test_after_the_installation_broker_unit_and_kernels_are_there(
    tljh: pluggy.PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[list[str]] = []
    unit = tmp_path / "jupyter-gpu.service"
    for module in (tljh_plugin, service):
        monkeypatch.setattr(module, "UNIT", unit)
    monkeypatch.setattr(tljh_plugin, "CONFIG", tmp_path / "etc" / "jupyter_gpu_config.py")
    monkeypatch.setattr("subprocess.run", lambda command, *, check: done.append(command) if check else None)
    monkeypatch.setenv("TLJH_CONFIG", '{"fractional_gpu": {"pools": {"teaching": {"fractions": ["1/4", "1/2"]}}}}')
    tljh.hook.tljh_post_install()
    assert [command[:2] for command in done[:-1]] == [
        ["systemctl", word] for word in ("daemon-reload", "enable", "restart")
    ]
    assert done[-1][1:] == ["kernels", "install", "--sys-prefix", "--pool", "teaching", "--fraction", "1/4", "1/2"]
    settings = load(str(tmp_path / "etc" / "jupyter_gpu_config.py"))
    assert settings.seats_required
    assert [pool.name for pool in settings.pools] == ["teaching"]
    assert unit.read_text() == service.service_files(sys.prefix)[unit]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("section", ['["pools"]', '{"pools": {"Big One": {}}}'])
def test_a_wrong_section_is_named_before_anything_is_written(
    tljh: pluggy.PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr(tljh_plugin, "CONFIG", tmp_path / "config.py")
    monkeypatch.setenv("TLJH_CONFIG", f'{{"fractional_gpu": {section}}}')
    with pytest.raises(ConfigError):
        tljh.hook.tljh_post_install()
    assert not (tmp_path / "config.py").exists()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("section", "says"),
    [
        ('{"spawner": "fractional-gpu-local"}', "invalid key 'spawner' in fractional_gpu; .*TLJH sets its own"),
        ('{"socket": 5}', "socket = 5: expected the path of the broker's socket"),
    ],
)
def test_a_key_that_the_hub_cannot_use_is_named(
    tljh: pluggy.PluginManager, monkeypatch: pytest.MonkeyPatch, section: str, says: str
) -> None:
    monkeypatch.setenv("TLJH_CONFIG", f'{{"fractional_gpu": {section}}}')
    c = Config()
    c.JupyterHub.spawner_class = SimpleLocalProcessSpawner
    with pytest.raises(ConfigError, match=says):
        tljh.hook.tljh_custom_jupyterhub_config(c=c)


def test_its_spawner_is_tljhs_with_seats() -> None:
    kind = tljh_plugin.spawner_class(type("UserCreatingSpawner", (SystemdSpawner,), {}))
    assert issubclass(kind, FractionalGPUSystemdSpawner)
    assert [one.__name__ for one in kind.__mro__].index("UserCreatingSpawner") > [
        one.__name__ for one in kind.__mro__
    ].index("FractionalGPUMixin")
    assert issubclass(tljh_plugin.spawner_class(SimpleLocalProcessSpawner), FractionalGPUMixin)


def test_a_real_hub_runs_with_its_configuration(stand_in: Path) -> None:
    with new_world("1x256MiB") as world:
        world.install(500)
        for folder in (world.folder, Path(world.socket).parent):
            folder.chmod(0o755)  # its users can reach the socket
        world.environment["PYTHONPATH"] = f"{stand_in}:{world.environment['PYTHONPATH']}"
        before = (
            "import os\nfrom jupyterhub.spawner import SimpleLocalProcessSpawner\n"
            "from fractional_gpu_hub.tljh_plugin import tljh_custom_jupyterhub_config\n"
            "section = {'broker': 'managed', 'socket': given['socket'], 'simulate': given['simulate']}\n"
            "os.environ['TLJH_CONFIG'] = json.dumps({'fractional_gpu': section})\n"
            "c.JupyterHub.spawner_class = SimpleLocalProcessSpawner\n"
            "tljh_custom_jupyterhub_config(c)\n"
        )
        with new_hub(world, before=before) as hub:
            server = hub.server("ada", fraction="1/2")
            notebook = server.start("fractional-gpu-default-500")
            notebook.must(fill(1))
            notebook.must("%gpu suspend")
            assert notebook.must(CHECK).text == "intact\n"
