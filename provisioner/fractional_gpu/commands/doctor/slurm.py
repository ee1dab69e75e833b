"""The checks of `jupyter gpu node doctor`: Slurm's configuration and scripts, and this node's broker and agent."""

import argparse
import os
import shlex
import socket as socket_module
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.doctor.report import Finding, note, ok, problem, warning
from fractional_gpu.commands.node.install import WRAPPER, node_files
from fractional_gpu.commands.node.options import counts_of, seats_folder
from fractional_gpu.core.units import format_gpus, plural
from fractional_gpu.engines.engine import EngineError
from fractional_gpu.engines.files import KEYS, SCRIPTS, NodeFiles, change_site, site_files
from fractional_gpu.engines.slurm import CLOSED, OPEN, Slurm, parse_gres, total_of
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.nodes import parse_summary

_ROOT_ONLY = 0o022
_NO_JOBS = ("UNKNOWN", "DOWN", "FAIL", "INVAL", "NOT_RESPONDING", "*")  # states of a node that takes no jobs


def _slurm(options: argparse.Namespace) -> Slurm:
    return Slurm(options.node or socket_module.gethostname().partition(".")[0])


def check_slurm(options: argparse.Namespace) -> Iterator[Finding]:
    slurm, counts = _slurm(options), counts_of(options.pool)
    try:
        config = slurm.config()
    except EngineError as error:
        yield problem("slurmctld", str(error), "start slurmctld or set SLURM_CONF, then run this again")
        return
    yield from check_preemption(config)
    yield from check_accounting(slurm, config)
    yield from check_scripts(config)
    yield from check_hook(options.folder / "prolog", slurm)
    yield from check_files(slurm, node_files(options))
    yield from check_node(slurm, list(counts.values()), shards=bool(options.shards))


def check_preemption(config: Mapping[str, str]) -> Iterator[Finding]:
    mode = config.get("PreemptMode", "")
    for sign, what in (
        ("suspend", "a suspended job keeps its share, so this frees nothing"),
        ("requeue", "a preempted job restarts, and its kernels' variables are lost"),
    ):
        if sign in mode.lower().replace("gang", "suspend"):
            advice = "set PreemptMode=OFF in slurm.conf for partitions with shares"
            yield warning("preemption", f"PreemptMode is {mode}: {what}", advice)


def check_accounting(slurm: Slurm, config: Mapping[str, str]) -> Iterator[Finding]:
    """Check whether this node can query Slurm's accounting database. Many sites allow this only from the controller."""
    if "slurmdbd" not in config.get("AccountingStorageType", ""):
        said = "there is no accounting database: a job's AdminComment has its figures only while it runs"
        yield note("accounting", said)
        return
    try:
        slurm.ask_accounting()
    except EngineError as error:
        yield warning(
            "accounting",
            f"a job's final figures cannot be written to its AdminComment: {error}",
            "let this node reach slurmdbd (slurm.conf: AccountingStorageHost and -Port), or run the agent with --comment-every never",
        )
    else:
        yield ok("accounting", "AdminComment has a job's figures while it runs and after it ends")


def check_scripts(config: Mapping[str, str]) -> Iterator[Finding]:
    for path in {Path(config.get(name, "(null)")) for name in SCRIPTS} - {Path("(null)")}:
        try:
            status = path.stat()
        except OSError as error:
            said = f"{path}: {error.strerror}: Slurm will drain this node at its next job"
            yield problem("scripts", said, "copy it to every node")
            continue
        if status.st_uid != 0 or status.st_mode & _ROOT_ONLY or not status.st_mode & 0o111:
            said = f"{path} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:04o}, but root runs it on every node"
            yield problem("scripts", said, f"chown root {path}; chmod 755 {path}")
        else:
            yield ok("scripts", f"{path}")


def check_everywhere(options: argparse.Namespace) -> Iterator[Finding]:
    slurm = _slurm(options)
    wrapper = slurm.conf().with_name(WRAPPER)
    test = f"test -x {shlex.quote(str(wrapper))} && echo there || echo missing"
    rows = slurm.call("sinfo", "--noheader", "--Node", "--format=%N %R").split()
    there = []
    for node, partition in dict(zip(rows[::2], rows[1::2], strict=True)).items():
        where = (f"--partition={partition}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--immediate=5")
        try:
            found = slurm.call("srun", "--job-name=jupyter-gpu-doctor", "--chdir=/", *where, "sh", "-c", test)
        except EngineError as error:
            yield warning(node, f"it did not accept a job: {error}", f"run this on that node: test -x {wrapper}")
            continue
        if "there" in found.split():
            there.append(node)
        else:
            yield problem(
                node, f"{wrapper} is missing: Slurm will drain the node once slurm.conf names it", "copy it there"
            )
    if there:
        yield ok("wrapper", f"{wrapper} is on {plural(len(there), 'node')}: {', '.join(there)}")


def check_hook(script: Path, slurm: Slurm) -> Iterator[Finding]:
    """Check that the Prolog can reach Slurm's controller even without a PATH, because slurmd runs it without one."""
    environment = {"SLURM_CONF": str(slurm.conf()), "SLURMD_NODENAME": slurm.node}
    call = [str(script), "--check"]
    try:
        done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=20, check=False)
        said = " ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        done, said = None, str(error)
    if done is None or done.returncode:
        yield problem(
            "hook",
            f"{script} cannot reach Slurm when slurmd runs it: {said[:300]}",
            "`jupyter gpu node install --force --slurm-bin DIR`; DIR is where squeue and scontrol are",
        )
    else:
        yield ok("hook", f"{script} reaches slurmctld in slurmd's environment")


def check_files(slurm: Slurm, files: NodeFiles) -> Iterator[Finding]:
    try:
        confs = site_files(slurm.conf())
        change_site(files, confs, confs[0].path.with_name(WRAPPER), slurm.node, slurm.names)
    except (EngineError, OSError) as error:
        yield problem("slurm.conf", str(error), "fix it: `jupyter gpu node install` needs it too")
        return
    for found in (found for key in KEYS if len(found := confs[0].of_key(key)) > 1):
        said = " and ".join(f"{one.text.strip()} ({one.file})" for one in found)
        yield problem("given twice", f"{said}: Slurm only uses the last one", "merge them into one line")
    for conf in confs:
        lines = conf.diff().splitlines()
        changes = [line for line in lines if line[:1] in ("+", "-") and line[1:3] not in ("++", "--")]
        if not conf.path.exists():
            yield note(conf.path.name, f"{conf.path} is not on this node: if Slurm is configless, check the controller")
        elif changes:
            said = f"shares need these changes: {'; '.join(changes)}"
            yield problem(conf.path.name, said, "`jupyter gpu node install` prints them as a diff")
        else:
            yield ok(conf.path.name, "it has everything that shares need")


def check_node(slurm: Slurm, counts: list[str], *, shards: bool) -> Iterator[Finding]:
    try:
        fields = slurm.fields()
        there = parse_gres(fields.get("Gres", ""))
    except EngineError as error:
        yield problem("node", str(error), "use --node to name the node as in slurm.conf")
        return
    state, has = fields.get("State", "UNKNOWN"), f"node {slurm.node} has {fields.get('Gres', '(null)')}"
    why = f"node {slurm.node} is {state}: {fields.get('Reason', 'no reason is given')}"
    if any(sign in state for sign in _NO_JOBS):
        yield problem("node", why, "start slurmd there, or check its log to see why it does not register")
    elif "DRAIN" in state:
        yield warning("node", why, f"scontrol update nodename={slurm.node} state=resume")
    elif total_of(there, "shard"):
        advice = "" if shards else "; give --shards POOL to agent, Prolog and Epilog"
        yield note(
            "node",
            f"{has}: Slurm cannot change the counts of a node with shards, and each job stays on its GPU{advice}",
        )
    if not total_of(there, "shard"):
        missing = [name for name in counts if not {f"{name}:{OPEN}", f"{name}:{CLOSED}"} <= there.keys()]
        if missing:
            yield problem(
                "counts",
                f"{has}, but not the types open and closed of {', '.join(missing)}",
                "if slurm.conf has them, restart slurmctld, then each slurmd: `scontrol reconfigure` does not load new GresTypes",
            )
        else:
            yield ok("counts", f"{has}, in use: {fields.get('GresUsed', 'unknown')}")
    try:
        summary = parse_summary(fields.get("Extra", ""))
    except ValueError:
        said = "the agent has not published a summary in the node's Extra"
        yield warning("agent", said, "systemctl status jupyter-gpu-agent")
        return
    if summary.problem:
        yield warning("agent", f"the agent reports: {summary.problem}", "systemctl status jupyter-gpu")
    else:
        free = ", ".join(f"{pool.name}: {format_gpus(pool.admissible_milli)}" for pool in summary.pools)
        yield ok("agent", f"available according to the agent's last summary: {free or 'no pools'}")


def check_broker(options: argparse.Namespace) -> Iterator[Finding]:
    socket, counts = options.socket, counts_of(options.pool)
    try:
        with BrokerClient(socket, timeout_s=5) as client:
            there = {pool.name for pool in client.capacity().pools}
    except FractionalGPUError as error:
        advice = "systemctl enable --now jupyter-gpu: the node's broker must be a service, outside any job"
        yield problem("broker", str(error), advice)
        return
    if missing := sorted(counts.keys() - there):
        said = f"it has no pool {', '.join(missing)}; its pools: {', '.join(sorted(there))}"
        yield problem("broker", said, "give --pool POOL=GRES, or add the pool")
    else:
        yield ok("broker", f"it answers on {socket}, with pool {', '.join(sorted(counts))}")
    mode = Path(socket).stat().st_mode & 0o777
    if mode & 0o006 != 0o006:
        said = f"users are not allowed to connect to {socket} (mode {mode:04o})"
        yield problem("broker", said, "run it as `jupyter gpu broker --service`")


def check_seats(options: argparse.Namespace) -> Iterator[Finding]:
    folder = seats_folder(options)
    try:
        status = folder.lstat()
    except FileNotFoundError:
        yield note("seats", f"{folder} does not exist yet: the first job creates it")
        return
    except OSError as error:
        yield problem("seats", f"{folder}: {error.strerror}", f"remove {folder}")
        return
    if status.st_uid != os.geteuid() and status.st_uid != 0:
        said = f"{folder} belongs to uid {status.st_uid}"
        yield problem("seats", said, f"remove {folder}: the next job creates it again")
    else:
        yield ok("seats", f"{folder} has the files of {plural(len(list(folder.glob('job-*.wanted'))), 'job')}")


def check_unit() -> Iterator[Finding]:
    call = ["systemctl", "is-active", "jupyter-gpu-agent"]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"cannot query systemd ({error}); make sure that whatever starts the agent also restarts it when it ends"
        yield note("unit", said)
        return
    if done.stdout.strip() == "active":
        yield ok("unit", "jupyter-gpu-agent.service is active")
    else:
        said = done.stdout.strip() or " ".join(done.stderr.split())[:100]
        advice = "systemctl enable --now jupyter-gpu-agent"
        yield warning("unit", f"jupyter-gpu-agent.service is not active ({said})", advice)
