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
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.demo.monitor import Sampler, Watcher
from fractional_gpu.commands.demo.report import (
    DemoDevice,
    DemoKernel,
    outcome_as_json,
    render_outcome,
    what_is_wrong,
)
from fractional_gpu.commands.demo.sandbox import Sandbox, ending_as_interrupt, open_sandbox
from fractional_gpu.commands.terminal.errors import CommandError, UsageError
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.gpu.open import open_monitor
from fractional_gpu.gpu.simulated.host import parse_devices
from fractional_gpu.gpu.simulated.store import SimulatedHostError

if TYPE_CHECKING:
    from fractional_gpu.commands.demo.notebook_runner import Tenant

__all__ = ["checked_simulate", "configure", "need_packages", "run"]

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


class _Ground(NamedTuple):
    """What the demonstration stands on: a running broker, and its device."""

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
    need_packages("nbclient", "nbformat", *([] if options.check else ["jupyterlab"]))
    simulate = checked_simulate(options.simulate or os.environ.get("JUPYTER_GPU_SIMULATE") or None)
    with ending_as_interrupt(), open_sandbox(keep=options.keep) as sandbox:
        if options.keep:
            _tell(f"the folder {sandbox.root} stays when this ends")
        ground = _prepare(sandbox, simulate)
        kernels = _run_notebooks(sandbox, ground.broker)
        if options.json:
            print(json.dumps(outcome_as_json(ground.device, kernels)), flush=True)
        else:
            print(render_outcome(ground.device, kernels), end="", flush=True)
        if not options.check:
            _open_lab(sandbox)
    return 1 if what_is_wrong(kernels) else 0


def need_packages(*names: str) -> None:
    """Raise CommandError if one of the packages that notebooks are run with is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {' and '.join(missing)}: pip install 'jupyter-fractional-gpu[lab]'")


def checked_simulate(text: str | None) -> str | None:
    """Return the description of simulated devices. Raises UsageError if it is none."""
    if text is not None:
        try:
            parse_devices(text)
        except SimulatedHostError as error:
            raise UsageError(str(error)) from error
    return text


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _prepare(sandbox: Sandbox, simulate: str | None) -> _Ground:
    """Start the broker, on a real GPU where one will do, and install the kernelspec that the notebooks name."""
    ground = None if simulate else _real_ground(sandbox)
    if ground is None:
        simulate = simulate or SIMULATED
        _tell(f"Using a simulated GPU ({simulate}): its bytes are real and are really moved, its speed says nothing.")
        os.environ["JUPYTER_GPU_SIMULATE"] = simulate  # for a broker that has to be started again
        ground = _ground(sandbox.start_broker(simulate=simulate, device=0))
    sandbox.install_kernels(simulated=ground.device.simulated)
    return ground


def _ground(broker: BrokerClient) -> _Ground:
    status = broker.status()
    device = status.devices[0]  # the sandbox's broker has exactly one
    return _Ground(broker, DemoDevice(name=device.name, simulated=status.simulated, memory_mib=device.memory_mib))


def _real_ground(sandbox: Sandbox) -> _Ground | None:
    """Start the broker on the first real GPU that will do. None, after a word about why, if there is none."""
    if importlib.util.find_spec("torch") is None:
        _tell("torch, which the notebooks use on a real GPU, is not installed here.")
        return None
    try:
        monitor = open_monitor("nvidia")
        try:
            devices = monitor.devices()
        finally:
            monitor.close()
    except GPUError as error:
        _tell(f"The GPUs of this machine cannot be used: {error}")
        return None
    if not devices:
        _tell("This machine has no GPU.")
    for device in devices:
        if not device.checkpointable:
            _tell(f"{device.name} cannot be shared: {device.why_not}")
            continue
        try:
            return _ground(sandbox.start_broker(simulate=None, device=device.device_id))
        except CommandError as error:
            _tell(f"{device.name} cannot be used: {error}")
    return None


def _run_notebooks(sandbox: Sandbox, broker: BrokerClient) -> list[DemoKernel]:
    """Run the notebooks in turns, with a running commentary, and return what became of their kernels."""
    from fractional_gpu.commands.demo.notebook_runner import new_tenant, run_in_turns, save  # noqa: PLC0415 - nbclient may be missing

    began = time.monotonic()

    def tell(sentence: str) -> None:
        _tell(f"{time.monotonic() - began:6.1f} s  {sentence}")

    tenants = [new_tenant(sandbox.notebooks / name, sandbox.root / f"{name}.log") for name in NOTEBOOKS]
    sampler = Sampler({tenant.kernel_id: tenant.name for tenant in tenants})
    kernels: list[DemoKernel] = []
    with Watcher(sandbox.socket, sampler, tell):
        asyncio.run(run_in_turns(tenants, tell, lambda: kernels.extend(_what_became_of(tenants, broker, sampler))))
    for tenant in tenants:
        save(tenant, sandbox.root / "executed")
    return kernels


def _what_became_of(tenants: Sequence["Tenant"], broker: BrokerClient, sampler: Sampler) -> list[DemoKernel]:
    """Return the outcome, while the kernels are alive. Raises CommandError if the broker does not know one of them."""
    from fractional_gpu.commands.demo.notebook_runner import result_of  # noqa: PLC0415 - nbclient may be missing

    leases = {lease.kernel_id: lease for lease in broker.status().leases}
    kernels = []
    for tenant in tenants:
        lease = leases.get(tenant.kernel_id)
        if lease is None:
            raise CommandError(f"{tenant.name}: the broker does not know its kernel; it ran without a share of the GPU")
        result = result_of(tenant)
        kernels.append(
            DemoKernel(
                name=tenant.name,
                kernelspec=tenant.kernelspec,
                fraction_milli=lease.fraction_milli,
                state=lease.state,
                suspends=lease.suspends,
                resumes=lease.resumes,
                moved_s=sampler.moved_s(tenant.kernel_id),
                compared_bytes=int(result["bytes"]),
                state_intact=result["intact"] is True,
            )
        )
    return kernels


def _open_lab(sandbox: Sandbox) -> None:
    """Open JupyterLab on fresh copies of the notebooks; returns when it has ended. Ctrl-C ends it without a question."""
    sandbox.copy_notebooks()
    _tell("Opening JupyterLab: open both notebooks and run their cells in turn. Ctrl-C here ends it and tidies up.")
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
    """Return when JupyterLab has ended; it is killed if it takes too long over it."""
    try:
        lab.wait(_END_S)
    except subprocess.TimeoutExpired:
        lab.kill()
        lab.wait()
