"""A private world for end-to-end tests: Jupyter's folders, a simulated host, a broker that starts automatically, no leftovers."""

import io
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import websocket

from fractional_gpu.broker.process.driver_start import simulated_folder
from fractional_gpu.broker.process.restarting import BrokerOptions, start_detached
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import IN_WORKLOAD
from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.commands.main import main
from fractional_gpu.gpu.simulated.host import destroy
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from fractional_gpu.jupyter.kernelspecs import install
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.messages import DrainRequest
from fractional_gpu.protocol.status import HostStatus, LeaseStatus
from tests.support.paths import PYTHONPATH
from tests.support.waiting import DEADLINE_S, until

__all__ = ["DEADLINE_S", "NO_EXTENSIONS", "Notebook", "Reply", "Server", "World", "new_world", "until"]

# Nothing here looks at pages. JupyterLab's own extension starts a node process at each start of a server, and Notebook's imports
# JupyterLab, which takes a fifth of the start.
NO_EXTENSIONS = dict.fromkeys(
    ("jupyterlab", "jupyter_lsp", "jupyter_server_terminals", "notebook", "notebook_shim"), False
)


class World:
    """Folders, environment and the socket of one test. `environment` is for processes that the test starts."""

    def __init__(self, folder: Path, simulate: str) -> None:
        self.folder = folder
        self.socket = str(folder / "run" / "broker.sock")
        self.simulate = simulate
        self.kernels_dir = folder / "data" / "kernels"
        self.notebooks = folder / "notebooks"
        for name in ("data", "run", "config", "home", "notebooks", "ipython"):
            (folder / name).mkdir(mode=0o700)
        users = ("CUDA_", "IPYTHON", "JPY_", "JUPYTER")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(users)}
        self.environment = {
            **kept,
            **({IN_WORKLOAD: "1"} if IN_WORKLOAD in os.environ else {}),
            "HOME": str(folder / "home"),
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "run"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_PATH": str(folder / "data"),
            "JUPYTER_GPU_SOCKET": self.socket,
            "JUPYTER_GPU_SIMULATE": simulate,
            "PYTHONPATH": PYTHONPATH,
            "XDG_STATE_HOME": str(folder / "state"),
        }

    @classmethod
    def new(cls, simulate: str = "1x1GiB") -> Self:
        """A world in a separate folder, to be closed. Its path is short: UNIX sockets allow 107 bytes."""
        return cls(Path(tempfile.mkdtemp(prefix="jfg-")), simulate)

    @property
    def state(self) -> Path:
        """Where the broker's ledger lies, or will."""
        with patch.dict(os.environ, {"XDG_STATE_HOME": self.environment["XDG_STATE_HOME"]}):
            return make_state_folder(self.socket)

    @property
    def ledger(self) -> Path:
        return self.state / "ledger-simulated.sqlite"

    def configure(self, text: str) -> None:
        """Write the broker's config file; takes effect with the next broker."""
        (self.folder / "config" / "jupyter_gpu_config.py").write_text(text)

    def install(self, *fractions_milli: int, pool: str = "default") -> list[str]:
        return [spec.name for spec in install(pool, fractions_milli, directory=str(self.kernels_dir), simulated=True)]

    def complete_without_jedi(self) -> None:
        """Kernels of this world complete without Jedi, which in a new HOME first reads stubs for five seconds of processor time."""
        profile = self.folder / "ipython" / "profile_default"
        profile.mkdir(exist_ok=True)
        (profile / "ipython_config.py").write_text("c.IPCompleter.use_jedi = False\n")

    # -- the broker ------------------------------------------------------------------------------------------------------

    @property
    def simulated_folder(self) -> Path:
        return simulated_folder(self.socket)

    @contextmanager
    def client(self) -> Iterator[BrokerClient]:
        client = BrokerClient(self.socket)
        try:
            yield client
        finally:
            client.close()

    def start_broker(self, simulate: str = "", *, through: Sequence[str] = ()) -> None:
        """Start a broker as a provisioner would, and return when it serves; `simulate` changes the devices of this world.

        `through`: a command that starts it, with fewer rights say. Raises CalledProcessError if it does not start.
        """
        if simulate:
            self.environment["JUPYTER_GPU_SIMULATE"] = simulate
        if through:
            options = json.dumps({"socket": self.socket})
            argv = [*through, sys.executable, "-P", "-m", "fractional_gpu.broker", "--detach", options]
            subprocess.run(argv, env=self.environment, check=True)
            return
        # A new process, so that the broker is not this one's child. Python 3.12 warns of threads: they hold no lock that is used here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                os.environ.clear()
                os.environ.update(self.environment)
                code = start_detached(BrokerOptions(socket=self.socket))
                sys.stderr.flush()
                os._exit(code)
            finally:
                os._exit(1)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise subprocess.CalledProcessError(code, "start_detached")

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run `jupyter gpu` in this world, within this process: its imports take longer than most commands."""
        printed, complaint = io.StringIO(), io.StringIO()
        with (
            patch.dict(os.environ, self.environment, clear=True),
            redirect_stdout(printed),
            redirect_stderr(complaint),
        ):
            code = main(words)
        return subprocess.CompletedProcess(words, code, printed.getvalue(), complaint.getvalue())

    def broker_pid(self) -> int | None:
        with self.client() as client, suppress(BrokerUnavailableError):
            return client.ping().pid
        return None

    def kill_broker(self) -> None:
        pid = self.broker_pid()
        assert pid is not None, "no broker runs"
        self.end(pid, signal.SIGKILL)

    @staticmethod
    def end(pid: int, number: int) -> None:
        """Signal a process and wait (pidfd) until it has ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            with select.epoll() as poll:
                poll.register(pidfd, select.EPOLLIN)
                assert poll.poll(DEADLINE_S), f"process {pid} did not end"
        finally:
            os.close(pidfd)

    def status(self) -> HostStatus:
        with self.client() as client:
            return client.status()

    def lease(self, kernel_id: str) -> LeaseStatus:
        found = [lease for lease in self.status().leases if lease.kernel_id == kernel_id]
        assert len(found) == 1, f"{len(found)} leases of kernel {kernel_id}"
        return found[0]

    def await_state(self, kernel_id: str, state: str) -> LeaseStatus:
        def ask() -> LeaseStatus | None:
            lease = self.lease(kernel_id)
            return lease if lease.state == state else None

        return until(ask, f"kernel {kernel_id} becomes {state}")

    def suspend_for_others(self, kernel_id: str) -> None:
        """Let an idle kernel be suspended without its user's request: its device is emptied for a moment."""
        with self.emptied(kernel_id):
            pass

    @contextmanager
    def emptied(self, kernel_id: str) -> Iterator[None]:
        """Suspend an idle kernel without its user's request, and keep its device empty for the block."""
        device_id = self.lease(kernel_id).lease.device_id or ""
        with self.client() as client:
            client.drain(device_id, DrainRequest())
            self.await_state(kernel_id, "suspended")
            yield
            client.undrain(device_id)

    def await_restart(self, kernel_id: str, old: int | None) -> LeaseStatus:
        """Wait until the kernel's lease has another process than this one: Jupyter has restarted the kernel."""

        def ask() -> LeaseStatus | None:
            lease = self.lease(kernel_id)
            return lease if lease.pid not in (None, old) else None

        return until(ask, f"kernel {kernel_id} is started again")

    def logs(self) -> dict[str, str]:
        files = [
            Path(self.socket).with_name("broker.log"),
            Path(self.socket).with_name("broker.err"),
            self.folder / "server.err",
        ]
        return {file.name: file.read_text()[-20_000:] for file in files if file.exists()}

    def close(self) -> None:
        """Stop all brokers and remove everything; fails if a process is left that still uses the simulated host."""
        self.end_broker()
        shutil.rmtree(self.folder)

    def _on_socket(self) -> list[int]:
        """Return the processes whose command line names this world's socket: brokers and their attendants."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if os.fsencode(self.socket) in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found

    def end_broker(self) -> None:
        """Stop the broker and remove the simulated host; fails if a process is left that still uses it."""
        while pids := self._on_socket():  # a hub's attendant may have just started another one
            for pid in pids:
                self.end(pid, signal.SIGTERM)
        folder = self.simulated_folder
        if folder.exists():
            with suppress(FileNotFoundError):
                until(lambda: self._destroyed(folder), "the simulated host has no users")

    @staticmethod
    def _destroyed(folder: Path) -> bool:
        try:
            destroy(folder)
        except SimulatedHostError:
            return not folder.exists()
        return True


@contextmanager
def new_world(simulate: str = "1x1GiB") -> Iterator[World]:
    world = World.new(simulate)
    try:
        yield world
    finally:
        world.close()


class Server:
    """A real Jupyter server in a separate process, driven over HTTP and websockets."""

    def __init__(
        self,
        world: World,
        *arguments: str,
        extensions: Mapping[str, bool] = NO_EXTENSIONS,
        cwd: Path | None = None,
    ) -> None:
        self.world = world
        self.token = secrets.token_hex(16)
        self._refused = False
        self._notebooks: list[Notebook] = []
        with (world.folder / "server.err").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-X",
                    "faulthandler",  # for `stop`
                    "-m",
                    "jupyter_server",
                    "--no-browser",
                    "--allow-root",
                    "--ServerApp.port=0",
                    f"--ServerApp.jpserver_extensions={dict(extensions)}",
                    f"--IdentityProvider.token={self.token}",
                    f"--ServerApp.root_dir={world.notebooks}",
                    # A test reads a notebook's websocket only when it needs something; until then pings get no answer.
                    "--ServerApp.tornado_settings={'ws_ping_interval': 0}",
                    *arguments,
                ],
                env=world.environment,
                cwd=cwd,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        info = world.folder / "run" / f"jpserver-{self.process.pid}.json"
        try:
            self.url: str = until(lambda: self._address(info), "the server writes its address")
            until(self._listens, "the server listens there")  # it writes the address first
        except BaseException:  # on a slow machine; no caller has the process yet
            self.process.kill()
            self.process.wait()
            raise

    @staticmethod
    def _address(info: Path) -> str | None:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            return str(json.loads(info.read_text())["url"])
        return None

    def _listens(self) -> bool:
        try:
            self.request("GET", "api")
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            return False
        return True

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        """One REST call; raises urllib's HTTPError."""
        request = urllib.request.Request(  # noqa: S310 - loopback
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:  # noqa: S310
            text = reply.read()
        return json.loads(text) if text else None

    def start(self, kernelspec: str) -> "Notebook":
        """Start a kernel and connect to it as a notebook does."""
        try:
            kernel = self.request("POST", "api/kernels", {"name": kernelspec, "path": ""})
        except urllib.error.HTTPError:
            self._refused = True
            raise
        return self.connect(kernel["id"])

    def connect(self, kernel_id: str) -> "Notebook":
        """Connect to a running kernel; the connection ends with the server at the latest."""
        notebook = Notebook(self, kernel_id)
        self._notebooks.append(notebook)
        return notebook

    @property
    def reusable(self) -> bool:
        """Whether it runs, and has started all its kernels."""
        return self.process.poll() is None and not self._refused

    def hang_up(self) -> None:
        for notebook in self._notebooks:
            notebook.close()
        self._notebooks.clear()

    def clear(self) -> None:
        """Shut every kernel down, and hang up."""
        self.hang_up()
        for session in self.request("GET", "api/sessions"):
            self.request("DELETE", f"api/sessions/{session['id']}")
        for kernel in self.request("GET", "api/kernels"):
            self.request("DELETE", f"api/kernels/{kernel['id']}")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the server and reap it. Raises AssertionError with its last log lines if it does not end."""
        self.hang_up()
        if self._refused and self.process.poll() is None:
            # A Jupyter server that once failed to start a kernel never ends on a signal while others live: it looks for that one.
            for kernel in self.request("GET", "api/kernels"):
                self.request("DELETE", f"api/kernels/{kernel['id']}")
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # its fault handler writes the stacks of its threads
            self.process.wait(DEADLINE_S)
            log = (self.world.folder / "server.err").read_text(errors="replace")
            raise AssertionError(
                f"no end {DEADLINE_S} s after signal {number}; its log ends with:\n{log[-8000:]}"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Reply:
    """What one cell answered."""

    def __init__(self) -> None:
        self.status = ""
        self.error = ""
        self.text = ""  # stdout and stderr
        self.data: list[dict[str, Any]] = []  # display data and results, updates included, in order


class Notebook:
    """One kernel over its websocket. `run` sends a cell and waits for it; `send` does not wait."""

    def __init__(self, server: Server, kernel_id: str) -> None:
        self.server = server
        self.kernel_id = kernel_id
        self.session = uuid.uuid4().hex
        self.socket = self._connected()

    def _connected(self) -> websocket.WebSocket:
        """A websocket of this session: the server answers on it only when it receives what the kernel publishes."""
        address = self.server.url.replace("http", "ws", 1)
        return websocket.create_connection(
            f"{address}api/kernels/{self.kernel_id}/channels?session_id={self.session}",
            header=[f"Authorization: token {self.server.token}"],
            timeout=DEADLINE_S,
        )

    def send(self, code: str, *, silent: bool = False, stdin: bool = False) -> str:
        """Send a cell and return its message id. With `stdin` it may ask for input."""
        msg_id = uuid.uuid4().hex
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "allow_stdin": stdin,
            "stop_on_error": True,
        }
        self._send("shell", "execute_request", msg_id, content)
        return msg_id

    def _send(self, channel: str, kind: str, msg_id: str, content: Mapping[str, Any]) -> None:
        header = {
            "msg_id": msg_id,
            "msg_type": kind,
            "username": "test",
            "session": self.session,
            "version": "5.3",
            "date": "",
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": channel}
        self.socket.send(json.dumps(message))

    def messages(self, msg_id: str) -> Iterator[dict[str, Any]]:
        """Every message about this one, until both its reply and its idle status were seen."""
        replied = idle = False
        while not (replied and idle):
            message = json.loads(self.socket.recv())
            if (message.get("parent_header") or {}).get("msg_id") != msg_id:  # xeus: null without a request
                continue
            yield message
            replied = replied or message["header"]["msg_type"].endswith("_reply")
            idle = idle or message["content"].get("execution_state") == "idle"

    def wait(self, msg_id: str) -> Reply:
        reply = Reply()
        for message in self.messages(msg_id):
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                reply.text += content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                reply.data.append(content["data"])
            elif kind == "execute_reply":
                reply.status = content["status"]
                if reply.status == "error":
                    reply.error = f"{content['ename']}: {content['evalue']}"
        return reply

    def prompted(self) -> str:
        """Read on until a cell asks for input, and return its prompt."""
        return str(self.await_message("input_request")["prompt"])

    def await_message(self, kind: str, msg_id: str = "") -> dict[str, Any]:
        """Read on until a message of this kind comes, such as `display_data`, about that one if given, and return its content."""
        while True:
            message = json.loads(self.socket.recv())
            parent = (message.get("parent_header") or {}).get("msg_id")
            if message["header"]["msg_type"] == kind and msg_id in ("", parent):
                content: dict[str, Any] = message["content"]
                return content

    def answer(self, text: str) -> None:
        self._send("stdin", "input_reply", uuid.uuid4().hex, {"value": text, "status": "ok"})

    def shows(self, text: str) -> str:
        """Run an empty cell, and return the first message that has the text: in its output, or beneath it once it has ended."""
        # As a front end does: until a server has found a kernel's IOPub channel it drops what the kernel shows, and a notice comes once.
        # It does not wait for that channel if it takes the kernel for busy, such as one that died in a cell.
        asked, listens = set[str](), False
        while not listens:
            asked.add(msg_id := uuid.uuid4().hex)
            self._send("shell", "kernel_info_request", msg_id, {})
            while "kernel_info_reply" not in (message := str(self.socket.recv())):
                if text in message:
                    return message
                about = json.loads(message)
                listens = listens or (about["channel"] == "iopub" and about["parent_header"].get("msg_id") in asked)
        self.send("pass")
        while text not in (message := str(self.socket.recv())):
            pass
        return message

    def ask(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Send another kind of request on the shell channel, such as `complete_request`, and return its reply's content."""
        msg_id = uuid.uuid4().hex
        self._send("shell", kind, msg_id, content)
        return self._reply(msg_id)

    def _reply(self, msg_id: str) -> dict[str, Any]:
        (reply,) = [message for message in self.messages(msg_id) if message["header"]["msg_type"].endswith("_reply")]
        answer: dict[str, Any] = reply["content"]
        return answer

    def debug(self, command: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request of the debugger's protocol, as JupyterLab's debugger does, and return the reply."""
        return self._reply(self.send_debug(command, arguments))

    def send_debug(self, command: str, arguments: Mapping[str, Any] | None = None) -> str:
        msg_id = uuid.uuid4().hex
        request = {"type": "request", "seq": 1, "command": command, "arguments": arguments or {}}
        self._send("control", "debug_request", msg_id, request)
        return msg_id

    def run(self, code: str) -> Reply:
        return self.wait(self.send(code))

    def must(self, code: str) -> Reply:
        reply = self.run(code)
        assert reply.status == "ok", f"{code!r} ended with {reply.status} {reply.error}\n{reply.text}"
        return reply

    def interrupt(self) -> None:
        self.server.request("POST", f"api/kernels/{self.kernel_id}/interrupt")

    def restart(self) -> None:
        """Restart the kernel, and connect again as JupyterLab does: the old connection may miss what the new process publishes first."""
        self.server.request("POST", f"api/kernels/{self.kernel_id}/restart")
        self.socket.close()
        self.socket = self._connected()

    def shut_down(self) -> None:
        self.server.request("DELETE", f"api/kernels/{self.kernel_id}")
        self.close()

    def close(self) -> None:
        self.socket.close()
