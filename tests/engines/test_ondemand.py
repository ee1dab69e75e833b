"""examples/ondemand: sessions of Open OnDemand on a real Slurm, submitted, opened and ended as Open OnDemand does."""

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
import websocket

from tests.support.ondemand import Session
from tests.support.paths import ROOT
from tests.support.slurm import Cluster
from tests.support.slurm_nodes import GPUNode, gpu_nodes
from tests.support.slurm_site import new_environment
from tests.support.world import DEADLINE_S, Notebook, Server, until

pytestmark = pytest.mark.promise("slurm")

APP = ROOT / "examples" / "ondemand"
PORTAL = "https://ondemand.example.org"
FILL = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import device; "
    "data = device.open().fill(seed=1, size=16 * 2**20); data.step(); print(data.wrong_bytes())"
)


@pytest.fixture(scope="module")
def nodes(slurm: Cluster) -> Iterator[list[GPUNode]]:
    with gpu_nodes(slurm, more=["--no-groups"]) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_jobs_left(slurm: Cluster, nodes: list[GPUNode]) -> Iterator[None]:
    assert len(nodes) == len(slurm.nodes)
    yield
    slurm.cancel_all()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's environment with JupyterLab and this package; servers of root are allowed."""
    folder = tmp_path_factory.mktemp("environment")
    new_environment(folder, folder, ours=True)
    for name in ("share", "etc"):  # JupyterLab's pages, and the server's extensions
        (folder / name).symlink_to(Path(sys.prefix, name))
    script = folder / "bin" / "jupyter-lab"
    script.write_text(f'#!/bin/sh\nexec {folder}/bin/python -P -m jupyterlab --allow-root "$@"\n')
    script.chmod(0o755)
    return folder


class Browser(Server):
    """The session's owner, behind the portal's proxy: it names the node as Host and passes cookies and Origin on."""

    def __init__(self, connection: Mapping[str, Any], card: str) -> None:
        self._node = f"{connection['host']}:{connection['port']}"
        self._proxy = f"http://127.0.0.1:{connection['port']}"
        self._cookies = CookieJar()
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self._cookies)
        )
        self._notebooks: list[Notebook] = []
        form = re.search(r'<form action="(.+?)" method="post"', card)
        assert form is not None
        fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="(\w+)">', card))
        self.base = form[1].partition("/login")[0]
        self.url = f"{self._proxy}{self.base}/"
        self.page = self.open("POST", form[1], urllib.parse.urlencode(fields).encode())

    def open(self, method: str, path: str, body: bytes | None = None, **headers: str) -> str:
        """Return the address of the page that a request leads to."""
        with self._opener.open(self._request(method, path, body, headers), timeout=DEADLINE_S) as reply:
            return str(urllib.parse.urlsplit(reply.url).path)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        xsrf = next(cookie.value for cookie in self._cookies if cookie.name == "_xsrf")
        data = None if body is None else json.dumps(body).encode()
        request = self._request(method, f"{self.base}/{path}", data, {"X-XSRFToken": str(xsrf)})
        with self._opener.open(request, timeout=DEADLINE_S) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def _request(self, method: str, path: str, body: bytes | None, more: Mapping[str, str]) -> urllib.request.Request:
        headers = {"Host": self._node, "Origin": PORTAL, **more}
        return urllib.request.Request(self._proxy + path, data=body, method=method, headers=headers)  # noqa: S310 - loopback

    def connect(self, kernel_id: str) -> Notebook:
        self._notebooks.append(PortalNotebook(self, kernel_id))
        return self._notebooks[-1]

    def channel(self, kernel_id: str, session: str, origin: str = PORTAL) -> websocket.WebSocket:
        return websocket.create_connection(
            f"{self.url.replace('http', 'ws', 1)}api/kernels/{kernel_id}/channels?session_id={session}",
            cookie="; ".join(f"{cookie.name}={cookie.value}" for cookie in self._cookies),
            host=self._node,
            origin=origin,
            timeout=DEADLINE_S,
        )


class PortalNotebook(Notebook):
    server: Browser

    def _connected(self) -> websocket.WebSocket:
        return self.server.channel(self.kernel_id, self.session)


def scancel(slurm: Cluster, session: Session, _browser: Browser) -> None:
    slurm.call("scancel", session.job)  # the button "Delete"
    slurm.await_job(session.job, "CANCELLED")


def shut_down(slurm: Cluster, session: Session, browser: Browser) -> None:
    browser.request("POST", "api/shutdown")  # JupyterLab's menu
    slurm.await_job(session.job, "COMPLETED")


@pytest.mark.parametrize("end", [scancel, shut_down])
def test_kernels_of_a_session_have_the_share_of_its_form_until_the_session_ends(
    slurm: Cluster,
    nodes: list[GPUNode],
    environment: Path,
    tmp_path: Path,
    end: Callable[[Cluster, Session, Browser], None],
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    session = Session(
        slurm, APP, tmp_path / "session", site=f"export HOME={home}", environment=str(environment), portal=PORTAL
    )
    connection = session.connection()
    assert (session.folder / "jupyter_server_config.py").stat().st_mode & 0o077 == 0
    browser = Browser(connection, session.view())
    assert browser.page == f"/node/{connection['host']}/{connection['port']}/lab"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        Browser(connection, session.view().replace(connection["password"], "guessed"))

    notebook = browser.start("python3")
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        browser.channel(notebook.kernel_id, "another", "https://other.example.org")
    reply = notebook.run(FILL)
    assert reply.text == "0\n", reply
    node = next(node for node in nodes if node.node.name == slurm.job(session.job)["NodeList"])
    (lease,) = node.status().leases
    assert (lease.state, lease.spec.fraction_milli) == ("resident", 250)
    browser.hang_up()

    end(slurm, session, browser)
    until(lambda: not node.lease_states(), "no lease is left")
    until(lambda: not list(node.seats.glob("*")), "no file of a seat is left")
    with node.client() as client:
        assert client.seats().seats == []


def test_a_session_whose_server_cannot_start_ends_at_once_and_says_why(
    slurm: Cluster, nodes: list[GPUNode], tmp_path: Path
) -> None:
    session = Session(slurm, APP, tmp_path / "session", site=f"export HOME={tmp_path}", environment="/nowhere")
    slurm.await_job(session.job, "FAILED")
    assert "jupyter-lab: not found" in session.output
    assert not (session.folder / "connection.yml").exists()
    until(lambda: not [file for node in nodes for file in node.seats.glob("*")], "no file of a seat is left")
