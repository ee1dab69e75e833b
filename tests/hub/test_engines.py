"""systemd and Docker as spawners: the commands and settings they get."""

# ruff: noqa: ASYNC240 -- nobody waits for this loop

import json
import pwd
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from systemdspawner import systemd
from tornado import web

from fractional_gpu.client.seat import SeatClient
from fractional_gpu_hub.docker import FractionalGPUDockerSpawner
from fractional_gpu_hub.spawners import FractionalGPULocalSpawner
from fractional_gpu_hub.systemd import FractionalGPUSystemdSpawner
from tests.broker.live import LiveBroker, live_broker

NOBODY = pwd.getpwnam("nobody")
SEAT = "/run/secrets/jupyter-gpu-seat.json"


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker(seats_required=True) as live:
        yield live


def made(live: LiveBroker, kind: type[Any], name: str = "nobody", **traits: Any) -> Any:  # noqa: ANN401 - untyped spawners
    hub = SimpleNamespace(public_host="", api_url="http://127.0.0.1:8081/hub/api", base_url="/hub/")
    user = SimpleNamespace(name=name, groups=[], id=7, url="/user/x/", escaped_name=name)
    spawner = kind(user=user, hub=hub, gpu_socket=live.socket, cmd=["/usr/bin/jupyterhub-singleuser"], **traits)
    spawner.orm_spawner = SimpleNamespace(state=None, user_options=None, name="", server=None)
    spawner.user_options = {"pool": "default", "fraction": "1/4"}
    spawner.oauth_client_id = "test"
    spawner.set_trait("api_token", "-")
    spawner.public_url = spawner.public_hub_url = ""
    spawner.oauth_client_allowed_scopes = []
    return spawner


def seat_uid(live: LiveBroker) -> int | None:
    with SeatClient(live.socket) as client:
        (seat,) = client.seats().seats
    return seat.uid


# -- systemd ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    started: list[dict[str, Any]] = []

    async def start(unit: str, **more: Any) -> int:  # noqa: ANN401
        started.append({"unit": unit, **more})
        return 0

    async def answer(unit: str) -> bool:
        return bool(started) and started[-1]["unit"] == unit

    async def failed(unit: str) -> bool:
        del unit
        return False

    monkeypatch.setattr(systemd, "start_transient_service", start)
    monkeypatch.setattr(systemd, "service_running", answer)
    monkeypatch.setattr(systemd, "service_failed", failed)
    monkeypatch.setattr(systemd, "get_systemd_version", lambda: 252)
    return started


async def test_a_systemd_unit_runs_as_its_user_and_has_the_users_seat_file(
    live: LiveBroker, units: list[dict[str, Any]]
) -> None:
    spawner = made(live, FractionalGPUSystemdSpawner)
    assert await spawner.start()
    (unit,) = units
    assert (unit["unit"], unit["uid"], unit["gid"]) == ("jupyter-nobody-singleuser", NOBODY.pw_uid, NOBODY.pw_gid)
    assert "PrivateDevices" not in unit["properties"], "it would hide the GPUs"
    environment = unit["environment_variables"]
    assert environment["JUPYTER_GPU_SOCKET"] == live.socket
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    file = Path(environment["JUPYTER_GPU_SEAT_FILE"])
    assert file.stat().st_uid == NOBODY.pw_uid
    assert seat_uid(live) == NOBODY.pw_uid
    assert unit["args"] == ["--ServerApp.kernel_spec_manager_class=fractional_gpu.SeatKernelSpecManager"]


async def test_a_made_up_user_gets_the_seat_as_a_credential(live: LiveBroker, units: list[dict[str, Any]]) -> None:
    spawner = made(live, FractionalGPUSystemdSpawner, dynamic_users=True, unit_extra_properties={"Slice": "x.slice"})
    assert await spawner.start()
    (unit,) = units
    properties = unit["properties"]
    assert properties["DynamicUser"] == "yes"
    assert properties["Slice"] == "x.slice"
    name, _, source = properties["LoadCredential"].partition(":")
    assert json.loads(Path(source).read_text())["pool"] == "default"
    environment = unit["environment_variables"]
    assert environment["JUPYTER_GPU_SEAT_FILE"] == f"/run/credentials/jupyter-nobody-singleuser.service/{name}"
    assert seat_uid(live) is None, "nobody knows its uid yet: whoever has the token may draw on the seat"


async def test_a_unit_whose_devices_are_hidden_is_refused(live: LiveBroker, units: list[dict[str, Any]]) -> None:
    spawner = made(live, FractionalGPUSystemdSpawner, isolate_devices=True)
    with pytest.raises(web.HTTPError, match="isolate_devices is True, which hides every GPU"):
        await spawner.start()
    assert units == []


async def test_a_credential_of_the_site_is_not_replaced(live: LiveBroker, units: list[dict[str, Any]]) -> None:
    theirs = {"LoadCredential": "key:/etc/site.key"}
    spawner = made(live, FractionalGPUSystemdSpawner, dynamic_users=True, unit_extra_properties=theirs)
    with pytest.raises(web.HTTPError, match=r"LoadCredential='key:/etc/site\.key', but with dynamic_users=True"):
        await spawner.start()
    assert units == []
    assert spawner.unit_extra_properties == theirs


async def test_a_made_up_user_starts_again_with_a_new_credential(live: LiveBroker, units: list[dict[str, Any]]) -> None:
    spawner = made(live, FractionalGPUSystemdSpawner, dynamic_users=True)
    assert await spawner.start()
    first = units.pop()
    await spawner.run_post_stop_hook()
    assert await spawner.start()
    (second,) = units
    token, renewed = (unit["properties"]["LoadCredential"].partition(":")[2] for unit in (first, second))
    assert not Path(token).exists() or token == renewed
    assert json.loads(Path(renewed).read_text())["pool"] == "default"


# -- Docker -----------------------------------------------------------------------------------------------------------------


class FakeDocker:
    """A Docker daemon that records requests. The real client creates the host configurations."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.started: list[str] = []
        self._real = docker.APIClient(version="1.43")

    def create_host_config(self, **config: Any) -> Any:  # noqa: ANN401
        return self._real.create_host_config(**config)

    def inspect_container(self, name: str) -> None:
        raise docker.errors.NotFound(name, response=SimpleNamespace(status_code=404))

    def create_container(self, **config: Any) -> dict[str, str]:  # noqa: ANN401
        self.created.append(config)
        return {"Id": "0123456789ab"}

    def start(self, identity: str) -> None:
        self.started.append(identity)

    def port(self, _identity: str, _port: int) -> list[dict[str, str]]:
        return [{"HostIp": "127.0.0.1", "HostPort": "32768"}]

    def close(self) -> None:
        self._real.close()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    fake = FakeDocker()
    monkeypatch.setattr(FractionalGPUDockerSpawner, "_client", fake)
    yield fake
    fake.close()


def container(live: LiveBroker, **traits: Any) -> Any:  # noqa: ANN401
    return made(live, FractionalGPUDockerSpawner, image="lab:1", pull_policy="skip", **traits)


async def test_a_container_has_a_uid_of_its_own_the_socket_the_seat_and_the_gpus(
    live: LiveBroker, daemon: FakeDocker
) -> None:
    spawner = container(live, extra_host_config={"shm_size": "1g"})
    ip, port = await spawner.start()
    (config,) = daemon.created
    assert daemon.started == ["0123456789ab"]
    assert config["user"] == "200007:100"
    host = config["host_config"]
    folder = str(Path(live.socket).parent)
    assert f"{folder}:{folder}:ro" in host["Binds"]
    (bind,) = [bind for bind in host["Binds"] if SEAT in bind]
    source, _, rest = bind.partition(":")
    assert rest == f"{SEAT}:ro"
    assert Path(source).stat().st_uid == 200_007
    assert host.get("PidMode", "") == ""
    assert host["NetworkMode"] == "bridge", "processes and network are the container's own"
    assert host["PortBindings"] == {"8888/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]}
    assert host["DeviceRequests"][0]["Driver"] == "nvidia"
    assert host["ShmSize"] == 2**30
    environment = config["environment"]
    assert environment["JUPYTER_GPU_SEAT_FILE"] == SEAT
    assert environment["JUPYTERHUB_SERVICE_URL"].startswith("http://0.0.0.0:8888/")
    assert (ip, port, seat_uid(live)) == ("127.0.0.1", 32768, 200_007)


async def test_a_container_may_share_the_machines_network_where_an_administrator_says_so(
    live: LiveBroker, daemon: FakeDocker
) -> None:
    spawner = container(live, network_name="host", use_internal_ip=True, ip="127.0.0.1")
    ip, port = await spawner.start()
    (config,) = daemon.created
    assert config["host_config"]["NetworkMode"] == "host"
    assert config["environment"]["JUPYTERHUB_SERVICE_URL"].startswith(f"http://127.0.0.1:{port}/")
    assert (ip, config["host_config"].get("PidMode", "")) == ("127.0.0.1", "")


async def test_a_container_without_a_gpu_gets_none(live: LiveBroker, daemon: FakeDocker) -> None:
    spawner = container(live)
    spawner.user_options = {"fraction": "none"}
    await spawner.start()
    (config,) = daemon.created
    assert "DeviceRequests" not in config["host_config"]
    assert not [bind for bind in config["host_config"]["Binds"] if SEAT in bind]
    assert "JUPYTER_GPU_SEAT_FILE" not in config["environment"]


@pytest.mark.parametrize(
    "traits",
    [
        {"extra_create_kwargs": {"user": "root"}},
        {"extra_create_kwargs": {"user": "0:0"}},
        {"extra_create_kwargs": lambda _: {"user": 0}},
        {"extra_host_config": {"privileged": True}},
    ],
)
async def test_a_container_that_would_be_an_administrator_is_refused(
    live: LiveBroker, daemon: FakeDocker, traits: dict[str, Any]
) -> None:
    spawner = container(live, **traits)
    with pytest.raises(web.HTTPError, match="make every user an administrator of the GPU broker"):
        await spawner.start()
    assert daemon.created == []


@pytest.mark.parametrize("user", ["1000:100", "jovyan"])
async def test_a_container_of_a_user_who_cannot_read_its_seat_is_refused(
    live: LiveBroker, daemon: FakeDocker, user: str
) -> None:
    spawner = container(live, extra_create_kwargs={"user": user})
    with pytest.raises(web.HTTPError, match=f"run as the user '{user.partition(':')[0]}'.* uid 200007; leave user out"):
        await spawner.start()
    assert daemon.created == []


async def test_a_container_may_be_configured_with_the_uid_that_it_has(live: LiveBroker, daemon: FakeDocker) -> None:
    spawner = container(live, extra_create_kwargs={"user": "200007:200"})
    await spawner.start()
    assert [config["user"] for config in daemon.created] == ["200007:200"]


# -- local processes ----------------------------------------------------------------------------------------------------------


async def test_a_local_servers_seat_is_its_users(live: LiveBroker) -> None:
    spawner = made(live, FractionalGPULocalSpawner)
    assert spawner.gpu_user_ids() == (NOBODY.pw_uid, NOBODY.pw_gid)
    assert spawner.gpu_seat_uid() == NOBODY.pw_uid


@pytest.mark.parametrize("name", ["ada.lovelace@example.org", "no\0one"])
@pytest.mark.parametrize("kind", [FractionalGPULocalSpawner, FractionalGPUSystemdSpawner])
async def test_a_hubs_user_who_is_none_of_the_machine_is_told_so(live: LiveBroker, kind: type[Any], name: str) -> None:
    spawner = made(live, kind, name)
    with pytest.raises(
        web.HTTPError, match=r"this machine has no user .*, but servers here run as users of this machine"
    ):
        await spawner.start()
    with SeatClient(live.socket) as client:
        assert client.seats().seats == []
