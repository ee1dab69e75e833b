"""`jupyter gpu node doctor`: Slurm's configuration, the scripts, the broker and the agent of this node: finding, and what to change.

Changes nothing. What Slurm itself says (`scontrol show config`, `scontrol show node`) counts; its files are read for what Slurm does not show:
gres.conf, keys that are given twice, and what waits for a restart.
"""

import argparse
import os
import shlex
import socket as socket_module
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fractional_gpu.commands.node.install import FOLDER, WRAPPER, node_files
from fractional_gpu.commands.node.options import add_node_options, counts_of, seats_folder
from fractional_gpu.commands.terminal.output import terminal_width, write
from fractional_gpu.commands.terminal.progress import Progress

if TYPE_CHECKING:
    from fractional_gpu.commands.doctor.report import Finding
    from fractional_gpu.engines.files import NodeFiles
    from fractional_gpu.engines.slurm import Slurm

_ROOT_ONLY = 0o022
EPILOG = """\
examples:
  jupyter gpu node doctor
  jupyter gpu node doctor --json        one object: {"ok": ..., "worst": ..., "findings": [...]}
  jupyter gpu node doctor --everywhere  whether every node has the wrapper: a short job on each; before slurm.conf names it

Exit code 0: it works, perhaps with warnings. 1: something cannot work. Run it as root on a node; nothing is changed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the action and add its arguments."""
    parser.description = "Examine Slurm's configuration, the scripts, the broker and the agent of this node."
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--everywhere",
        action="store_true",
        help="only check that each node of the cluster has the wrapper, by a short job on each",
    )
    parser.add_argument(
        "--folder", metavar="DIR", type=Path, default=FOLDER, help=f"where this node's scripts are (default: {FOLDER})"
    )
    parser.add_argument("--node", metavar="NAME", help="the node's name in Slurm (default: the host's short name)")
    add_node_options(parser)


def run(options: argparse.Namespace) -> int:
    """Examine everything, print it, and return 1 if something cannot work. Raises UsageError."""
    from fractional_gpu.commands.doctor.report import as_json, exit_code, render  # noqa: PLC0415 - not for help texts

    with Progress("examining this node ...", blocks=True, silent=True):
        findings = list(examine(options))
    if options.json:
        sys.stdout.write(as_json(findings))
    else:
        write(render(findings, width=terminal_width(sys.stdout)))
    return exit_code(findings)


def examine(options: argparse.Namespace) -> "Iterator[Finding]":
    """Make every check."""
    from fractional_gpu.commands.doctor.report import problem  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.engine import EngineError  # noqa: PLC0415 - as above
    from fractional_gpu.engines.slurm import Slurm  # noqa: PLC0415 - as above

    counts = counts_of(options.pool)
    slurm = Slurm(options.node or socket_module.gethostname().partition(".")[0])
    if options.everywhere:
        yield from check_everywhere(slurm, slurm.conf().with_name(WRAPPER))
        return
    try:
        config = slurm.config()
    except EngineError as error:
        yield problem("slurmctld", str(error), "start slurmctld, or set SLURM_CONF, and run this again")
    else:
        yield from check_preemption(config)
        yield from check_accounting(slurm, config)
        yield from check_scripts(config)
        yield from _check_hook(options.folder / "prolog", slurm)
        yield from _check_files(slurm, node_files(options))
        yield from _check_node(slurm, list(counts.values()), shards=bool(options.shards))
    yield from _check_broker(options.socket, counts)
    yield from _check_seats(seats_folder(options))
    yield from _check_unit()


# -- Slurm's configuration -----------------------------------------------------------------------------------------------------


def check_preemption(config: Mapping[str, str]) -> "Iterator[Finding]":
    """Check what Slurm does to jobs that others preempt."""
    from fractional_gpu.commands.doctor.report import warning  # noqa: PLC0415 - not for help texts

    mode = config.get("PreemptMode", "")
    for sign, what in (
        ("suspend", "a job that Slurm suspends keeps its share, so this makes no room"),
        ("requeue", "a job that is preempted is started again, and its kernels' variables are lost"),
    ):
        if sign in mode.lower().replace("gang", "suspend"):
            yield warning(
                "preemption", f"PreemptMode is {mode}: {what}", "slurm.conf: PreemptMode=OFF for partitions with shares"
            )


def check_accounting(slurm: "Slurm", config: Mapping[str, str]) -> "Iterator[Finding]":
    """Check whether this node reaches the accounting database: many sites let only the controller do so."""
    from fractional_gpu.commands.doctor.report import note, ok, warning  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.engine import EngineError  # noqa: PLC0415 - as above

    if "slurmdbd" not in config.get("AccountingStorageType", ""):
        yield note(
            "accounting", "there is no accounting database: jobs' figures are in AdminComment while they run only"
        )
        return
    try:
        slurm.ask_accounting()
    except EngineError as error:
        yield warning(
            "accounting",
            f"jobs' last figures do not get into AdminComment at their end: {error}",
            "let this node reach slurmdbd (slurm.conf: AccountingStorageHost and -Port), or give the agent --comment-every never",
        )
    else:
        yield ok("accounting", "jobs' figures go into AdminComment, while they run and at their end")


def check_scripts(config: Mapping[str, str]) -> "Iterator[Finding]":
    """Check that this node has what Slurm runs as Prolog, Epilog and TaskProlog, and that only root can change it."""
    from fractional_gpu.commands.doctor.report import ok, problem  # noqa: PLC0415 - not for help texts

    for path in {Path(config.get(name, "(null)")) for name in ("Prolog", "Epilog", "TaskProlog")} - {Path("(null)")}:
        try:
            status = path.stat()
        except OSError as error:
            yield problem(
                "scripts", f"{path}: {error.strerror}: Slurm drains this node at its next job", "copy it to every node"
            )
            continue
        if status.st_uid != 0 or status.st_mode & _ROOT_ONLY or not status.st_mode & 0o111:
            yield problem(
                "scripts",
                f"{path} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:04o}, and root runs it on every node",
                f"chown root {path}; chmod 755 {path}",
            )
        else:
            yield ok("scripts", f"{path}")


def check_everywhere(slurm: "Slurm", wrapper: Path) -> "Iterator[Finding]":
    """Check by a short job on each node that it has the wrapper. A node that can take no job now is named."""
    from fractional_gpu.commands.doctor.report import ok, problem, warning  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.engine import EngineError  # noqa: PLC0415 - as above

    test = f"test -x {shlex.quote(str(wrapper))} && echo there || echo missing"
    rows = slurm.call("sinfo", "--noheader", "--Node", "--format=%N %R").split()
    there = []
    for node, partition in dict(zip(rows[::2], rows[1::2], strict=True)).items():
        where = (f"--partition={partition}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--immediate=5")
        try:
            found = slurm.call("srun", "--job-name=jupyter-gpu-doctor", "--chdir=/", *where, "sh", "-c", test)
        except EngineError as error:
            yield warning(
                node, f"it takes no job now, so nothing is known of it: {error}", f"look there: test -x {wrapper}"
            )
            continue
        if "there" in found.split():
            there.append(node)
        else:
            yield problem(
                node,
                f"{wrapper} is missing: Slurm drains the node once slurm.conf names it",
                "copy it there, executable",
            )
    if there:
        yield ok("wrapper", f"{wrapper} is on {len(there)} nodes: {', '.join(there)}")


def _check_hook(script: Path, slurm: "Slurm") -> "Iterator[Finding]":
    """Run the Prolog of this node as slurmd does, without a PATH, up to its question to the controller."""
    from fractional_gpu.commands.doctor.report import ok, problem  # noqa: PLC0415 - not for help texts

    environment = {"SLURM_CONF": str(slurm.conf()), "SLURMD_NODENAME": slurm.node}
    try:
        done = subprocess.run(
            [script, "--check"], env=environment, capture_output=True, text=True, timeout=20, check=False
        )
        said = (
            ""
            if done.returncode == 0
            else " ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        yield problem(
            "hook",
            f"{script}, started as slurmd starts it, cannot ask Slurm: {said[:300]}",
            "`jupyter gpu node install --force --slurm-bin DIR`, with the folder of squeue and scontrol",
        )
    else:
        yield ok("hook", f"{script} reaches slurmctld with the environment that slurmd gives it")


def _check_files(slurm: "Slurm", files: "NodeFiles") -> "Iterator[Finding]":
    """Check that Slurm's files give no key twice, and have all that `install` would change in them."""
    from fractional_gpu.commands.doctor.report import note, ok, problem  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.engine import EngineError  # noqa: PLC0415 - as above
    from fractional_gpu.engines.files import KEYS, change_site, site_files  # noqa: PLC0415 - as above

    try:
        confs = site_files(slurm.conf())
        change_site(files, confs, confs[0].path.with_name(WRAPPER), slurm.node, slurm.names)
    except (EngineError, OSError) as error:
        yield problem("slurm.conf", str(error), "`jupyter gpu node install` needs it, too")
        return
    for found in confs[0].twice(KEYS):
        said = " and ".join(f"{one.text.strip()} ({one.place})" for one in found)
        yield problem("slurm.conf", f"{said}: Slurm takes the last one only", "make one line of them")
    for conf in confs:
        changes = [
            line for line in conf.diff().splitlines() if line[:1] in ("+", "-") and line[1:3] not in ("++", "--")
        ]
        if not conf.path.exists():
            yield note(
                conf.path.name, f"{conf.path} is not on this node: with configless Slurm it lies at the controller"
            )
        elif changes:
            yield problem(
                conf.path.name,
                f"shares need changes: {'; '.join(changes)}",
                "`jupyter gpu node install` prints them as a diff",
            )
        else:
            yield ok(conf.path.name, "it has what shares need")


def _check_node(slurm: "Slurm", counts: list[str], *, shards: bool) -> "Iterator[Finding]":
    from fractional_gpu.commands.doctor.report import note, ok, problem, warning  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.engine import EngineError  # noqa: PLC0415 - as above
    from fractional_gpu.engines.slurm import CLOSED, OPEN, parse_gres, total_of  # noqa: PLC0415 - as above
    from fractional_gpu.protocol.nodes import parse_summary  # noqa: PLC0415 - as above

    try:
        fields = slurm.fields()
        there = parse_gres(fields.get("Gres", ""))
    except EngineError as error:
        yield problem("node", str(error), "give the node's name in slurm.conf with --node")
        return
    state = fields.get("State", "UNKNOWN")
    if any(sign in state for sign in ("UNKNOWN", "DOWN", "FAIL", "INVAL", "NOT_RESPONDING", "*")):
        yield problem(
            "node",
            f"node {slurm.node} takes no jobs, its state is {state}: {fields.get('Reason', 'its slurmd has not registered')}",
            "start slurmd there (systemctl status slurmd); its log says why it does not register",
        )
    elif "DRAIN" in state:
        yield warning(
            "node",
            f"node {slurm.node} is drained: {fields.get('Reason', 'no reason is given')}",
            f"scontrol update nodename={slurm.node} state=resume",
        )
    if total_of(there, "shard"):
        yield note(
            "node",
            f"node {slurm.node} has {fields['Gres']}: Slurm cannot change counts of a node with shards, so they stay as they are, and "
            "each job stays on the GPU that Slurm chose"
            + ("" if shards else "; give --shards POOL to agent, Prolog and Epilog"),
        )
    elif missing := [name for name in counts if not {f"{name}:{OPEN}", f"{name}:{CLOSED}"} <= there.keys()]:
        yield problem(
            "node",
            f"node {slurm.node} has {fields.get('Gres', '(null)')}, without the open and the closed type of {', '.join(missing)}",
            f"`jupyter gpu node install` says what to change",
        )
    elif "DRAIN" not in state:
        yield ok(
            "node", f"node {slurm.node} ({state}) has {fields['Gres']}, in use: {fields.get('GresUsed', 'unknown')}"
        )
    try:
        summary = parse_summary(fields.get("Extra", ""))
    except ValueError:
        yield warning(
            "agent", "the agent has published no summary in the node's Extra", "systemctl status jupyter-gpu-agent"
        )
        return
    if summary.problem:
        yield warning("agent", f"the agent says: {summary.problem}", "systemctl status jupyter-gpu")
    else:
        free = ", ".join(f"{pool.name}: {pool.free_milli / 1000:g} GPU" for pool in summary.pools)
        yield ok("agent", f"the agent's last summary says what is free: {free or 'no pools'}")


# -- our own parts -------------------------------------------------------------------------------------------------------------


def _check_broker(socket: str, counts: Mapping[str, str]) -> "Iterator[Finding]":
    from fractional_gpu.client.client import BrokerClient  # noqa: PLC0415 - not for help texts
    from fractional_gpu.commands.doctor.report import ok, problem  # noqa: PLC0415 - as above
    from fractional_gpu.protocol.errors import FractionalGPUError  # noqa: PLC0415 - as above

    try:
        with BrokerClient(socket, timeout_s=5) as client:
            there = {pool.name for pool in client.capacity().pools}
    except FractionalGPUError as error:
        yield problem(
            "broker",
            str(error),
            "systemctl enable --now jupyter-gpu: the node's broker is a service, outside of any job",
        )
        return
    if missing := sorted(counts.keys() - there):
        yield problem(
            "broker",
            f"it has no pool {', '.join(missing)}, but {', '.join(sorted(there))}",
            "give --pool POOL=COUNT, or add the pool",
        )
    else:
        yield ok("broker", f"it answers on {socket}, with pool {', '.join(sorted(counts))}")
    mode = Path(socket).stat().st_mode & 0o777
    if mode & 0o006 != 0o006:
        yield problem(
            "broker", f"users may not connect to {socket} (mode {mode:04o})", "run it as `jupyter gpu broker --service`"
        )


def _check_seats(folder: Path) -> "Iterator[Finding]":
    from fractional_gpu.commands.doctor.report import note, ok, problem  # noqa: PLC0415 - not for help texts

    try:
        status = folder.lstat()
    except FileNotFoundError:
        yield note("seats", f"{folder} is not there yet: the first job makes it")
        return
    except OSError as error:
        yield problem("seats", f"{folder}: {error.strerror}", f"remove {folder}")
        return
    if status.st_uid != os.geteuid() and status.st_uid != 0:
        yield problem(
            "seats", f"{folder} belongs to uid {status.st_uid}", f"remove {folder}: the next job makes it again"
        )
    else:
        yield ok("seats", f"{folder} has the files of {len(list(folder.glob('job-*.wanted')))} jobs")


def _check_unit() -> "Iterator[Finding]":
    from fractional_gpu.commands.doctor.report import note, ok, warning  # noqa: PLC0415 - not for help texts

    try:
        done = subprocess.run(
            ["systemctl", "is-active", "jupyter-gpu-agent"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield note(
            "unit", f"systemd cannot be asked ({error}): whatever starts the agent must start it again when it ends"
        )
        return
    if done.stdout.strip() == "active":
        yield ok("unit", "jupyter-gpu-agent.service is active")
    else:
        said = done.stdout.strip() or " ".join(done.stderr.split())[:100]
        yield warning(
            "unit", f"jupyter-gpu-agent.service is not active ({said})", "systemctl enable --now jupyter-gpu-agent"
        )
