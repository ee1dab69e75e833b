"""Open OnDemand's part for an interactive app: its form, the rendered files, and the job, from the documentation of Open OnDemand 4.

Only Ruby renders its templates. In Open OnDemand Rails does, with the same variables; `view.html.erb` is escaped there.
"""

import json
import re
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import websocket
import yaml

from tests.support.slurm import Cluster
from tests.support.world import DEADLINE_S, Notebook, Server, until

__all__ = ["PORTAL", "Browser", "Session"]

PORTAL = "https://ondemand.example.org"

_RENDER = """
require "erb"
require "json"
given = JSON.parse($stdin.read)
values = given["values"].transform_keys(&:to_sym)
scope = binding
values.each { |name, value| scope.local_variable_set(name, value) }
scope.local_variable_set(:context, Struct.new(*values.keys).new(*values.values))
print JSON.generate(given["templates"].map { |text| ERB.new(text, trim_mode: "-").result(scope) })
"""
_JOB = """\
#!/bin/bash
{site}
cd {folder}
export host port
clean_up () {{
  pkill -P "$SCRIPT_PID"
  pkill -P $$
  exit "${{1:-0}}"
}}
find_port () {{
  python3 -c 'import socket; it = socket.socket(); it.bind(("", 0)); print(it.getsockname()[1])'
}}
create_passwd () {{
  tr -cd '[:alnum:]' </dev/urandom | head -c"$1"
}}
host=$(hostname)
source ./before.sh
./script.sh &
SCRIPT_PID=$!
source ./after.sh
(umask 077; printf 'host: %s\\nport: %s\\npassword: %s\\n' "$host" "$port" "$password" >connection.yml)
wait "$SCRIPT_PID" || clean_up 1
clean_up
"""


class Session:
    """An interactive session in a new folder: the job of an app with what a user typed into its form.

    `given` replaces the form's own values; `site` is what the site has in its cluster's `script_wrapper`.
    """

    def __init__(self, slurm: Cluster, app: Path, folder: Path, *, site: str = "", **given: object) -> None:
        self._slurm = slurm
        self._app = app
        self.folder = folder
        self.form = {**form_values(yaml.safe_load((app / "form.yml").read_text())), **given}
        shutil.copytree(app / "template", folder)
        files = list(folder.glob("**/*.erb"))
        submit, *texts = rendered([app / "submit.yml.erb", *files], self.form)
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
            file.rename(file.with_suffix(""))  # with its mode
        script = yaml.safe_load(submit)["script"]
        words = ["-D", str(folder), "-J", "sys/dashboard/sys/jupyter-gpu", "-o", str(folder / "output.log")]
        words += ["-p", str(self.form["bc_queue"]), "-t", f"{int(str(self.form['bc_num_hours'])):02}:00:00"]
        words += ["--export", "NONE", *script["native"], "--parsable"]
        with tempfile.TemporaryFile("w+") as job:
            job.write(_JOB.format(site=site, folder=folder))
            job.seek(0)
            self.job = slurm.call("sbatch", *words, stdin=job).strip()

    def connection(self) -> dict[str, Any]:
        """Wait until the session is ready; return its host, port and password."""
        file = self.folder / "connection.yml"
        try:
            until(lambda: file.exists() and "password: " in file.read_text(), "the session is ready", deadline_s=240)
        except AssertionError as error:
            error.add_note(self.output)
            raise
        return dict(yaml.safe_load(file.read_text()))

    @property
    def output(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")

    def view(self) -> str:
        """Return the session's card, as HTML."""
        return rendered([self._app / "view.html.erb"], self.connection())[0]


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


def form_values(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the form submits if a user changes nothing."""
    values = {}
    for name in form["form"]:
        attribute = form["attributes"][name]
        values[name] = attribute["value"] if isinstance(attribute, dict) else attribute
    return {name: str(value) for name, value in values.items()}


def rendered(files: Sequence[Path], values: Mapping[str, Any]) -> list[str]:
    ruby = shutil.which("ruby")
    assert ruby is not None, "ruby not found: `tests/run setup` installs Debian's ruby"
    given = json.dumps({"templates": [file.read_text() for file in files], "values": values})
    done = subprocess.run([ruby, "-e", _RENDER], input=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))
