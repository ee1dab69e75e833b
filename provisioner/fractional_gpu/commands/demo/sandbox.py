"""Provides a sandbox for the demo, with its own folders, settings, copies of the example notebooks, and broker.

The sandbox neither reads nor writes the user's Jupyter files, and does not use the user's brokers. On exit, even after an error, it ends
the remaining kernels and then the broker, and finally removes the folder.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from fractional_gpu.broker.process.driver_start import simulated_folder
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import IN_WORKLOAD, ensure_broker
from fractional_gpu.commands.broker import end_process
from fractional_gpu.commands.terminal.connection import LONGEST_SOCKET
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.gpu.simulated.host import destroy
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from fractional_gpu.host.wakeups import handling
from fractional_gpu.jupyter.kernelspecs import install
from fractional_gpu.protocol.errors import BrokerUnavailableError

EXAMPLES = ("tenant-a.ipynb", "tenant-b.ipynb", "device.py")
"""The demo's files."""
FRACTION_MILLI = 750  # a device has room for one such kernel at a time
_START_S = 120.0
_IDLE_EXIT = "5m"  # ends the broker of a demo that was killed
_CONFIG = """\
c.GPUBroker.devices = [{device!r}]
c.GPUBroker.pools = {{"default": {{"fractions": ["3/4"], "idle_after": "on-demand"}}}}
"""


def examples_dir() -> Path:
    here = Path(__file__).resolve().parent
    candidates = (here / "examples", here.parents[3] / "examples")
    for folder in candidates:
        if all((folder / name).is_file() for name in EXAMPLES):
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise CommandError(f"the example notebooks are missing (looked in {looked}); reinstall jupyter-fractional-gpu")


def sandbox_environment(root: Path, outside: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in outside.items() if not name.startswith("JUPYTER_GPU_")}
    data = str(root / "data")
    environment |= {
        "JUPYTER_DATA_DIR": data,
        "JUPYTER_PATH": data,  # precedes the environment's own folder, which may have kernels of the same names
        "JUPYTER_RUNTIME_DIR": str(root / "runtime"),
        "JUPYTER_CONFIG_DIR": str(root / "config"),
        "IPYTHONDIR": str(root / "ipython"),
        "JUPYTER_GPU_SOCKET": str(root / "broker.sock"),
        IN_WORKLOAD: "1",  # the broker serves only the sandbox, and ends with it
        "XDG_STATE_HOME": str(root / "state"),  # the broker's ledger
    }
    return environment


class Sandbox:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = str(root / "broker.sock")
        self.notebooks = root / "notebooks"

    def copy_notebooks(self) -> None:
        self.notebooks.mkdir(exist_ok=True)
        for name in EXAMPLES:
            shutil.copyfile(examples_dir() / name, self.notebooks / name)

    def install_kernels(self, *, simulated: bool) -> None:
        install("default", [FRACTION_MILLI], directory=str(self.root / "data" / "kernels"), simulated=simulated)

    def start_broker(self, *, simulate: str | None, device: int | str) -> BrokerClient:
        config = self.root / "config" / "demo_config.py"
        config.write_text(_CONFIG.format(device=device), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--detach"]
        command += ["--socket", self.socket, "--config", str(config), "--idle-exit", _IDLE_EXIT]
        command += ["--simulate", simulate] if simulate else []
        # In a thread, so that an interrupt waits for the start: a broker that is only half started could not be found and stopped.
        with ThreadPoolExecutor(1) as starter:
            return starter.submit(ensure_broker, self.socket, timeout_s=_START_S, command=(command, {})).result()

    def close(self) -> None:
        with BrokerClient(self.socket) as client:
            try:
                broker = client.ping().pid
                kernels = [lease.pid for lease in client.status().leases if lease.pid is not None]
            except BrokerUnavailableError:
                broker, kernels = None, []
        for pid in kernels:
            end_process(pid, signal.SIGKILL)
        if broker is not None:
            end_process(broker)
        with suppress(SimulatedHostError):  # the broker has removed the host
            destroy(simulated_folder(self.socket))


@contextmanager
def open_sandbox(*, keep: bool) -> Iterator[Sandbox]:
    root = Path(tempfile.mkdtemp(prefix="jupyter-gpu-demo-"))
    with ExitStack() as stack:
        if not keep:
            stack.callback(shutil.rmtree, root)
        sandbox = Sandbox(root)
        if len(os.fsencode(sandbox.socket)) > LONGEST_SOCKET:
            raise CommandError(
                f"the path of the temporary folder {root.parent} is too long for a socket; set TMPDIR to a shorter one"
            )
        stack.enter_context(_environment(sandbox_environment(root, os.environ)))
        for name in ("data", "runtime", "config", "ipython"):
            (root / name).mkdir(mode=0o700)
        sandbox.copy_notebooks()
        stack.callback(sandbox.close)
        yield sandbox


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Temporarily replace this process's environment, for libraries that start kernels."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def interrupt_on_termination() -> AbstractContextManager[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, even in a background command whose shell ignores SIGINT."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    return handling({signal.SIGTERM: interrupt, signal.SIGHUP: interrupt})
