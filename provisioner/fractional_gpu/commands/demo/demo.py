"""`jupyter gpu demo` runs two notebooks that do not fit on one GPU together. They take turns on it, and no data is lost."""

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.demo.sandbox import Sandbox, interrupt_on_termination, open_sandbox
from fractional_gpu.commands.terminal.arguments import Parser, checked_simulate, require_packages
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.render import describe_device
from fractional_gpu.commands.terminal.text import CommandError, Style, fitted, line, say, table, terminal_width, write
from fractional_gpu.core.units import format_fraction, format_gpus, format_memory, plural
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.gpu.open import open_monitor
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.names import state_words
from fractional_gpu.protocol.status import HostStatus, LeaseStatus

if TYPE_CHECKING:
    from rich.text import Text

    from fractional_gpu.commands.demo.notebook_runner import DemoNotebook


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoKernel:
    name: str
    kernelspec: str
    lease: LeaseStatus
    moved_s: float  # how long its memory was being moved
    compared_bytes: int
    state_intact: bool


def find_problems(kernels: Sequence[DemoKernel]) -> list[str]:
    wrong = [f"{kernel.name} lost state" for kernel in kernels if not kernel.state_intact]
    return wrong + [
        f"{one.name} was suspended {plural(one.lease.suspends, 'time')} and resumed {plural(one.lease.resumes, 'time')}, so this run "
        "proves nothing"
        for one in kernels
        if not one.lease.suspends or not one.lease.resumes
    ]


def report_as_json(host: HostStatus, kernels: Sequence[DemoKernel]) -> dict[str, Any]:
    device = host.devices[0]
    return {
        "device": {"name": device.name, "simulated": host.simulated, "memory_mib": device.memory_mib},
        "kernels": [
            {
                "kernelspec": one.kernelspec,
                "fraction_milli": one.lease.spec.fraction_milli,
                "suspends": one.lease.suspends,
                "resumes": one.lease.resumes,
                "state_intact": one.state_intact,
            }
            for one in kernels
        ],
        "ok": not find_problems(kernels),
    }


def render_report(host: HostStatus, kernels: Sequence[DemoKernel], width: int | None = None) -> "list[Text]":
    header = ("KERNEL", "GPU", "STATE", "SUSPENDED", "RESUMED", "MOVING", "COMPARED", "INTACT")
    rows = [
        (
            kernel.name,
            format_fraction(kernel.lease.spec.fraction_milli),
            state_words(kernel.lease.state),
            plural(kernel.lease.suspends, "time"),
            plural(kernel.lease.resumes, "time"),
            f"{kernel.moved_s:.1f} s",
            format_memory(kernel.compared_bytes // 2**20),
            "yes" if kernel.state_intact else ("NO", Style.WRONG),
        )
        for kernel in kernels
    ]
    wrong = find_problems(kernels)
    asked = sum(kernel.lease.spec.fraction_milli for kernel in kernels)
    good = f"Together they asked for {format_gpus(asked)}, and every byte survived."
    conclusion = line(("Something is wrong", Style.WRONG), f": {'; '.join(wrong)}.") if wrong else line(good)
    device = host.devices[0]  # the sandbox's broker has exactly one
    return [
        line(describe_device(device.name, device.memory_mib, simulated=host.simulated)),
        *table(header, rows, width=width),
        *fitted([conclusion], width),
    ]


INTERVAL_S = 0.05
_MOVING = frozenset({"suspending", "resuming"})


class LeaseTracker:
    """Reports when these kernels' leases change state, and adds up how long their memory was being moved."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.moved_s = dict.fromkeys(names, 0.0)
        self._seen: dict[str, tuple[str, float]] = {}  # the state of each kernel's lease, and since when

    def feed(self, now_s: float, leases: Sequence[LeaseStatus]) -> list[str]:
        """Return a sentence for each change of state since the last call. `now_s` may come from any monotonic clock."""
        told: list[str] = []
        for lease in leases:
            if lease.kernel_id in self.names:
                state, since_s = self._seen.setdefault(lease.kernel_id, (lease.state, now_s))
                if state != lease.state:
                    self._seen[lease.kernel_id] = lease.state, now_s
                    self.moved_s[lease.kernel_id] += now_s - since_s if state in _MOVING else 0.0
                    told.append(f"{self.names[lease.kernel_id]}: {_news(lease)}")
        return told


def _news(lease: LeaseStatus) -> str:
    if lease.state == "suspended":
        return f"suspended, {format_memory(lease.lease.saved_mib)} now in host memory"
    return state_words(lease.state)


SIMULATED = "1x1GiB"
NOTEBOOKS = ("tenant-a.ipynb", "tenant-b.ipynb")
_END_S = 30.0

EPILOG = """\
examples:
  jupyter gpu demo                      run the two notebooks, show what happened, then open them in JupyterLab
  jupyter gpu demo --check              stop after the table; exit with 0 if all is well
  jupyter gpu demo --check --json       the same as JSON
  jupyter gpu demo --simulate 1x2GiB    on a simulated GPU even if there is a real one

The demo uses a separate broker and a temporary folder, and removes both at the end, also after Ctrl-C.
If no GPU here can be suspended, it uses a simulated one, and the table says so.
"""


def configure(parser: Parser) -> None:
    parser.describe(
        "Run two notebooks that take turns on one GPU, each with three quarters of it. Nothing is lost.", EPILOG
    )
    parser.flag("--check", "do not open JupyterLab at the end")
    parser.flag("--json", "print one JSON object instead of the table")
    parser.argument(
        "--simulate",
        "COUNTxMEMORY",
        f"use a simulated GPU (default: $JUPYTER_GPU_SIMULATE, else a real one, else {SIMULATED})",
    )
    parser.flag("--keep", "keep the folder with the executed notebooks and the logs")


def run(options: argparse.Namespace) -> int:
    require_packages("nbclient", "nbformat", *([] if options.check else ["jupyterlab"]))
    simulate = checked_simulate(options.simulate or os.environ.get("JUPYTER_GPU_SIMULATE") or None)
    with interrupt_on_termination(), open_sandbox(keep=options.keep) as sandbox:
        if options.keep:
            say(f"keeping the folder {sandbox.root}", sys.stderr, flush=True)
        with Progress("two notebooks take turns on one GPU", silent=True) as progress:
            broker = _prepare(sandbox, simulate, progress.say)
            host = broker.status()
            sandbox.install_kernels(simulated=host.simulated)
            kernels = _run_notebooks(sandbox, broker, progress)
        if options.json:
            print(json.dumps(report_as_json(host, kernels)), flush=True)
        else:
            write(render_report(host, kernels, terminal_width(sys.stdout)), flush=True)
        if not options.check:
            _open_lab(sandbox)
    return 1 if find_problems(kernels) else 0


def _prepare(sandbox: Sandbox, simulate: str | None, tell: Callable[[str], None]) -> BrokerClient:
    broker = None if simulate else _set_up_real(sandbox, tell)
    if broker is None:
        simulate = simulate or SIMULATED
        tell(f"Using a simulated GPU ({simulate}): it moves real bytes, but its timings are meaningless.")
        os.environ["JUPYTER_GPU_SIMULATE"] = simulate  # for a broker that has to be started again
        broker = sandbox.start_broker(simulate=simulate, device=0)
    return broker


def _set_up_real(sandbox: Sandbox, tell: Callable[[str], None]) -> BrokerClient | None:
    if importlib.util.find_spec("torch") is None:
        tell("torch is not installed here; the notebooks need it on a real GPU.")
        return None
    try:
        with closing(open_monitor("nvidia")) as monitor:
            devices = monitor.devices()
    except GPUError as error:
        tell(f"This machine's GPUs cannot be used: {error}")
        return None
    if not devices:
        tell("This machine has no GPU.")
    for device in devices:
        if not device.checkpointable:
            tell(f"{device.name} cannot be shared: {device.why_not}")
            continue
        try:
            return sandbox.start_broker(simulate=None, device=device.device_id)
        except BrokerUnavailableError as error:
            tell(f"{device.name} cannot be used: {error}")
    return None


def _run_notebooks(sandbox: Sandbox, broker: BrokerClient, progress: Progress) -> list[DemoKernel]:
    from fractional_gpu.commands.demo.notebook_runner import read_notebook, run_in_turns, save  # noqa: PLC0415 - nbclient may be missing

    began = time.monotonic()

    def tell(sentence: str) -> None:
        progress.say(f"{time.monotonic() - began:6.1f} s  {sentence}")

    notebooks = [read_notebook(sandbox.notebooks / name, sandbox.root / f"{name}.log") for name in NOTEBOOKS]
    tracker = LeaseTracker({notebook.kernel_id: notebook.name for notebook in notebooks})
    kernels: list[DemoKernel] = []
    over = threading.Event()

    def watch() -> None:
        try:
            with BrokerClient(sandbox.socket) as client:
                while not over.wait(INTERVAL_S):
                    for sentence in tracker.feed(time.monotonic(), client.status().leases):
                        tell(sentence)
        except FractionalGPUError as error:
            tell(f"lost the connection to the broker: {error}")

    def finish() -> None:
        over.set()  # the demo does not show how kernels shut down
        watcher.join()
        kernels.extend(_results_of(notebooks, broker, tracker))

    watcher = threading.Thread(target=watch, name="gpu-demo-monitor", daemon=True)
    watcher.start()
    try:
        asyncio.run(run_in_turns(notebooks, tell, finish, progress.counter("cells")))
    finally:
        over.set()
        watcher.join()
    for notebook in notebooks:
        save(notebook, sandbox.root / "executed")
    return kernels


def _results_of(notebooks: Sequence["DemoNotebook"], broker: BrokerClient, tracker: LeaseTracker) -> list[DemoKernel]:
    from fractional_gpu.commands.demo.notebook_runner import result_of  # noqa: PLC0415 - nbclient may be missing

    leases = {lease.kernel_id: lease for lease in broker.status().leases}
    kernels = []
    for notebook in notebooks:
        lease = leases.get(notebook.kernel_id)
        if lease is None:
            raise CommandError(
                f"{notebook.name}: its kernel is unknown to the broker, so it ran without a share of the GPU"
            )
        result = result_of(notebook)
        kernels.append(
            DemoKernel(
                name=notebook.name,
                kernelspec=notebook.kernelspec,
                lease=lease,
                moved_s=tracker.moved_s[notebook.kernel_id],
                compared_bytes=int(result["bytes"]),
                state_intact=result["intact"] is True,
            )
        )
    return kernels


def _open_lab(sandbox: Sandbox) -> None:
    """Run JupyterLab on fresh copies of the notebooks. Ctrl-C stops it without asking."""
    sandbox.copy_notebooks()
    say(
        "Opening JupyterLab: open both notebooks and run their cells in turn. Ctrl-C here stops it and cleans up.",
        sys.stderr,
        flush=True,
    )
    command = [sys.executable, "-P", "-m", "jupyterlab", f"--ServerApp.root_dir={sandbox.notebooks}"]
    command += ["--ServerApp.answer_yes=True", f"--LabApp.default_url=/lab/tree/{NOTEBOOKS[0]}"]
    command += ["--allow-root"] if os.geteuid() == 0 else []
    lab = subprocess.Popen(command)
    try:
        code = lab.wait()
    except KeyboardInterrupt:  # Ctrl-C in a terminal reaches JupyterLab, too, but a signal from elsewhere does not
        lab.send_signal(signal.SIGTERM)
        code = 0
    finally:
        try:
            lab.wait(_END_S)
        except subprocess.TimeoutExpired:
            lab.kill()
            lab.wait()
    if code != 0:
        raise CommandError(f"JupyterLab exited with code {code}; see its output above")
