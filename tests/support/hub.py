"""A real JupyterHub with a real configurable-http-proxy in a private world, its users, and their servers and notebooks."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from fractional_gpu.client.seat import SeatClient
from tests.support.ports import free_ports
from tests.support.world import DEADLINE_S, NO_EXTENSIONS, Notebook, Server, World, until

__all__ = ["HubServer", "HubWorld", "Refused", "new_hub"]

_CONFIG = """
import json, os
import jupyterhub.services.service, jupyterhub.spawner
from fractional_gpu_hub import configure
from tests.support.ports import free_ports
# The hub chooses a port from the system, and its server listens there a second later: a concurrent test's kernel may have taken it
# by then, or another server that was given the same.
given_ports = set()
def new_port():
    while (port := free_ports(1)[0]) in given_ports:
        pass
    given_ports.add(port)
    return port
jupyterhub.spawner.random_port = new_port
jupyterhub.services.service._ServiceSpawner.poll_interval = 5  # half a minute otherwise: a broker that was killed is started again
given = json.loads(os.environ["TEST_HUB"])
c = get_config()
if given["before"]:
    exec(given["before"])
else:
    configure(c, spawner=given["spawner"], socket=given["socket"], simulate=given["simulate"], **given["settings"])
c.JupyterHub.bind_url = given["url"]
c.JupyterHub.hub_port = given["hub_port"]
c.ConfigurableHTTPProxy.api_url = given["proxy_api"]
c.ConfigurableHTTPProxy.auth_token = given["proxy_token"]
c.ConfigurableHTTPProxy.should_start = False
c.JupyterHub.cleanup_servers = given["cleanup"]
c.JupyterHub.last_activity_interval = 2  # how often routes are looked at: a proxy of ours is not watched by the hub
c.JupyterHub.db_url = "sqlite:///" + given["folder"] + "/hub.sqlite"
c.JupyterHub.cookie_secret_file = given["folder"] + "/cookie_secret"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = given["password"]
c.Authenticator.allow_all = True
c.JupyterHub.allow_named_servers = True
c.JupyterHub.load_groups = {name: {"users": users} for name, users in given["groups"].items()}
c.JupyterHub.services.append({"name": "test", "api_token": given["token"]})
c.JupyterHub.load_roles = [
    {"name": "test", "services": ["test"], "scopes": ["admin:users", "admin:servers", "admin:groups", "tokens", "access:servers"]},
    {"name": "prometheus", "services": ["test"], "scopes": ["read:metrics"]},
]
c.SimpleLocalProcessSpawner.home_dir_template = given["homes"] + "/{username}"
c.Spawner.environment = given["environment"]
c.Spawner.cmd = given["command"] or [given["python"], "-m", "jupyterhub.singleuser"]
c.Spawner.args = given["arguments"]
c.Spawner.poll_interval = 1
c.Spawner.http_timeout = given["http_timeout"]
c.FractionalGPUMixin.gpu_wait = given["wait"]
c.JupyterHub.log_level = "INFO"
if given["page"] is not None:
    from fractional_gpu_hub.service import add_page
    add_page(c, **given["page"])
"""


class Refused(Exception):  # noqa: N818 - an answer, for tests to look at
    """The hub refused: its status and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class HubWorld:
    def __init__(self, world: World, settings: Mapping[str, Any], groups: Mapping[str, list[str]], **more: Any) -> None:  # noqa: ANN401
        self.world = world
        self.token = secrets.token_hex(16)
        self.password = secrets.token_hex(8)
        port, api_port, hub_port, page_port = free_ports(4)
        self.url = f"http://127.0.0.1:{port}/"
        self._proxy_token = secrets.token_hex(16)
        self._proxy_ports = port, api_port
        self.homes = world.folder / "homes"
        self.homes.mkdir()
        kept = ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "PYTHONPATH", "IPYTHONDIR")
        self._given = {
            "spawner": "fractional-gpu-simple",
            "socket": world.socket,
            "simulate": world.simulate,
            "settings": dict(settings),
            "groups": dict(groups),
            "url": self.url,
            "hub_port": hub_port,
            "proxy_api": f"http://127.0.0.1:{api_port}",
            "proxy_token": self._proxy_token,
            "folder": str(world.folder),
            "homes": str(self.homes),
            "password": self.password,
            "token": self.token,
            "python": sys.executable,
            "command": None,  # of a server; None: JupyterHub's own
            "arguments": [
                "--allow-root",
                f"--ServerApp.jpserver_extensions={NO_EXTENSIONS}",
                # A notebook of a test hears pings only while it waits for a cell; others must not be hung up on.
                "--ServerApp.tornado_settings={'ws_ping_interval': 0}",
                f"--MappingKernelManager.kernel_info_timeout={DEADLINE_S}",  # a slow kernel's notebook neither
            ],
            "wait": 60,
            "http_timeout": 120,
            "cleanup": False,  # whether a hub that ends takes its users' servers along, as it does by default
            "before": "",  # statements that configure the spawner and the broker instead of `configure`
            "page": None,  # what `add_page` is given, the port aside; None: no page about the GPUs
            "environment": {name: world.environment[name] for name in kept},
            **more,
        }
        if self._given["page"] is not None:
            self._given["page"] = {"port": page_port, **self._given["page"]}
        self.config = world.folder / "jupyterhub_config.py"
        self.config.write_text(_CONFIG)
        self.proxy: subprocess.Popen[bytes] | None = None
        self.hub: subprocess.Popen[bytes] | None = None
        self._servers: list[HubServer] = []

    # -- the processes -----------------------------------------------------------------------------------------------------

    def start_proxy(self) -> None:
        """Start the proxy, which the hub does not own: it outlives hubs."""
        port, api_port = self._proxy_ports
        command = ["configurable-http-proxy", "--ip", "127.0.0.1", "--port", str(port), "--api-ip", "127.0.0.1"]
        command += [
            "--api-port",
            str(api_port),
            "--error-target",
            f"http://127.0.0.1:{self._given['hub_port']}/hub/error",
        ]
        with (self.world.folder / "proxy.err").open("ab") as log:
            self.proxy = subprocess.Popen(
                command,
                env={**self.world.environment, "CONFIGPROXY_AUTH_TOKEN": self._proxy_token},
                stdout=log,
                stderr=log,
            )
        until(lambda: _listens(port), "the proxy listens")

    def start_hub(self, **more: Any) -> None:  # noqa: ANN401
        """Start the hub; `more` replaces values of the configuration."""
        self._given |= more
        self.hub = self.launch_hub()
        try:
            until(self._serves, "the hub serves")
        except AssertionError as error:
            error.add_note(self.logs()["hub.err"])
            raise

    def launch_hub(self) -> "subprocess.Popen[bytes]":
        environment = {**self.world.environment, "TEST_HUB": json.dumps(self._given)}
        del environment["JUPYTER_GPU_SOCKET"], environment["JUPYTER_GPU_SIMULATE"]
        with (self.world.folder / "hub.err").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", str(self.config)],
                env=environment,
                cwd=self.world.folder,
                stdout=log,
                stderr=log,
            )

    def _serves(self) -> bool:
        assert self.hub is not None
        assert self.hub.poll() is None, self.logs()["hub.err"]
        if not _listens(self._given["hub_port"]):
            return False
        try:
            self.api("GET", "users")
        except (Refused, urllib.error.URLError, ConnectionError):
            return False
        return True

    def stop_hub(self, number: int = signal.SIGTERM) -> None:
        assert self.hub is not None
        self.hub.send_signal(number)
        self.hub.wait(DEADLINE_S)

    def stop_proxy(self) -> None:
        assert self.proxy is not None
        self.proxy.terminate()
        self.proxy.wait(DEADLINE_S)

    def logs(self) -> dict[str, str]:
        files = [self.world.folder / name for name in ("hub.err", "proxy.err")]
        return {**self.world.logs(), **{file.name: file.read_text()[-30_000:] for file in files if file.exists()}}

    def close(self) -> None:
        """End the hub, every server, the proxy; the world ends the broker."""
        if self.hub is not None and self.hub.poll() is None:
            self.stop_hub()
        for server in self._servers:
            server.hang_up()
        for pid in self._left():
            World.end(pid, signal.SIGKILL)
        if self.proxy is not None and self.proxy.poll() is None:
            self.stop_proxy()

    def _left(self) -> list[int]:
        """Return servers that were left running: processes with a home of this hub."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if f"HOME={self.homes}/".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    # -- the hub's API -----------------------------------------------------------------------------------------------------

    def api(self, method: str, path: str, body: object = None, *, token: str | None = None) -> Any:  # noqa: ANN401 - JSON
        """One call of the hub's REST API. Raises Refused."""
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{self.url}hub/api/{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"token {token or self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:  # noqa: S310
                text = reply.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            with suppress(ValueError):
                raise Refused(error.code, json.loads(text).get("message", "")) from None
            raise Refused(error.code, text.decode(errors="replace")) from None
        return json.loads(text) if text else None

    def add_user(self, name: str) -> None:
        with suppress(Refused):
            self.api("POST", f"users/{name}")

    def spawn(self, user: str, server: str = "", /, **options: Any) -> None:  # noqa: ANN401 - what is sent
        self.add_user(user)
        self.api("POST", f"users/{user}/server{'s/' + server if server else ''}", options)

    def await_server(self, user: str, server: str = "") -> None:
        path = f"users/{user}/server{'s/' + server if server else ''}/progress"
        with closing(self.events(path)) as events:
            for event in events:
                if event.get("failed"):
                    raise Refused(500, event["message"])
                if event.get("ready"):
                    return
        raise Refused(500, "the progress ended without a server")

    def events(self, path: str, *, token: str | None = None) -> Generator[dict[str, Any], None, None]:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}hub/api/{path}", headers={"Authorization": f"token {token or self.token}"}
        )
        with urllib.request.urlopen(request, timeout=3 * DEADLINE_S) as stream:  # noqa: S310
            for line in stream:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    def server(self, user: str, server: str = "", /, **options: Any) -> "HubServer":  # noqa: ANN401
        self.spawn(user, server, **options)
        self.await_server(user, server)
        return self.connect(user, server)

    def connect(self, user: str, server: str = "") -> "HubServer":
        made = HubServer(self, user, server)
        self._servers.append(made)
        return made

    def stop(self, user: str, server: str = "") -> None:
        self.api("DELETE", f"users/{user}/server{'s/' + server if server else ''}")
        until(lambda: server not in self.api("GET", f"users/{user}")["servers"], f"the server of {user} is gone")

    @contextmanager
    def seats(self) -> Iterator[SeatClient]:
        client = SeatClient(self.world.socket)
        try:
            yield client
        finally:
            client.close()


class HubServer(Server):
    def __init__(self, hub: HubWorld, user: str, name: str) -> None:
        self.world = hub.world
        self.token = hub.api("POST", f"users/{user}/tokens", {"note": "test"})["token"]
        self.url = f"{hub.url}user/{user}/{name + '/' if name else ''}"
        self._refused = False
        self._notebooks: list[Notebook] = []

    def reconnect(self, notebook: Notebook) -> Notebook:
        with suppress(OSError):
            notebook.close()
        return self.connect(notebook.kernel_id)

    def launcher(self) -> list[str]:
        names = self.request("GET", "api/kernelspecs")["kernelspecs"]
        return sorted(name for name in names if name.startswith("fractional-gpu-"))


@contextmanager
def new_hub(
    world: World,
    settings: Mapping[str, Any] | None = None,
    *,
    groups: Mapping[str, list[str]] | None = None,
    **more: Any,  # noqa: ANN401
) -> Iterator[HubWorld]:
    """A hub that serves, and ends with the block. `settings` are the broker's; `more` replaces values of the configuration."""
    hub = HubWorld(world, settings or {}, groups or {}, **more)
    with ExitStack() as stack:
        stack.callback(hub.close)
        hub.start_proxy()
        hub.start_hub()
        yield hub


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
