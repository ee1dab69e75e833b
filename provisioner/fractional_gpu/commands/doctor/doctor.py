"""`jupyter gpu doctor`: one screen, a line for each check with what was found and what to do.

Rules: nothing is changed and no broker is started. Checkpointing is tried on a process of the doctor's own, if there is a device and no
broker manages it. No GPU and no driver are a warning. A check that fails to run says so; it does not end the others.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from fractional_gpu.commands.doctor.checkpoint import check_claims, claim_and_try, findings_of
from fractional_gpu.commands.doctor.installation import (
    broker_pid,
    check_broker,
    check_ledgers,
    check_settings,
    check_simulation,
    check_versions,
)
from fractional_gpu.commands.doctor.jupyter import check_cullers, check_kernelspecs
from fractional_gpu.commands.doctor.memory import check_huge_pages, check_memory, check_oom, check_swap
from fractional_gpu.commands.doctor.nvidia import NO_GPU, check_nvidia, check_pools
from fractional_gpu.commands.doctor.report import (
    Finding,
    Severity,
    as_json,
    exit_code,
    ok,
    problem,
    render,
    write_bundle,
)
from fractional_gpu.commands.terminal.connection import add_socket_argument
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import say, terminal_width, write
from fractional_gpu.core.units import format_memory, plural
from fractional_gpu.gpu.interface import DeviceInfo, GPUError
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from fractional_gpu.gpu.open import NVIDIA, backend_name, open_monitor
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from fractional_gpu.jupyter.kernelspecs import InstalledSpec, list_installed

EPILOG = """\
examples:
  jupyter gpu doctor
  jupyter gpu doctor --json             one object: {"ok": ..., "worst": ..., "findings": [...]}
  jupyter gpu doctor --no-try           do not try a checkpoint (it takes some seconds)
  jupyter gpu doctor --bundle for-support.tar.gz
  JUPYTER_GPU_SIMULATE=1x2GiB jupyter gpu doctor

Exit code 0: it works, perhaps with warnings. 1: something cannot work.
"""
_EXAMINING = "examining this machine ..."
_PROBE_HOST = "1x256MiB"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Examine the machine, the driver, the broker and Jupyter, and say what to do. Changes nothing."
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-try", action="store_true", help="do not try a checkpoint on a process of our own")
    parser.add_argument("--bundle", metavar="FILE", type=Path, help="write an archive for support, without secrets")
    add_socket_argument(parser)


def run(options: argparse.Namespace) -> int:
    findings: list[Finding] = []
    with Progress(_EXAMINING, blocks=True, silent=True) as progress:
        for finding in examine(options.socket, try_it=not options.no_try):
            findings.append(finding)
            progress.what = f"{_EXAMINING} {plural(len(findings), 'check')} made"
        then = next_step(findings, [] if exit_code(findings) else list_installed())
    if options.json:
        sys.stdout.write(as_json(findings, then))
    else:
        write(render(findings, then, terminal_width(sys.stdout)))
    if options.bundle is not None:
        names = write_bundle(options.bundle, findings, options.socket)
        say(f"{options.bundle}: {', '.join(names)}. Read it before you send it.", sys.stderr)
    return exit_code(findings)


def next_step(findings: Sequence[Finding], specs: Sequence[InstalledSpec]) -> str:
    """Return the one thing to do now: mend the first error, see it work, install kernels, or use one that can start."""
    wrong = next((one for one in findings if one.severity is Severity.ERROR), None)
    if wrong is not None:
        return f"mend the error of the check `{wrong.check}`: {wrong.advice}; then run `jupyter gpu doctor` again."
    has_gpu = not any(one.check == "driver" and one.finding.startswith(NO_GPU) for one in findings)
    starts = [spec for spec in specs if (has_gpu or spec.simulated) and spec.shadowed_by is None]
    if starts:
        where = "VS Code or another program" if starts[0].launcher else "JupyterLab (`jupyter lab`) or Notebook"
        return f"start {where} and choose the kernel {starts[0].display_name!r}; `jupyter gpu status --watch` shows who is on the GPU."
    if has_gpu:
        return "`jupyter gpu kernels install` puts the kernels into the launcher of this environment's JupyterLab."
    return "`jupyter gpu demo` shows two notebooks take turns on a simulated GPU, and `jupyter gpu lab --simulate 1x2GiB` lets you try it."


def examine(socket: str | None, *, try_it: bool) -> Iterator[Finding]:
    """Make every check. `try_it`: also the trial of a checkpoint, which takes seconds."""
    yield from check_versions()
    simulate = os.environ.get("JUPYTER_GPU_SIMULATE")
    simulation = list(check_simulation(simulate))
    yield from simulation
    settings, said = check_settings()
    yield from said
    if simulate:
        devices: tuple[DeviceInfo, ...] = ()
        if exit_code(simulation) == 0:
            yield from _try_simulated() if try_it else ()
    elif settings is not None and settings.device_kind not in ("", NVIDIA):
        devices = ()
        yield _check_kind(settings.device_kind)
    else:
        nvidia = check_nvidia()
        devices = nvidia.devices
        yield from nvidia.findings
        yield from _try_real(devices) if try_it and devices else ()
    yield from _made("host-memory", lambda: check_memory(devices, settings))
    yield from _made("huge-pages", check_huge_pages)
    yield from _made("swap", check_swap)
    if not simulate:
        yield from check_pools(settings, devices)
    path, said = check_broker(socket)
    yield from said
    pid = broker_pid(path)
    yield from _made("claims", lambda: check_claims(devices, pid))
    yield from _made("oom", lambda: check_oom(pid))
    if path is not None:
        yield from _made("ledger", lambda: check_ledgers(path, settings))
    yield from _made("kernelspecs", lambda: check_kernelspecs(settings))
    yield from _made("cullers", check_cullers)


def _made(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Make a check. One that fails does not end the others."""
    try:
        yield from check()
    except (OSError, RuntimeError) as error:
        yield problem(name, f"it cannot be examined: {error}", "mend that; without a home folder, set HOME to one")


def _check_kind(name: str) -> Finding:
    """Open the devices of another package's kind. Checkpointing is not tried: only a program of that kind could be its subject."""
    try:
        with closing(open_monitor(backend_name(name))) as monitor:
            devices = monitor.devices()
    except GPUError as error:
        return problem("devices", str(error), "mend that: no broker starts before")
    listed = ", ".join(f"{device.name} ({format_memory(device.memory_mib)})" for device in devices)
    return ok("devices", f"of the kind {name!r}: {listed or 'none'}; whether they can be checkpointed was not tried")


def _try_real(devices: tuple[DeviceInfo, ...]) -> list[Finding]:
    with closing(NvidiaMonitor()) as monitor:
        return findings_of(claim_and_try(NVIDIA, monitor, devices), kind=monitor.kind)


def _try_simulated() -> list[Finding]:
    """Try it on a temporary simulated host, not on a broker's."""
    with tempfile.TemporaryDirectory(prefix="jupyter-gpu-doctor-") as folder:
        host = Path(folder, "host")
        try:
            create(host, _PROBE_HOST)
        except SimulatedHostError as error:
            return [
                problem("checkpoint", f"no simulated device can be had: {error}", "make room in the temporary folder")
            ]
        try:
            with closing(SimulatedMonitor(host)) as monitor:
                return findings_of(claim_and_try(f"simulated:{host}", monitor, monitor.devices()), kind=monitor.kind)
        finally:
            with suppress(SimulatedHostError):
                destroy(host)
