"""`jupyter gpu node doctor`: Slurm's configuration, the scripts, the broker and the agent of this node: finding, and what to change.

Changes nothing. What Slurm itself says (`scontrol show config`, `scontrol show node`) counts, not its files, which may not be read yet; of
the files gres.conf alone is read, because Slurm does not show it.
"""

import argparse
import os
import re
import socket as socket_module
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fractional_gpu.commands.node.options import add_node_options, counts_of, seats_folder
from fractional_gpu.commands.terminal.output import terminal_width, write
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.core.units import format_gpus, plural

if TYPE_CHECKING:
    from fractional_gpu.commands.doctor.report import Finding
    from fractional_gpu.engines.slurm import Slurm

_ROOT_ONLY = 0o022
EPILOG = """\
examples:
  jupyter gpu node doctor
  jupyter gpu node doctor --json        one object: {"ok": ..., "worst": ..., "findings": [...]}

Exit code 0: it works, perhaps with warnings. 1: something cannot work. Run it as root on a node; nothing is changed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the action and add its arguments."""
    parser.description = "Examine Slurm's configuration, the scripts, the broker and the agent of this node."
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object")
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
    try:
        config = slurm.config()
    except EngineError as error:
        yield problem("slurmctld", str(error), "start slurmctld, or set SLURM_CONF, and run this again")
    else:
        yield from check_config(config, list(counts.values()), shards=bool(options.shards))
        yield from check_accounting(slurm, config)
        yield from check_scripts(config)
        yield from check_gres_file(
            Path(config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).with_name("gres.conf"), counts
        )
        yield from _check_node(slurm, list(counts.values()), shards=bool(options.shards))
    yield from _check_broker(options.socket, counts)
    yield from _check_seats(seats_folder(options))
    yield from _check_unit()


# -- Slurm's configuration -----------------------------------------------------------------------------------------------------


def check_config(config: Mapping[str, str], counts: list[str], *, shards: bool) -> "Iterator[Finding]":
    """Check what `scontrol show config` says, by the names of slurm.conf and cgroup.conf."""
    from fractional_gpu.commands.doctor.report import ok, problem, warning  # noqa: PLC0415 - not for help texts

    types = _words(config, "GresTypes")
    wanted = ["shard"] if shards else counts
    missing = [name for name in wanted if name not in types]
    if missing:
        yield problem(
            "gres types",
            f"GresTypes is {config.get('GresTypes', '(null)')}, without {', '.join(missing)}",
            f"slurm.conf: GresTypes={','.join([*types, *missing])}, then restart slurmctld and each slurmd",
        )
    else:
        yield ok("gres types", f"GresTypes has {', '.join(wanted)}")
    select = config.get("SelectType", "")
    if select.endswith(("cons_tres", "cons_res")):
        yield ok("select", f"SelectType is {select}: jobs can share a node")
    else:
        yield problem(
            "select", f"SelectType is {select}: a job takes a whole node", "slurm.conf: SelectType=select/cons_tres"
        )
    flags = _words(config, "PrologFlags")
    if "contain" in flags:
        yield ok(
            "prolog flags",
            "the Prolog runs when a job is allocated, and a job keeps its control groups between its steps",
        )
    else:
        yield warning(
            "prolog flags",
            f"PrologFlags is {config.get('PrologFlags', '(null)')}: "
            + ("" if "alloc" in flags else "the Prolog runs with a job's first step only, and ")
            + "a job of `salloc` loses its control groups, and with them its share, between two steps",
            "slurm.conf: PrologFlags=Contain",
        )
    yield from _check_groups(config)
    if "suspend" in config.get("PreemptMode", "").lower() or "gang" in config.get("PreemptMode", "").lower():
        yield warning(
            "preemption",
            f"PreemptMode is {config['PreemptMode']}: a job that Slurm suspends keeps its share, so this makes no room",
            "slurm.conf: PreemptMode=OFF for partitions with shares",
        )
    if "requeue" in config.get("PreemptMode", "").lower():
        yield warning(
            "preemption",
            "PreemptMode is REQUEUE: a job that is preempted is started anew, and its kernels' variables are lost",
            "slurm.conf: PreemptMode=OFF for partitions with shares",
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


def _check_groups(config: Mapping[str, str]) -> "Iterator[Finding]":
    from fractional_gpu.commands.doctor.report import ok, problem, warning  # noqa: PLC0415 - not for help texts

    if config.get("ProctrackType") != "proctrack/cgroup" or "task/cgroup" not in config.get("TaskPlugin", ""):
        yield problem(
            "control groups",
            f"ProctrackType is {config.get('ProctrackType')} and TaskPlugin is {config.get('TaskPlugin')}: a process cannot be told from "
            "another job's of the same user, and may outlive its job",
            "slurm.conf: ProctrackType=proctrack/cgroup, TaskPlugin=task/cgroup",
        )
        return
    yield ok("control groups", "each job has control groups of its own")
    if config.get("ConstrainRAMSpace", "").lower() == "yes":
        yield ok(
            "memory",
            "a job's memory is limited; what its kernels save when they idle counts there, so --mem must cover it",
        )
    else:
        yield warning(
            "memory",
            "ConstrainRAMSpace is not yes: what kernels save on the host is limited by no job",
            "cgroup.conf: ConstrainRAMSpace=yes",
        )


def check_scripts(config: Mapping[str, str]) -> "Iterator[Finding]":
    """Check that Prolog, Epilog and TaskProlog are there, are ours or call ours, and can be changed by root only."""
    from fractional_gpu.commands.doctor.report import ok, problem, warning  # noqa: PLC0415 - not for help texts

    for name in ("Prolog", "Epilog", "TaskProlog"):
        check, given = name.lower(), config.get(name, "(null)")
        if given in ("(null)", ""):
            yield problem(check, f"{name} is not set", f"slurm.conf: {name}=/etc/jupyter-gpu/slurm/{name.lower()}")
            continue
        texts = {}
        for path in sorted(_scripts(given)):
            try:
                status = path.stat()
                texts[path] = path.read_text(errors="replace")
            except OSError as error:
                yield problem(check, f"{path} cannot be read: {error.strerror}", "`jupyter gpu node install` writes it")
                continue
            if not status.st_mode & 0o111:
                yield problem(check, f"{path} is not executable: Slurm drains the node", f"chmod 755 {path}")
            if status.st_uid != 0 or status.st_mode & _ROOT_ONLY:
                yield problem(
                    check,
                    f"{path} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:04o}, and runs on every node",
                    f"chown root {path}; chmod 755 {path}",
                )
        sign = "jupyter-gpu" if name == "TaskProlog" else "node " + check
        ours = [
            path for path, text in texts.items() if sign in text or "jupyter gpu node" in text or "jupyter-gpu" in text
        ]
        if ours:
            yield ok(check, f"{ours[0]}")
        else:
            yield warning(
                check,
                f"{given} does not call ours",
                f"call /etc/jupyter-gpu/slurm/{check} at its end, or name it in slurm.conf",
            )


def check_gres_file(path: Path, counts: Mapping[str, str]) -> "Iterator[Finding]":
    """Check gres.conf: each count is a count only, and no file fences devices off from jobs that ask for a share."""
    from fractional_gpu.commands.doctor.report import note, ok, problem  # noqa: PLC0415 - not for help texts
    from fractional_gpu.engines.slurm import CLOSED, OPEN  # noqa: PLC0415 - as above

    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        yield note(
            "gres.conf",
            f"{path} cannot be read here ({error.strerror}): with configless Slurm it lies at the controller",
        )
        return
    lines = [
        dict(re.findall(r"(\w+)=(\S+)", line.lower()))
        for line in text.splitlines()
        if not line.lstrip().startswith("#")
    ]
    for name in counts.values():
        found = [line for line in lines if line.get("name") == name]
        if {line.get("type") for line in found} >= {OPEN, CLOSED} and all(
            "countonly" in line.get("flags", "") for line in found
        ):
            yield ok("gres.conf", f"{name} is a count only, with an open and a closed type")
        else:
            yield problem(
                "gres.conf",
                f"{name} is {'not a count only with the types open and closed' if found else 'not in it'}",
                f"gres.conf: NodeName=... Name={name} Type={OPEN} Count=1000 Flags=CountOnly, and the same with Type={CLOSED}",
            )
    if any(line.get("name") == "gpu" and ("file" in line or "autodetect" in line) for line in lines):
        yield problem(
            "gres.conf",
            "the node has GPUs as gres/gpu, too: with ConstrainDevices=yes a job that asks for a share only is denied all devices, and "
            "whole GPUs that Slurm gives away are not the broker's to share",
            "take the gpu line out for nodes with shares, or use gres/shard with --shards (jobs stay on the GPU that Slurm chose)",
        )


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
    if "DRAIN" in fields.get("State", ""):
        yield warning(
            "node",
            f"node {slurm.node} is drained: {fields.get('Reason', 'no reason is given')}",
            "scontrol update state=resume",
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
            f"slurm.conf: NodeName={slurm.node} Gres={missing[0]}:{OPEN}:1000,{missing[0]}:{CLOSED}:3000",
        )
    else:
        yield ok("node", f"node {slurm.node} has {fields['Gres']}, in use: {fields.get('GresUsed', 'unknown')}")
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
        free = ", ".join(f"{pool.name}: {format_gpus(pool.free_milli)}" for pool in summary.pools)
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
        yield ok("seats", f"{folder} has the files of {plural(len(list(folder.glob('job-*.wanted'))), 'job')}")


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


def _words(config: Mapping[str, str], name: str) -> set[str]:
    return {word.strip().lower() for word in config.get(name, "").split(",") if word.strip() not in ("", "(null)")}


def _scripts(given: str) -> set[Path]:
    """Return the scripts that a value names: a path, several with commas, or a pattern."""
    found: set[Path] = set()
    for word in given.split(","):
        path = Path(word)
        matches = set(path.parent.glob(path.name)) if any(sign in path.name for sign in "*?[") else set()
        found |= matches or {path}
    return found
