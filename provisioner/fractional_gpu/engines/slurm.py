"""Runs Slurm's commands `scontrol` and `squeue`, and `sacct` and `sacctmgr` for jobs that have ended. Supports Slurm 22.05 and newer.

- Users choose job names, comments and paths, which may contain line breaks, and `scontrol show job` prints them before the fields that we
  need. So we read jobs through `squeue`, with named columns that contain no text from users. No command goes through a shell.
- A pool's milli-GPU are represented by one count-only GRES with two types, as in `jgpu:open:N,jgpu:closed:M`. Jobs request the open type,
  and the agent moves milli-GPU between the two types. Their sum must stay the same as in gres.conf. A node registers again about every half
  hour, and slurmctld drains it if jobs use a GRES whose total has changed ("count changed and jobs are using them").
- Array tasks and components of a heterogeneous job are named as users see them (`12_3` or `12+1`). The last task has the same number as the
  array, and the first component has the same number as the whole job. Updating such a number would change all tasks or components.
- In a federation, `squeue` may show jobs from other clusters, which are REVOKED and have no resources. `--local` queries only this cluster.
- Every call has a time limit (`timeout_s`), because the commands themselves would wait for a daemon that is down.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fractional_gpu.engines.engine import EngineError, EngineUnavailableError, NodeRecord, NodeWrite

OPEN, CLOSED, SHARD = "open", "closed", "shard"
"""The GRES type that jobs request, the type for milli-GPU that are closed to jobs, and Slurm's own GRES for parts of a GPU."""

_CONF = "/etc/slurm/slurm.conf"
TIMEOUT_S = 10.0
_SEPARATOR = "|"
_COLUMNS = ("JobID", "UserID", "UserName", "State", "tres-per-node", "JobArrayID", "tres-alloc", "NumNodes")
_ACCOUNTED = "JobIDRaw,JobID,End,AdminComment"  # the last field may contain separators and line breaks
JOB_ID = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
_JOB_NAME = re.compile(r"[1-9][0-9]{0,9}(?:_[0-9]{1,9}|\+[0-9]{1,9})?", re.ASCII)
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
# NAME, TYPE and COUNT. A type may begin with a digit (2080ti, 1g.10gb) or be a number (3090). A single number after the name is the count.
_GRES_NAME, _GRES_TYPE = r"([A-Za-z_][\w-]*)", r":((?!no_consume\b)\w[\w.-]*)"
_GRES_COUNT, _GRES_END = r"(?::no_consume)?[:=](\d{1,12})([KMGTkmgt]?)", r"(?:\(.*\))?"
_GRES = [
    re.compile(_GRES_NAME + middle + _GRES_END, re.ASCII)
    for middle in (_GRES_TYPE + _GRES_COUNT, "()" + _GRES_COUNT, f"(?:{_GRES_TYPE})?()()")
]
_COMMA = re.compile(r",(?![^(]*\))")
_SUFFIX = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_MEMORY = re.compile(r"(?:^|,)mem=(\d+(?:\.\d+)?)([KMGT]?)")
_FIELD = re.compile(r"(\S+?)=(.*?)(?= \S+?=|\s*$)")
_ERROR = re.compile(r"^(?:sbatch|squeue|scancel|scontrol|sacct|sacctmgr): error: ", re.MULTILINE)
NO_JOB, _NO_LONGER = "Invalid job id", "already finished"
# Only these errors mean that the request itself is wrong. Other failures (munge, the network, sudo) may be temporary.
_FAULTS = (
    *("Batch job submission failed", "Invalid", "Unrecognized", "denied", "is not a valid"),
    _NO_LONGER,
)
_LONGEST_COMMENT = 500
_COMMENT_OF_OURS = "jupyter-gpu: "
_ACCOUNTING = ("sacct", "sacctmgr")  # commands that query slurmdbd
ENDED = (
    *(
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
    ),
    "TIMEOUT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job on a node. `gres` says how much of each GRES the job has on each of its nodes.

    `name` is the job's number as users see it, such as `12_3` for a task of array 12. `memory_mib` is its memory on each node, or None if
    unknown.
    """

    job_id: int
    name: str
    uid: int
    user: str
    state: str
    gres: Mapping[str, int]
    memory_mib: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended. In that case, its Epilog has already run or will never run."""
        return self.state in ENDED


def job_number(text: str) -> int:
    if not JOB_ID.fullmatch(text):
        raise EngineError(f"the job id is {text[:40]!r}, but Slurm's job ids are whole numbers from 1 (SLURM_JOB_ID)")
    return int(text)


def parse_gres(text: str) -> dict[str, int]:
    """Parse a string such as `jgpu:open:250,gpu:2(IDX:0-1)`, and return the counts by `NAME:TYPE` or `NAME`. A missing count means 1.

    Raises EngineError if the string is malformed.
    """
    found: dict[str, int] = {}
    for word in gres_words(text):
        plain = word.removeprefix("gres:").removeprefix("gres/")
        match = next(filter(None, (form.fullmatch(plain) for form in _GRES)), None)
        if match is None:
            raise EngineError(f"Slurm's generic resources {text[:200]!r} do not have the form NAME:TYPE:COUNT, ...")
        name = f"{match[1]}:{match[2]}" if match[2] else match[1]
        found[name] = found.get(name, 0) + (int(match[3]) * _SUFFIX[match[4].lower()] if match[3] else 1)
    return found


def total_of(gres: Mapping[str, int], name: str) -> int:
    return sum(count for key, count in gres.items() if key.partition(":")[0] == name)


def gres_words(text: str) -> list[str]:
    words = _COMMA.split(text.strip().replace(":(null)", ""))
    return [word for word in words if word not in ("", "(null)", "N/A")]


class Slurm:
    """Slurm's commands on a node. `node` is the node's name in Slurm. Raises EngineError if the name is malformed.

    Methods raise EngineUnavailableError if the commands are missing or the controller (or slurmdbd, for ended jobs) does not answer, and
    EngineError if the request is refused.
    """

    def __init__(self, node: str, *, timeout_s: float = TIMEOUT_S) -> None:
        if not _NODE_NAME.fullmatch(node):
            raise EngineError(f"{node[:80]!r} is not a valid node name; give slurm.conf's NodeName with --node")
        self.node = node
        self._timeout_s = timeout_s

    def read_node(self) -> NodeRecord:
        """Return the node's count of each GRES with open and closed types, how much of each is in use, and the summary in `Extra`."""
        record = self.fields()
        there, used = parse_gres(record.get("Gres", "")), parse_gres(record.get("GresUsed", ""))
        names = sorted(name[: -len(OPEN) - 1] for name in there if name.endswith(f":{OPEN}"))
        names = [name for name in names if f"{name}:{CLOSED}" in there and SHARD not in there]
        return NodeRecord(
            counts={name: there[f"{name}:{OPEN}"] for name in names},
            in_use={name: used.get(f"{name}:{OPEN}", 0) for name in names},
            most={name: total_of(there, name) for name in names},
            text=record.get("Gres", ""),
            summary=record.get("Extra", ""),
        )

    def fields(self) -> dict[str, str]:
        text = self.call("scontrol", "show", "node", "-d", "-o", self.node)
        found = fields_of(text)
        if found.get("NodeName") != self.node:
            raise EngineError(f"expected Slurm's record of node {self.node}, but got {text[:200]!r}")
        return found

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:
        """Write the counts and the summary.

        The update names all GRES of the node, because a GRES that is left out could no longer be allocated. Slurm refuses updates that name
        shards, so a node with shards cannot have our counts.
        """
        words = [f"nodename={self.node}"]
        if write.counts:
            there = [word.partition("(")[0] for word in gres_words(record.text)]
            others = [word for word in there if word.partition(":")[0] not in write.counts]
            for name, count in sorted(write.counts.items()):
                most = record.most[name]
                others += [f"{name}:{OPEN}:{min(count, most)}", f"{name}:{CLOSED}:{max(0, most - count)}"]
            words.append("gres=" + ",".join(others))
        if write.summary:
            words.append(f"extra={write.summary}")
        self.call("scontrol", "update", *words)

    def names(self, expression: str) -> list[str]:
        return self.call("scontrol", "show", "hostnames", expression).split()

    def job(self, job_id: int) -> SlurmJob | None:
        try:
            text = self._squeue("--states=all", f"--jobs={job_id}")
        except EngineError as error:
            if NO_JOB in str(error):
                return None
            raise
        # The number of an array or of a heterogeneous job selects all its parts.
        return next((job for job in map(_job, text.splitlines()) if job.job_id == job_id), None)

    def jobs(self) -> list[SlurmJob]:
        return [_job(line) for line in self._squeue(f"--nodelist={self.node}").splitlines()]

    def _squeue(self, *words: str) -> str:
        columns = ",".join(f"{name}:{_SEPARATOR}" for name in _COLUMNS)
        return self.call("squeue", "--local", "--noheader", *words, f"--Format={columns}")

    def comment(self, job_id: int, text: str) -> bool:
        """Set the AdminComment of a running job. Return False if the job has ended."""
        job = self.job(job_id)
        if job is None or job.has_ended:
            return False
        try:
            self.call("scontrol", "update", f"jobid={job.name}", f"admincomment={_shown(text)}")
        except EngineError as error:
            if _NO_LONGER in str(error) or NO_JOB in str(error):
                return False
            raise
        return True

    def comment_in_accounting(self, job_id: int, text: str) -> bool:
        """Set an ended job's AdminComment in the accounting database, unless another program has set it.

        Return False if the database doesn't know yet that the job has ended, because slurmctld's report would later overwrite the comment.
        """
        rows = [line.split(_SEPARATOR, 3) for line in self._accounted(job_id).splitlines()]
        # Here, too, the number of an array or of a heterogeneous job selects all its parts.
        row = next((row for row in rows if len(row) == 4 and row[0] == str(job_id)), None)
        if row is None or row[2] in ("", "Unknown"):
            return False
        _, name, _, there = row
        # `sacctmgr` converts text to lower case, even text from other programs.
        shown = _shown(text.replace('"', "?"))
        if there.lower() != shown.lower() and (not there or there.startswith(_COMMENT_OF_OURS)):
            self.call("sacctmgr", "-i", "modify", "job", "where", f"jobid={name}", "set", f'admincomment="{shown}"')
        return True

    def _accounted(self, job_id: int) -> str:
        return self.call("sacct", "--local", "-X", "-n", "-P", f"--jobs={job_id}", f"--format={_ACCOUNTED}")

    def ask_accounting(self) -> None:
        """Raise an error if the accounting database doesn't answer."""
        self._accounted(1)

    def config(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in self.call("scontrol", "show", "config").splitlines():
            name, separator, value = line.partition("=")
            if separator:
                found.setdefault(name.strip(), value.strip())
        return found

    def conf(self) -> Path:
        """Return the path of slurm.conf: the one in SLURM_CONF, or else the usual one. If there is no such file, ask the controller."""
        path = Path(os.environ.get("SLURM_CONF") or _CONF)
        if not path.exists():
            with suppress(EngineError):
                return Path(self.config().get("SLURM_CONF", path))
        return path

    def call(self, *words: str) -> str:
        try:
            done = subprocess.run(
                words,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise too_slow(words[0], self._timeout_s) from None
        except OSError as error:
            raise cannot_run(words[0], error) from None
        if done.returncode:
            raise failed(words[0], (done.stderr or done.stdout).decode(errors="replace"), done.returncode)
        return done.stdout.decode(errors="replace")


def too_slow(command: str, limit_s: float) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"`{command}` did not answer within {limit_s:g} s: {_daemon_of(command)} or the network is down"
    )


def cannot_run(command: str, error: OSError) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"cannot run the command `{command}` ({error.strerror}): install Slurm's commands on this machine (Debian: slurm-client)"
    )


def failed(command: str, said: str, code: int) -> EngineError:
    text = " ".join(_ERROR.sub("", said).split())[:300] or f"exit code {code}"
    if any(fault in said for fault in _FAULTS) and "authentication" not in said.lower():
        return EngineError(f"Slurm refused `{command}`: {text}")
    return EngineUnavailableError(f"{_daemon_of(command)} is not responding; `{command}` says: {text}")


def fields_of(record: str) -> dict[str, str]:
    """Return the fields of a one-line record. If a name is repeated, use the first field, which comes from Slurm itself."""
    found: dict[str, str] = {}
    for name, value in _FIELD.findall(record):
        found.setdefault(name, value.strip())
    return found


def _daemon_of(command: str) -> str:
    return "slurmdbd" if command in _ACCOUNTING else "slurmctld"


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:_LONGEST_COMMENT]


def _job(line: str) -> SlurmJob:
    words: Sequence[str] = line.strip().removesuffix(_SEPARATOR).split(_SEPARATOR)
    if len(words) != len(_COLUMNS):
        raise EngineError(f"`squeue` printed a line that is not in the requested format: {line[:200]!r}")
    try:
        return SlurmJob(
            job_id=job_number(words[0]),
            name=words[5] if _JOB_NAME.fullmatch(words[5]) else words[0],  # `12_[4-9]` names waiting tasks
            uid=int(words[1]),
            user=words[2],
            state=words[3],
            gres=parse_gres(words[4]),
            memory_mib=_memory_mib(words[6], words[7]),
        )
    except ValueError:
        raise EngineError(f"`squeue` printed a line that is not in the requested format: {line[:200]!r}") from None


def _memory_mib(allocated: str, nodes: str) -> int | None:
    found = _MEMORY.search(allocated)
    return (
        int(float(found[1]) * _MIB[found[2]] / max(1, int(nodes))) if found is not None and nodes.isdecimal() else None
    )


def _environment() -> dict[str, str]:
    """Return a minimal environment for Slurm's commands, because other variables can change their output."""
    path = os.environ.get("PATH", os.defpath)
    environment = {"PATH": f"{path}:/usr/local/sbin:/usr/sbin:/sbin", "LC_ALL": "C"}
    if conf := os.environ.get("SLURM_CONF"):
        environment["SLURM_CONF"] = conf
    return environment
