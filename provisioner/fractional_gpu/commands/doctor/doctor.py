"""`jupyter gpu doctor` and `jupyter gpu node doctor` run checks and print a line of advice for each finding.

They change nothing and start no broker, but they do checkpoint a test process on a device that no broker manages. A missing GPU or driver
is a warning. If a check can't run, the report says so, and the other checks still run.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from fractional_gpu.client.http import claim_holder
from fractional_gpu.commands.doctor import machine, setup, slurm
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
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import say, terminal_width, write
from fractional_gpu.config import Settings
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
  jupyter gpu doctor --no-try           skip the trial checkpoint, which takes a few seconds
  jupyter gpu doctor --bundle for-support.tar.gz
  JUPYTER_GPU_SIMULATE=1x2GiB jupyter gpu doctor

Exit code 0: everything works, perhaps with warnings. 1: something does not work.
"""
_PROBE_HOST = "1x256MiB"


def configure(parser: Parser) -> None:
    parser.describe(
        "Check the machine, the driver, the broker and Jupyter, and say how to fix problems. Changes nothing.", EPILOG
    )
    parser.flag("--json", "print one JSON object")
    parser.flag("--no-try", "do not checkpoint a test process")
    parser.argument("--bundle", "FILE", "write a support archive, without secrets", type=Path)
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    findings = examine("machine", Subject(options, simulate=os.environ.get("JUPYTER_GPU_SIMULATE")))
    code = show(
        findings, as_json_=options.json, step=next_step(findings, [] if exit_code(findings) else list_installed())
    )
    if options.bundle is not None:
        names = write_bundle(options.bundle, findings, options.socket)
        say(f"{options.bundle}: {', '.join(names)}. Read it before you send it.", sys.stderr)
    return code


def run_node(options: argparse.Namespace) -> int:
    return show(examine("nodes" if options.everywhere else "node", Subject(options)), as_json_=options.json)


def show(findings: Sequence[Finding], *, as_json_: bool, step: str = "") -> int:
    if as_json_:
        sys.stdout.write(as_json(findings, step))
    else:
        write(render(findings, step, terminal_width(sys.stdout)))
    return exit_code(findings)


def next_step(findings: Sequence[Finding], specs: Sequence[InstalledSpec]) -> str:
    wrong = next((one for one in findings if one.severity is Severity.ERROR), None)
    if wrong is not None:
        return f"fix the error found by the check `{wrong.check}`: {wrong.advice}; then run `jupyter gpu doctor` again."
    has_gpu = not any(one.check == "driver" and one.finding.startswith(machine.NO_GPU) for one in findings)
    starts = [spec for spec in specs if (has_gpu or spec.simulated) and spec.shadowed_by is None]
    if starts:
        where = "VS Code or another program" if starts[0].launcher else "JupyterLab (`jupyter lab`) or Notebook"
        return f"start {where} and choose the kernel {starts[0].display_name!r}; `jupyter gpu status --watch` shows who is on the GPU."
    if has_gpu:
        return "`jupyter gpu kernels install` adds the kernels to the launcher of this environment's JupyterLab."
    return "`jupyter gpu demo` shows two notebooks taking turns on a simulated GPU; `jupyter gpu lab --simulate 1x2GiB` lets you try it."


@dataclass
class Subject:
    options: argparse.Namespace
    simulate: str | None = None  # $JUPYTER_GPU_SIMULATE
    devices: Sequence[DeviceInfo] = field(default=(), init=False)  # the real devices, once they were checked
    socket: str | None = field(default=None, init=False)  # set once the broker was checked; None if there can be none

    @cached_property
    def configuration(self) -> tuple[Settings | None, list[Finding]]:
        return setup.check_settings()

    @property
    def settings(self) -> Settings | None:
        return self.configuration[0]

    @property
    def broker_pid(self) -> int | None:
        return None if self.socket is None else claim_holder(self.socket)

    def check_devices(self) -> Iterator[Finding]:
        tries = not self.options.no_try
        if self.simulate:
            if tries and not exit_code(list(setup.check_simulation(self.simulate))):
                yield from _try_simulated()
        elif self.settings is not None and self.settings.device_kind not in ("", NVIDIA):
            yield _check_kind(self.settings.device_kind)
        else:
            nvidia = machine.check_nvidia()
            self.devices = nvidia.devices
            yield from nvidia.findings
            if tries and self.devices:
                with closing(NvidiaMonitor()) as monitor:
                    result = machine.claim_and_try(NVIDIA, monitor, self.devices)
                    yield from machine.findings_of(result, kind=monitor.kind)

    def check_broker(self) -> Iterator[Finding]:
        self.socket, findings = setup.check_broker(self.options.socket)
        yield from findings


class Check(NamedTuple):
    where: str  # `machine`, `node` for a node of a Slurm cluster, or `nodes` for all of them
    name: str
    make: Callable[[Subject], Iterable[Finding]]


CHECKS: Final = (
    Check("machine", "versions", lambda _: setup.check_versions()),
    Check("machine", "simulated", lambda of: setup.check_simulation(of.simulate)),
    Check("machine", "configuration", lambda of: of.configuration[1]),
    Check("machine", "devices", Subject.check_devices),
    Check("machine", "host-memory", lambda of: machine.check_memory(of.devices, of.settings)),
    Check("machine", "huge-pages", lambda _: machine.check_huge_pages()),
    Check("machine", "swap", lambda _: machine.check_swap()),
    Check("machine", "pools", lambda of: () if of.simulate else machine.check_pools(of.settings, of.devices)),
    Check("machine", "broker", Subject.check_broker),
    Check("machine", "claims", lambda of: machine.check_claims(of.devices, of.broker_pid)),
    Check("machine", "oom", lambda of: machine.check_oom(of.broker_pid)),
    Check("machine", "ledger", lambda of: setup.check_ledgers(of.socket, of.settings) if of.socket is not None else ()),
    Check("machine", "kernelspecs", lambda of: setup.check_kernelspecs(of.settings)),
    Check("machine", "workstation", lambda of: setup.check_workstation(of.settings)),
    Check("machine", "cullers", lambda of: setup.check_cullers(of.settings)),
    Check("node", "slurm", lambda of: slurm.check_slurm(of.options)),
    Check("node", "broker", lambda of: slurm.check_broker(of.options)),
    Check("node", "seats", lambda of: slurm.check_seats(of.options)),
    Check("node", "unit", lambda _: slurm.check_unit()),
    Check("nodes", "wrapper", lambda of: slurm.check_everywhere(of.options)),
)


def examine(where: str, subject: Subject) -> list[Finding]:
    what = "examining this machine ..." if where == "machine" else "examining this node ..."
    findings: list[Finding] = []
    with Progress(what, silent=True) as progress:
        for check in CHECKS:
            if check.where != where:
                continue
            try:
                findings.extend(check.make(subject))
            except (OSError, RuntimeError, ValueError) as error:
                advice = "fix this; if you have no home folder, set HOME to another folder"
                findings.append(problem(check.name, f"the check failed: {error}", advice))
            progress.what = f"{what} {plural(len(findings), 'check')} made"
    return findings


def _check_kind(name: str) -> Finding:
    try:
        with closing(open_monitor(backend_name(name))) as monitor:
            devices = monitor.devices()
    except GPUError as error:
        return problem("devices", str(error), "fix this; no broker can start until then")
    listed = ", ".join(f"{device.name} ({format_memory(device.memory_mib)})" for device in devices)
    return ok("devices", f"of kind {name!r}: {listed or 'none'}; checkpointing them was not tried")


def _try_simulated() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="jupyter-gpu-doctor-") as folder:
        host = Path(folder, "host")
        try:
            create(host, _PROBE_HOST)
        except SimulatedHostError as error:
            yield problem("checkpoint", f"no simulated device: {error}", "free some space in the temporary folder")
            return
        try:
            with closing(SimulatedMonitor(host)) as monitor:
                result = machine.claim_and_try(f"simulated:{host}", monitor, monitor.devices())
            yield from machine.findings_of(result, kind=monitor.kind)
        finally:
            with suppress(SimulatedHostError):
                destroy(host)
