"""`jupyter gpu demo`: two notebooks that do not fit on one GPU take turns on it, and every byte is there at the end."""

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.demo.report import (
    DemoDevice,
    DemoKernel,
    LeaseMonitor,
    LeaseTracker,
    find_problems,
    render_report,
    report_as_json,
)
from fractional_gpu.commands.demo.sandbox import Sandbox, interrupt_on_termination, open_sandbox
from fractional_gpu.commands.terminal.arguments import checked_simulate, require_packages
from fractional_gpu.commands.terminal.errors import CommandError
from fractional_gpu.commands.terminal.output import say, terminal_width, write
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.gpu.open import open_monitor

if TYPE_CHECKING:
    from fractional_gpu.commands.demo.notebook_runner import DemoNotebook

SIMULATED = "1x1GiB"
NOTEBOOKS = ("tenant-a.ipynb", "tenant-b.ipynb")
_END_S = 30.0

EPILOG = """\
examples:
  jupyter gpu demo                      run the two notebooks, show what happened, then open them in JupyterLab
  jupyter gpu demo --check              stop after the table; the exit code says whether all is well
  jupyter gpu demo --check --json       the same for programs
  jupyter gpu demo --simulate 1x2GiB    on a simulated GPU even if there is a real one

Everything is in a temporary folder of its own, with a broker of its own, and is removed at the end, also after Ctrl-C.
On a machine without a GPU whose memory can be saved, a simulated one takes its place, and the table says so.
"""


class _Setup(NamedTuple):
    """A running broker and its device."""

    broker: BrokerClient
    device: DemoDevice


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Two notebooks with three quarters of one GPU each take turns on it, and nothing is lost."
    parser.epilog = EPILOG
    parser.add_argument("--check", action="store_true", help="do not open JupyterLab at the end")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--simulate",
        metavar="COUNTxMEMORY",
        help=f"use a simulated GPU (default: $JUPYTER_GPU_SIMULATE, else a real one, else {SIMULATED})",
    )
    parser.add_argument("--keep", action="store_true", help="leave the folder with the executed notebooks and the logs")


def run(options: argparse.Namespace) -> int:
    """Run the demonstration. Exit code 0 only if nothing was lost and both kernels were really suspended and resumed."""
    require_packages("nbclient", "nbformat", *([] if options.check else ["jupyterlab"]))
    simulate = checked_simulate(options.simulate or os.environ.get("JUPYTER_GPU_SIMULATE") or None)
    with interrupt_on_termination(), open_sandbox(keep=options.keep) as sandbox:
        if options.keep:
            say(f"the folder {sandbox.root} stays when this ends", sys.stderr, flush=True)
        with Progress("two notebooks take turns on one GPU", blocks=True, silent=True) as progress:
            setup = _prepare(sandbox, simulate, progress.say)
            kernels = _run_notebooks(sandbox, setup.broker, progress)
        if options.json:
            print(json.dumps(report_as_json(setup.device, kernels)), flush=True)
        else:
            write(render_report(setup.device, kernels, terminal_width(sys.stdout)), flush=True)
        if not options.check:
            _open_lab(sandbox)
    return 1 if find_problems(kernels) else 0


def _prepare(sandbox: Sandbox, simulate: str | None, tell: Callable[[str], None]) -> _Setup:
    """Start the broker, on a real GPU if one is suitable, and install the kernelspec that the notebooks name."""
    setup = None if simulate else _set_up_real(sandbox, tell)
    if setup is None:
        simulate = simulate or SIMULATED
        tell(f"Using a simulated GPU ({simulate}): its bytes are real and are really moved, its speed says nothing.")
        os.environ["JUPYTER_GPU_SIMULATE"] = simulate  # for a broker that has to be started again
        setup = _setup_of(sandbox.start_broker(simulate=simulate, device=0))
    sandbox.install_kernels(simulated=setup.device.simulated)
    return setup


def _setup_of(broker: BrokerClient) -> _Setup:
    status = broker.status()
    device = status.devices[0]  # the sandbox's broker has exactly one
    return _Setup(broker, DemoDevice(name=device.name, simulated=status.simulated, memory_mib=device.memory_mib))


def _set_up_real(sandbox: Sandbox, tell: Callable[[str], None]) -> _Setup | None:
    """Start the broker on the first suitable real GPU. None if there is none, after telling why."""
    if importlib.util.find_spec("torch") is None:
        tell("torch, which the notebooks use on a real GPU, is not installed here.")
        return None
    try:
        monitor = open_monitor("nvidia")
        try:
            devices = monitor.devices()
        finally:
            monitor.close()
    except GPUError as error:
        tell(f"The GPUs of this machine cannot be used: {error}")
        return None
    if not devices:
        tell("This machine has no GPU.")
    for device in devices:
        if not device.checkpointable:
            tell(f"{device.name} cannot be shared: {device.why_not}")
            continue
        try:
            return _setup_of(sandbox.start_broker(simulate=None, device=device.device_id))
        except CommandError as error:
            tell(f"{device.name} cannot be used: {error}")
    return None


def _run_notebooks(sandbox: Sandbox, broker: BrokerClient, progress: Progress) -> list[DemoKernel]:
    """Run the notebooks in turns, print what happens, and return the results of their kernels."""
    from fractional_gpu.commands.demo.notebook_runner import read_notebook, run_in_turns, save  # noqa: PLC0415 - nbclient may be missing

    began = time.monotonic()

    def tell(sentence: str) -> None:
        progress.say(f"{time.monotonic() - began:6.1f} s  {sentence}")

    notebooks = [read_notebook(sandbox.notebooks / name, sandbox.root / f"{name}.log") for name in NOTEBOOKS]
    tracker = LeaseTracker({notebook.kernel_id: notebook.name for notebook in notebooks})
    kernels: list[DemoKernel] = []
    with LeaseMonitor(sandbox.socket, tracker, tell) as monitor:

        def finish() -> None:
            monitor.stop()  # what becomes of kernels that are shut down is no part of the demonstration
            kernels.extend(_results_of(notebooks, broker, tracker))

        asyncio.run(run_in_turns(notebooks, tell, finish, progress.counter("cells")))
    for notebook in notebooks:
        save(notebook, sandbox.root / "executed")
    return kernels


def _results_of(notebooks: Sequence["DemoNotebook"], broker: BrokerClient, tracker: LeaseTracker) -> list[DemoKernel]:
    """Return the kernels' results, while they are alive. Raises CommandError if the broker does not know one of them."""
    from fractional_gpu.commands.demo.notebook_runner import result_of  # noqa: PLC0415 - nbclient may be missing

    leases = {lease.kernel_id: lease for lease in broker.status().leases}
    kernels = []
    for notebook in notebooks:
        lease = leases.get(notebook.kernel_id)
        if lease is None:
            raise CommandError(
                f"{notebook.name}: the broker does not know its kernel; it ran without a share of the GPU"
            )
        result = result_of(notebook)
        kernels.append(
            DemoKernel(
                name=notebook.name,
                kernelspec=notebook.kernelspec,
                fraction_milli=lease.spec.fraction_milli,
                state=lease.state,
                suspends=lease.suspends,
                resumes=lease.resumes,
                moved_s=tracker.moved_s(notebook.kernel_id),
                compared_bytes=int(result["bytes"]),
                state_intact=result["intact"] is True,
            )
        )
    return kernels


def _open_lab(sandbox: Sandbox) -> None:
    """Open JupyterLab on fresh copies of the notebooks; returns when it has ended. Ctrl-C ends it without a question of JupyterLab's."""
    sandbox.copy_notebooks()
    say(
        "Opening JupyterLab: open both notebooks and run their cells in turn. Ctrl-C here ends it and tidies up.",
        sys.stderr,
        flush=True,
    )
    command = [sys.executable, "-P", "-m", "jupyterlab", f"--ServerApp.root_dir={sandbox.notebooks}"]
    command += ["--ServerApp.answer_yes=True", f"--LabApp.default_url=/lab/tree/{NOTEBOOKS[0]}"]
    command += ["--allow-root"] if os.geteuid() == 0 else []
    lab = subprocess.Popen(command)
    try:
        code = lab.wait()
    except KeyboardInterrupt:  # from a terminal it reached JupyterLab as well; from elsewhere it did not
        lab.send_signal(signal.SIGTERM)
        code = 0
    finally:
        _wait_for_end(lab)
    if code != 0:
        raise CommandError(f"JupyterLab ended with exit code {code}; what it wrote above says why")


def _wait_for_end(lab: "subprocess.Popen[bytes]") -> None:
    """Return when JupyterLab has ended; kill it if it takes too long."""
    try:
        lab.wait(_END_S)
    except subprocess.TimeoutExpired:
        lab.kill()
        lab.wait()
