"""A real Slurm of two nodes on this machine: Debian's slurmctld, slurmd and munged in a separate folder, ended with the block.

- All daemons run as this user. As root the nodes may have control groups (`constrained`); without root they have none.
- A daemon's output goes into files: a pipe that it inherits would never be closed.
- No systemd: each daemon forks into the background, and its pid file names it.
- A node is a slurmd with a name, separate ports and a separate spool. `Node.run` has its broker's socket and its seats.
"""

import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from fractional_gpu.engines.slurm import parse_gres
from tests.support.ports import free_ports
from tests.support.slurm_accounting import Accounting
from tests.support.world import World, until

__all__ = ["GRES", "Cluster", "Node", "fields", "new_cluster"]

T = TypeVar("T")

GRES = "jgpu"
_CONFIG = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={munge}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={port}
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
{accounting}
FirstJobId={first}
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=20000
SlurmdParameters=config_overrides
KillWait=2
MessageTimeout=30
DefMemPerCPU=1600
PrologFlags=Alloc
{lines}
PartitionName=gpu Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
_FREE = "GresTypes={gres}\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none"
_CONSTRAINED = "GresTypes={gres}\nProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup"
_CGROUP = """\
CgroupPlugin={plugin}
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainDevices=yes
"""
_PAUSE_S = 0.1
"""Between two questions to slurmctld: each one is a process."""
_DAEMONS = ("slurmctld", "slurmd", "munged", "scontrol", "sbatch", "squeue", "mungekey")


@dataclass(frozen=True)
class Node:
    name: str
    run: Path

    @property
    def socket(self) -> str:
        return str(self.run / "broker.sock")


class Cluster:
    """The daemons, and the commands that users and administrators type. Use `new_cluster`."""

    def __init__(
        self,
        folder: Path,
        *,
        constrained: bool,
        scripts: Mapping[str, str],
        opened: int,
        closed: int,
        node_gres: str,
        gres: Mapping[str, str],
        accounting: Accounting | None = None,
        sibling: "Cluster | None" = None,
        edit: "Callable[[Cluster], None] | None" = None,
    ) -> None:
        missing = [name for name in _DAEMONS if shutil.which(name, path=_path()) is None]
        assert not missing, f"{', '.join(missing)} not found: `tests/run setup` installs Debian's slurm-wlm and munge"
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.nodes = [Node(name, folder / name) for name in ("n1", "n2")]
        self.scripts = dict(scripts)
        self.opened, self.closed = opened, closed
        self._constrained = constrained
        self._node_gres = node_gres or f"{GRES}:open:{opened},{GRES}:closed:{closed}"
        self._gres = dict(gres)
        self._accounting = accounting
        self._edit = edit
        self.prefixes: dict[str, list[str]] = {}  # by node: how its slurmd is started, such as in a mount namespace
        self.name: str = "jfg" if sibling is None else f"{sibling.name}x"
        self.munge: Path = folder / "munge.socket" if sibling is None else sibling.munge
        self._has_munge = sibling is None
        self._ports = free_ports(3)
        # Nodes of several clusters on a machine share the names of control groups: their jobs must differ in their numbers.
        self.first_job = random.SystemRandom().randrange(1_000, 60_000_000, 1_000)
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _path()}
        folder.chmod(0o755)
        for node in self.nodes:
            node.run.mkdir(mode=0o755)
        (folder / "state").mkdir(mode=0o755)

    # -- starting and ending ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the configuration, start the daemons, and return when both nodes are idle."""
        self.write()
        if self._has_munge:
            self.start_munge()
        if self._accounting is not None:
            self._accounting.begin(self.munge, self.environment)
        self.start_controller("-c")
        for node in self.nodes:
            self.start_node(node)
        until(lambda: set(self.states().values()) == {"idle"}, "both nodes are idle", pause_s=_PAUSE_S)

    def start_munge(self) -> None:
        """Start munged, which authenticates the daemons."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        self.call("mungekey", "--create", f"--keyfile={munge}/key")
        self.call(
            "munged",
            "--force",
            f"--socket={self.munge}",
            f"--key-file={munge}/key",
            f"--log-file={munge}/log",
            f"--pid-file={self.folder}/munged.pid",
            f"--seed-file={munge}/seed",
        )

    def write(self) -> None:
        """Write slurm.conf, gres.conf and cgroup.conf."""
        host = socket.gethostname()
        places = [
            f"NodeName={node.name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=32000 "
            f"Gres={self._node_gres} State=UNKNOWN"
            for node, port in zip(self.nodes, self._ports[1:], strict=True)
        ]
        kind = (_CONSTRAINED if self._constrained else _FREE).format(gres=",".join([GRES, *self._gres]))
        scripts = [f"{name}={path}" for name, path in self.scripts.items()]
        lines = [kind, *scripts, *places]
        names = ",".join(node.name for node in self.nodes)
        self.conf.write_text(
            _CONFIG.format(
                host=host,
                name=self.name,
                munge=self.munge,
                accounting=_NO_ACCOUNTING if self._accounting is None else self._accounting.lines(self.munge),
                user=pwd.getpwuid(os.getuid()).pw_name,
                folder=self.folder,
                port=self._ports[0],
                first=self.first_job,
                lines="\n".join(lines),
                names=names,
            )
        )
        kinds = (("open", self.opened), ("closed", self.closed))
        ours = [f"Name={GRES} Type={kind} Count={count} Flags=CountOnly" for kind, count in kinds]
        lines = [f"NodeName={names} {line}\n" for line in (self._gres.values() or ours)]
        (self.folder / "gres.conf").write_text("".join(lines))
        version_1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
        if self._constrained:
            (self.folder / "cgroup.conf").write_text(_CGROUP.format(plugin="cgroup/v1" if version_1 else "autodetect"))
        if self._edit is not None:
            self._edit(self)

    def start_controller(self, *options: str) -> None:
        self.call("slurmctld", *options)

    def start_node(self, node: Node) -> None:
        self.call(*self.prefixes.get(node.name, ()), "slurmd", "-N", node.name)

    def restart_node(self, node: Node) -> None:
        """End a node's slurmd and start it again; its jobs keep running. Returns when it has registered."""
        until(lambda: self.node(node.name)["SlurmdStartTime"] != "None", f"{node.name} has registered")
        before = self.node(node.name)["SlurmdStartTime"]
        until(lambda: time.strftime("%Y-%m-%dT%H:%M:%S") > before, "the next second: a start is known by it")
        self._end(f"slurmd.{node.name}.pid", signal.SIGTERM)
        self.start_node(node)
        until(
            lambda: self.node(node.name)["SlurmdStartTime"] != before,
            f"{node.name} has registered again",
            pause_s=_PAUSE_S,
        )

    def stop_controller(self, number: int = signal.SIGTERM) -> None:
        self._end("slurmctld.pid", number)

    def close(self) -> None:
        with suppress(AssertionError, subprocess.SubprocessError):
            self.cancel_all()
        for node in self.nodes:
            self._end(
                f"slurmd.{node.name}.pid", signal.SIGKILL
            )  # one that is reading its configuration forgets a SIGTERM
        for name in ("slurmctld.pid", "munged.pid"):
            self._end(name, signal.SIGTERM)
        for pid in self._left():
            World.end(pid, signal.SIGKILL)

    def _end(self, name: str, number: int) -> None:
        file = self.folder / name
        with suppress(FileNotFoundError, ValueError):
            World.end(int(file.read_text()), number)
        file.unlink(missing_ok=True)

    def _left(self) -> list[int]:
        """Return processes of this cluster that are still there: step daemons, and jobs."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if f"SLURM_CONF={self.conf}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    # -- commands --------------------------------------------------------------------------------------------------------

    def call(
        self,
        *words: str,
        user: int | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: IO[str] | int = subprocess.DEVNULL,
    ) -> str:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            done = subprocess.run(
                words,
                env={**self.environment, **(environment or {})},
                cwd=self.folder,
                stdout=out,
                stderr=err,
                stdin=stdin,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                check=False,
                timeout=120,
            )
            out.seek(0)
            err.seek(0)
            text, complaint = out.read().decode(errors="replace"), err.read().decode(errors="replace")
        assert done.returncode == 0, f"{' '.join(words)}: {complaint or text}"
        return text

    def states(self) -> dict[str, str]:
        words = self.call("sinfo", "-h", "-N", "-o", "%N %T").split()
        return dict(zip(words[::2], words[1::2], strict=True))

    def node(self, name: str) -> dict[str, str]:
        return fields(self.call("scontrol", "show", "node", "-d", "-o", name))

    def opened_milli(self, name: str) -> int:
        """How many thousandths a node is open for."""
        return parse_gres(self.node(name)["Gres"])[f"{GRES}:open"]

    def job(self, job_id: str) -> dict[str, str]:
        return fields(self.call("scontrol", "show", "job", "-d", "-o", job_id))

    def sbatch(
        self,
        script: str,
        *options: str,
        user: int | None = None,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> str:
        words = ["sbatch", "--parsable", f"--output={output or self.folder / 'job-%j.out'}", *options]
        return self.call(*words, f"--wrap={script}", user=user, environment=environment).strip().partition(";")[0]

    def output(self, job_id: str) -> str:
        file = self.folder / f"job-{job_id}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def await_job(self, job_id: str, *states: str) -> dict[str, str]:
        def ask() -> dict[str, str] | None:
            found = self.job(job_id)
            return found if found["JobState"] in states else None

        try:
            return self._until(ask, f"job {job_id} becomes {' or '.join(states)}")
        except AssertionError as error:
            error.add_note(self.call("scontrol", "show", "job", job_id) + self.output(job_id))
            raise

    def await_end(self, *job_ids: str) -> None:
        """Wait until jobs have left their nodes."""
        words = ("squeue", "-h", "-j", ",".join(job_ids), "-o", "%A")
        self._until(lambda: not self.call(*words).split(), "the jobs have ended")

    def _until(self, ask: Callable[[], T | None], what: str) -> T:
        """Ask slurmctld, which takes a process, soon after it has logged something, and then ever more rarely."""
        log = self.folder / "slurmctld.log"
        size, due_s, step_s = -1, 0.0, 0.0

        def look() -> T | None:
            nonlocal size, due_s, step_s
            now_s, now_size = time.monotonic(), log.stat().st_size
            if now_size != size:
                size, due_s, step_s = now_size, now_s + 0.15, 0.3
            if now_s < due_s:
                return None
            due_s, step_s = now_s + step_s, min(1.0, 2 * step_s)
            return ask()

        return until(look, what)

    def cancel(self, *job_ids: str) -> None:
        """Cancel jobs and wait until they have left their nodes."""
        if job_ids:
            self.call("scancel", *job_ids)
            self.await_end(*job_ids)

    def cancel_all(self) -> None:
        """Cancel every job and wait until all have left their nodes."""
        jobs = {re.split("[+_]", job)[0] for job in self.call("squeue", "-h", "-o", "%i").split()}
        self.cancel(*jobs)

    def logs(self) -> dict[str, str]:
        return {file.name: file.read_text(errors="replace")[-20_000:] for file in sorted(self.folder.glob("*.log"))}


def fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", line))


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@contextmanager
def new_cluster(
    *,
    constrained: bool = False,
    scripts: Callable[[Sequence[Node]], Mapping[str, str]] | None = None,
    opened: int = 1000,
    closed: int = 3000,
    node_gres: str = "",
    gres: Mapping[str, str] | None = None,
    accounting: Accounting | None = None,
    sibling: Cluster | None = None,
    edit: Callable[[Cluster], None] | None = None,
) -> Iterator[Cluster]:
    """A cluster that ends with the block. `scripts`: Prolog, Epilog and TaskProlog; `opened`, `closed`: each node's counts at its start.

    `node_gres`, `gres`: other GRES in their place, the node's and, by name, the rest of the lines of gres.conf.
    `edit` changes the files of the configuration once they are written.
    `accounting`: its database; `sibling`: a cluster with which it may be in a federation, on the same database.
    """
    folder = Path(tempfile.mkdtemp(prefix="jfg-slurm-"))
    cluster = Cluster(
        folder,
        constrained=constrained,
        scripts={},
        opened=opened,
        closed=closed,
        node_gres=node_gres,
        gres=gres or {},
        accounting=accounting,
        sibling=sibling,
        edit=edit,
    )
    if scripts is not None:
        cluster.scripts.update(scripts(cluster.nodes))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder)
