"""`configure` sets a hub up, or stops it at its start with the key, the value and the allowed form."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import SYSTEM_SOCKET
from fractional_gpu.config import ConfigError
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu_hub import configuration, configure
from fractional_gpu_hub.configuration import SPAWNERS
from fractional_gpu_hub.engines.slurm import FractionalGPUSlurmSpawner
from fractional_gpu_hub.mixin import FractionalGPUMixin
from tests.broker.live import BECOME_NOBODY, DEADLINE_S, live_broker
from tests.support.callers import caller
from tests.support.paths import PYTHONPATH
from tests.support.world import World, until


def broker_at(socket: Path) -> int | None:
    try:
        with BrokerClient(str(socket), timeout_s=DEADLINE_S) as client:
            return client.ping().pid
    except BrokerUnavailableError:
        return None


def services(c: Config) -> list[dict[str, Any]]:
    return list(c.JupyterHub.services.get_value([]))


def settings(c: Config) -> dict[str, Any]:
    (service,) = services(c)
    command = service["command"]
    found: dict[str, Any] = json.loads(command[command.index("--settings") + 1])
    return found


def test_the_hub_runs_the_broker_with_its_pools(tmp_path: Path) -> None:
    c, socket = Config(), str(tmp_path / "broker.sock")
    configure(
        c, spawner="fractional-gpu-simple", socket=socket, pools={"default": {"price": "1 EUR"}}, simulate="1x1GiB"
    )
    (service,) = services(c)
    assert service["command"][2].endswith("attendant.py")
    assert service["command"][3:9] == [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--socket"]
    assert "--stand-by" in service["command"]
    assert service["command"][-2:] == ["--simulate", "1x1GiB"]
    assert settings(c)["pools"] == {"default": {"price": "1 EUR"}}
    assert settings(c)["seats_required"] is True
    assert settings(c)["idle_exit"] == "never"
    assert c.FractionalGPUMixin.gpu_socket == socket
    assert c.JupyterHub.spawner_class == "fractional-gpu-simple"


def test_services_of_others_stay(open_folder: Path) -> None:
    c = Config()
    c.JupyterHub.services = [{"name": "culler"}]
    configure(c, socket=str(open_folder / "broker.sock"))
    assert [service["name"] for service in c.JupyterHub.services] == ["culler", "gpu-broker"]


def test_what_the_site_says_wins_over_the_hubs_defaults(open_folder: Path) -> None:
    c = Config()
    configure(
        c, socket=str(open_folder / "broker.sock"), seats_required=False, state_dir=str(open_folder), log_level="debug"
    )
    assert settings(c) == {
        "seats_required": False,
        "idle_exit": "never",
        "state_dir": str(open_folder),
        "log_level": "debug",
    }


def test_a_hub_that_runs_as_root_serves_every_user_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Config()
    monkeypatch.setattr(configuration, "_is_root", lambda: True)
    configure(c, broker="managed", pools={"default": {}})
    assert c.FractionalGPUMixin.gpu_socket == SYSTEM_SOCKET
    assert settings(c)["state_dir"] == "/var/lib/jupyter-gpu"


@pytest.mark.parametrize(("spawner", "is_root"), [("simple", True), ("simple", False), ("local", True)])
def test_a_hub_that_runs_as_root_with_servers_of_its_own_user_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, open_folder: Path, spawner: str, is_root: bool
) -> None:
    monkeypatch.setattr(configuration, "_is_root", lambda: is_root)
    configure(Config(), spawner=f"fractional-gpu-{spawner}", socket=str(open_folder / "broker.sock"))
    told = [line for line in caplog.messages if "this hub runs as root" in line]
    assert len(told) == (spawner == "simple" and is_root)
    for line in told:
        assert "spawner='fractional-gpu-local'" in line
        assert "c.Spawner.args = ['--allow-root']" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_users_of_a_hub_that_runs_as_root_reach_its_broker_on_any_socket(open_folder: Path) -> None:
    c, socket = Config(), open_folder / "gpu" / "broker.sock"
    configure(c, socket=str(socket), simulate="1x1GiB", state_dir=str(open_folder / "state"))
    (service,) = services(c)
    with subprocess.Popen(service["command"], env=os.environ | {"PYTHONPATH": PYTHONPATH}) as attendant:
        try:
            until(lambda: broker_at(socket), "its broker serves")
            with caller(str(socket), first=BECOME_NOBODY) as user:
                assert user.call("GET", "/v1/status")[0] == 200
        finally:
            World.end(broker_at(socket) or attendant.pid, signal.SIGTERM)
        assert attendant.wait(DEADLINE_S) == 0


def test_a_socket_that_users_do_not_reach_stops_the_hub(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_is_root", lambda: True)
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=f"socket = '{closed}/broker.sock': users cannot enter {closed}, so they"):
        configure(Config(), socket=str(closed / "broker.sock"))
    configure(Config(), socket=str(closed / "broker.sock"), spawner="fractional-gpu-simple")


def test_a_hub_that_does_not_keeps_to_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Config()
    folder = Path(tempfile.mkdtemp(prefix="jfg-"))  # short: it is part of a socket's path
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(configuration, "_is_root", lambda: False)
    configure(c, pools={"default": {}})
    assert c.FractionalGPUMixin.gpu_socket == str(folder / "gpu" / "hub" / "broker.sock")
    with pytest.raises(ConfigError, match="only a hub that runs as root can use this path"):
        configure(Config(), socket=SYSTEM_SOCKET)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"pools": {"default": {"idle_afetr": "5m"}}},
            "pools['default']['idle_afetr'] = '5m': unknown key; did you mean 'idle_after'?",
        ),
        (
            {"pools": {"default": {"hours": "9 to 5"}}},
            "pools['default']['hours'] = '9 to 5': '9 to 5' is not a time of the week",
        ),
        ({"pools": {"default": {"groups": ["staff"]}}}, "expected 'everybody', or groups such as"),
        ({"pools": {"Big One": {}}}, "a pool name must be"),
        ({"pools": {}}, "expected at least one pool"),
        ({"poools": {}}, "did you mean 'pools'?"),
        ({"idle_exit": "soon"}, "idle_exit = 'soon'"),
        ({"pools": {"default": {"fractions": {1, 2}}}}, "expected a list such as"),
        ({"socket": "/srv/" + "x" * 120}, "longer than 100 bytes; pass a shorter path as socket"),
        ({"spawner": "dockr"}, "expected fractional-gpu-local, fractional-gpu-simple"),
        ({"spawner": "docker"}, "does not extend FractionalGPUMixin"),
        ({"simulate": "two"}, "simulate = 'two': expected COUNTxMEMORY such as '2x8GiB'"),
        ({"broker": "mine"}, "expected 'auto', 'managed' or 'system'"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(open_folder: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(Config(), **{"socket": str(open_folder / "broker.sock"), **given})
    assert str(caught.value).startswith("jupyterhub_config.py: ")
    assert sentence in str(caught.value)


def test_a_hub_with_a_wrong_pool_does_not_start(open_folder: Path) -> None:
    config = open_folder / "jupyterhub_config.py"
    config.write_text(
        "from fractional_gpu_hub import configure\n"
        f"configure(get_config(), socket={str(open_folder / 'broker.sock')!r}, pools={{'default': {{'price': 'much'}}}})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from jupyterhub.app import main; main()", "-f", str(config)],
        capture_output=True,
        text=True,
        cwd=open_folder,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "pools['default']['price'] = 'much': expected None, or an amount and a currency such as '0.80 EUR'" in last


def test_a_broker_of_the_system_is_found_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with live_broker() as live:
        monkeypatch.setattr(configuration, "SYSTEM_SOCKET", live.socket)
        c = Config()
        configure(c)
        assert services(c) == []
        assert c.FractionalGPUMixin.gpu_socket == live.socket
        configure(Config(), broker="system")
        assert any(" has room for about " in line for line in caplog.messages)
        for name, value in (("pools", {"default": {}}), ("config_file", "pools.py"), ("simulate", "2x8GiB")):
            with pytest.raises(ConfigError, match=rf"{name} was given, but a system broker is serving"):
                configure(Config(), **{name: value})  # type: ignore[arg-type]
        # Processes left by an earlier run of this hub are not the system's.
        argv = {"argv": ["python", json.dumps({"settings": "{}"})]}
        Path(live.socket).with_name("broker.json").write_text(json.dumps(argv))
        c = Config()
        configure(c, pools={"default": {}}, state_dir=os.path.dirname(live.socket))  # noqa: PTH120
        assert [service["name"] for service in services(c)] == ["gpu-broker"]


def test_a_broker_of_the_system_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(configuration, "SYSTEM_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(ConfigError, match=r"cannot use the system's GPU broker on .*none\.sock"):
        configure(Config(), broker="system")


def test_every_ready_spawner_is_registered_and_has_the_mixin() -> None:
    registered = {point.name: point for point in entry_points(group="jupyterhub.spawners")}
    for name in SPAWNERS:
        assert issubclass(registered[name].load(), FractionalGPUMixin)


def test_a_hub_of_a_cluster_is_told_to_leave_configure_out() -> None:
    with pytest.raises(ConfigError, match=r"needs no broker; remove configure\(\.\.\.\)"):
        configure(Config(), spawner=FractionalGPUSlurmSpawner)
