"""Runs Slurm's commands and parses their output: nodes, jobs, and the reasons jobs are waiting.

- Arguments are passed as a list, never as shell text. Columns containing user-supplied text, such as job names and comments, are only read
  if they come last.
- `EngineUnavailableError` is raised if the controller does not answer, and `EngineError` if it refuses a request. A job is considered to
  have ended only if Slurm says so.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fractional_gpu.engines.engine import EngineError, EngineUnavailableError
from fractional_gpu.engines.slurm import ENDED, JOB_ID, NO_JOB, cannot_run, failed, fields_of, too_slow
from fractional_gpu_hub.engines.offers import ClusterNode, NodeReader, pools_of_text

TIMEOUT_S = 20.0
SEPARATOR = "|"
JOB_COLUMNS = SEPARATOR.join(("%A", "%T", "%B", "%S", "%r"))  # job, state, first node, (expected) start, reason
JOB_PREFIX = "jupyter-"  # the prefix of the job names of servers
_EXTRA = re.compile(r" Extra=(\S+)")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
_AWAY = ("DOWN", "DRAIN", "FAIL", "MAINT", "REBOOT", "NO_RESPOND", "UNKNOWN", "INVAL", "POWERING_DOWN", "FUTURE")
_REASONS = {
    "Resources": "no node has enough free resources",
    "Priority": "jobs with a higher priority come first",
    "Dependency": "it is waiting for another job",
    "BeginTime": "its start time has not been reached",
    "JobHeldUser": "it is on hold; release it with scontrol release",
    "JobHeldAdmin": "an administrator put it on hold",
    "ReqNodeNotAvail": "nodes that it needs are not available",
    "Reservation": "it is waiting for its reservation",
    "PartitionDown": "the partition is down",
    "PartitionTimeLimit": "its time limit is longer than the partition's",
    "PartitionNodeLimit": "the partition has too few nodes",
    "Licenses": "it is waiting for a licence",
    "Prolog": "the node is being prepared",
    "None": "Slurm has not considered it yet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job in `squeue`. `start` is its actual or expected start, or None if unknown. `reason` says why it is waiting or has ended."""

    job_id: str
    state: str
    node: str = ""
    start: datetime | None = None
    reason: str = ""

    @property
    def runs(self) -> bool:
        """Whether any of the job's processes could still be alive."""
        return self.state in _RUNS

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode(ClusterNode):
    address: str
    partitions: frozenset[str]


def _why_not(state: str) -> str:
    """Return a short reason why Slurm is not starting jobs on a node, or "" if it is. A trailing star means the node is not responding."""
    if state.endswith("*"):
        return "not answering"
    flags = state.rstrip("~#!%$@^-").split("+")
    found = next((flag for flag in flags if flag.startswith(_AWAY)), "")
    return {"DRAIN": "drained", "DRAINED": "drained", "DRAINING": "drained"}.get(found, found.lower().replace("_", " "))


async def run(*words: str, stdin: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises EngineError. The command is killed if this call is cancelled."""
    if environment is None:  # use the hub's environment without the variables that change the output
        kept = [name for name in os.environ if not name.startswith(("SQUEUE_", "SINFO_", "SCONTROL_"))]
        environment = {**{name: os.environ[name] for name in kept}, "LC_ALL": "C"}
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
        )
    except OSError as error:
        raise cannot_run(words[0], error) from None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate(stdin.encode() if stdin is not None else None)
    except TimeoutError:
        raise too_slow(words[0], TIMEOUT_S) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise failed(words[0], err.decode(errors="replace") or out.decode(errors="replace"), process.returncode)
    return out.decode(errors="replace")


def job_id_of(text: str) -> str:
    """Return the job's number from the last line printed by `sbatch --parsable`, which is `ID` or `ID;CLUSTER`. Raises EngineError."""
    last = (text.strip().splitlines() or [""])[-1].partition(";")[0].strip()
    if not JOB_ID.fullmatch(last):
        raise EngineError(f"sbatch printed {text[:200]!r} instead of a job id")
    return last


def parse_job(text: str, job_id: str) -> JobState | None:
    """Find a job in a listing whose columns are `JOB_COLUMNS`, or return None. Raises EngineUnavailableError if a line is malformed."""
    for line in text.splitlines():
        parts = line.strip().split(SEPARATOR, JOB_COLUMNS.count(SEPARATOR))
        if len(parts) <= JOB_COLUMNS.count(SEPARATOR):
            raise EngineUnavailableError(f"squeue printed a line in an unknown format: {line[:200]!r}")
        if parts[0] == job_id:
            node = "" if parts[2] in {"n/a", "(null)", ""} else parts[2]
            start = None
            with contextlib.suppress(ValueError):
                start = datetime.fromisoformat(parts[3])  # Slurm prints local time
            return JobState(job_id=job_id, state=parts[1], node=node, start=start, reason=parts[4])
    return None


async def job_state(prefix: Sequence[str], job_id: str) -> JobState | None:
    """Return the state of a job, or None if Slurm no longer knows it. Raises EngineUnavailableError."""
    command = [*prefix, "squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={JOB_COLUMNS}"]
    try:
        return parse_job(await run(*command), job_id)
    except EngineError as error:
        if NO_JOB in str(error):
            return None
        raise EngineUnavailableError(str(error)) from None  # a refusal does not mean that the job has ended


async def jobs_named(prefix: Sequence[str], name: str, user: str) -> list[str]:
    text = await run(*prefix, "squeue", "--noheader", f"--name={name}", f"--user={user}", "--format=%A")
    return [word for word in text.split() if JOB_ID.fullmatch(word)]


async def cancel(prefix: Sequence[str], job_id: str) -> None:
    """Cancel a job, or do nothing if it has already ended. Raises EngineError."""
    try:
        await run(*prefix, "scancel", job_id)
    except EngineError as error:
        if NO_JOB not in str(error):
            raise


def waiting_sentence(job: JobState, now: datetime) -> str:
    code = job.reason.partition(",")[0].strip("()")
    why = _REASONS.get(code, "")
    words = (
        f"Job {job.job_id} is waiting in Slurm's queue"
        + (f": {why} ({code})" if why else f" ({code})" if code else "")
        + "."
    )
    if job.start is not None and job.start > now:
        at = job.start.strftime("%H:%M") if job.start.date() == now.date() else job.start.strftime("%Y-%m-%d %H:%M")
        words += f" Slurm expects to start it at {at}."
    return words


def ended_sentence(job: JobState | None, job_id: str) -> str:
    if job is None:
        return f"Slurm job {job_id} is gone: it ended immediately or was cancelled; see its log in your home folder"
    why = {
        "OUT_OF_MEMORY": "it used more host memory than it requested",
        "TIMEOUT": "it reached its time limit",
        "CANCELLED": "it was cancelled",
        "NODE_FAIL": f"its node {job.node} failed",
        "PREEMPTED": "another job preempted it",
    }.get(job.state, f"it ended ({job.state.lower().replace('_', ' ')})")
    return f"Slurm job {job_id} is not running: {why}; see its log in your home folder"


async def _read_nodes() -> list[SlurmNode]:
    return parse_nodes(await run("scontrol", "show", "node", "-o"))


NODES = NodeReader(_read_nodes)


def parse_nodes(text: str) -> list[SlurmNode]:
    return [_node(line, fields) for line in text.splitlines() if "NodeName" in (fields := fields_of(line))]


def _node(line: str, fields: Mapping[str, str]) -> SlurmNode:
    name, why_not = fields["NodeName"], _why_not(fields.get("State", "UNKNOWN"))
    # Use the last match, because text from administrators before it may contain the same word. Other programs may use the field, too.
    extra = (_EXTRA.findall(line) or [""])[-1]
    pools, problem = pools_of_text(name, extra if extra.startswith("{") else None, why_not)
    return SlurmNode(
        name=name,
        state=why_not or "in service",
        pools=pools,
        problem=problem,
        address=fields.get("NodeAddr", "") or name,
        partitions=frozenset(fields.get("Partitions", "").split(",")) - {""},
    )
