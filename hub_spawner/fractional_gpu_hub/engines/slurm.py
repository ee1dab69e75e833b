"""Runs servers as Slurm jobs, based on `batchspawner`. The chosen GPU share becomes part of the job's request.

- The request consists of `--gres=COUNT:N` (in milli-GPU or shards), `--mem` (for the server and saved GPU memory) and `--partition`. Slurm
  chooses the node, and the broker on the node chooses the device.
- Values from users and from the hub's database are passed as `sbatch` arguments or as variables, never as shell text. The batch script
  quotes them. The script's template cannot use user options.
- A job's name is `jupyter-` followed by a hash of the hub, the user and the server. If a job's number was never saved, the job is found by
  this name and cancelled, either when the server is stopped or before it next starts.
- A server is considered to have ended only if Slurm reports that its job has ended. If the controller, authentication or `sudo` fails, the
  job may still be running.
- A request with a server's token can only set that server's port. `batchspawner` itself would let it set any attribute, including commands.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import shlex
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Any

from batchspawner import JobStatus, SlurmSpawner
from batchspawner.api import BatchSpawnerAPIHandler
from batchspawner.batchspawner import format_template
from jupyterhub.apihandlers import default_handlers
from tornado import web
from traitlets import Dict, Float, Int, TraitError, Unicode, default, validate

from fractional_gpu.core.units import parse_memory_mib
from fractional_gpu.engines.engine import EngineError, EngineUnavailableError
from fractional_gpu_hub.engines.offers import WHOLE, NodePool
from fractional_gpu_hub.engines.slurm_commands import (
    JOB_PREFIX,
    NODES,
    JobState,
    SlurmNode,
    cancel,
    ended_sentence,
    job_id_of,
    job_state,
    jobs_named,
    run,
    waiting_sentence,
)
from fractional_gpu_hub.engines.spawner import Allocation, EngineGPUMixin
from fractional_gpu_hub.seats import spawn_error, spawn_error_of

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PORTS = 65535
_SHARD = "shard"
_STOP_POLL_S = 0.5
_RETRY_S = (2.0, 60.0)  # the shortest and longest pause between attempts to cancel a job while Slurm does not answer
_SCRIPT = """\
#!/bin/bash
# Slurm's own variable makes `srun` pass on only the listed variables, so not PATH.
unset SLURM_EXPORT_ENV
{% if path %}export PATH={{path}}
{% endif %}{{prologue}}
{% if srun %}{{srun}} {% endif %}{{cmd}}
status=$?
{{epilogue}}
exit $status
"""


class FractionalGPUSlurmSpawner(EngineGPUMixin, SlurmSpawner):  # type: ignore[misc] # untyped
    """Runs servers as Slurm jobs with shares of the nodes' GPUs. `docs/clusters.md` describes what the nodes need."""

    log: logging.Logger
    db: Any
    job_id: str
    job_status: str
    cmd: list[str]
    exec_prefix: str
    port: int
    req_homedir: str
    req_partition: str
    req_options: str
    batchspawner_singleuser_cmd: str
    _gpu_progress_below = False  # the progress of batchspawner does not end after a failure

    gpu_partitions: "Dict[str, str]" = Dict(
        key_trait=Unicode(),
        value_trait=Unicode(),
        config=True,
        help="""The partition of each pool's nodes, by pool. Default: `req_partition`, or else Slurm's default.

        Example: c.FractionalGPUSlurmSpawner.gpu_partitions = {"default": "gpu", "big": "gpu-large"}
        """,
    )
    gpu_gres: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The generic resource (GRES) used to request shares: either `shard` or a GRES counted in thousandths of a GPU.
        Defaults to whichever one each pool's nodes publish.

        Example: c.FractionalGPUSlurmSpawner.gpu_gres = "shard"
        """,
    )
    gpu_shards_per_device: Int[int, int] = Int(
        8,
        min=1,
        max=WHOLE,
        config=True,
        help="""How many shards a GPU has in gres.conf, if `gpu_gres` is "shard". A share is rounded up to whole shards.

        Example: c.FractionalGPUSlurmSpawner.gpu_shards_per_device = 4
        """,
    )
    gpu_path: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The job's PATH, if JupyterHub is in a different place on the nodes from on the hub. Default: the PATH of `environment`.

        Example: c.FractionalGPUSlurmSpawner.gpu_path = "/opt/jupyterhub/bin:/usr/bin:/bin"
        """,
    )
    gpu_stop_wait: Float[float, int | float] = Float(
        60.0,
        config=True,
        help="""How long stopping a server waits for its job to end, in seconds (`KillWait` in slurm.conf is 30 by default).

        Example: c.FractionalGPUSlurmSpawner.gpu_stop_wait = 120
        """,
    )

    batch_script = Unicode(
        _SCRIPT,
        config=True,
        help="""The job's script. Its variables are `cmd`, `path`, `homedir` and `username`, quoted for the shell, and the administrator's
        `req_...` settings, unquoted. The job's resource requests are passed to `sbatch` as arguments, which override `#SBATCH` lines.
        """,
    )
    startup_poll_interval = Float(
        1.0, config=True, help="How often to ask Slurm about a job that has not started yet, in seconds."
    )

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - the spawner's
        super().__init__(**kwargs)
        self._gpu_job: JobState | None = None  # the state that was last read from Slurm
        self._gpu_begun = False  # whether there may be a job whose number is unknown
        self._gpu_news = asyncio.Event()
        self._gpu_host = ""

    @default("batchspawner_singleuser_cmd")
    def _gpu_singleuser_default(self) -> str:
        return "batchspawner-singleuser"

    @validate("gpu_gres")
    def _gpu_check_gres(self, proposal: dict[str, Any]) -> str:
        value = str(proposal["value"])
        if value and not re.fullmatch(r"[a-z][a-z0-9_]{0,31}(:[a-z][a-z0-9_]{0,31})?", value):
            raise TraitError(
                f"c.FractionalGPUSlurmSpawner.gpu_gres = {value!r}: expected a name such as 'jgpu:open', or 'shard'"
            )
        return value

    async def gpu_nodes(self) -> Sequence[NodePool]:
        """Return the pools of all nodes in the pools' partitions, as published by the nodes' agents. Raises EngineError."""
        nodes = await NODES.read(self.gpu_nodes_cache)
        return [pool for node in nodes for pool in node.pools if self._gpu_is_in_partition(node, pool.name)]

    def _gpu_partition(self, pool: str) -> str:
        return str(self.gpu_partitions.get(pool, self.req_partition))

    def _gpu_is_in_partition(self, node: SlurmNode, pool: str) -> bool:
        partition = self._gpu_partition(pool)
        return not partition or not node.partitions.isdisjoint(partition.split(","))

    def _gpu_count_name(self, pool: str) -> str:
        if self.gpu_gres:
            return str(self.gpu_gres)
        counts = (there.count for node in NODES.last for there in node.pools if there.name == pool and there.count)
        return next(counts, "jgpu:open")

    def gpu_request(self, allocation: Allocation | None) -> list[str]:
        """Return the `sbatch` options for a server with this share, or without a share if `allocation` is None."""
        if allocation is None:
            words = [f"--mem={parse_memory_mib(self.gpu_base_memory)}M"]
            return [*words, *([f"--partition={self.req_partition}"] if self.req_partition else [])]
        name, milli = self._gpu_count_name(allocation.pool), allocation.fraction_milli
        number = math.ceil(milli * self.gpu_shards_per_device / WHOLE) if name == _SHARD else milli
        words = [f"--gres={name}:{number}", f"--mem={allocation.host_memory_mib}M"]
        partition = self._gpu_partition(allocation.pool)
        return [*words, *([f"--partition={partition}"] if partition else [])]

    def _gpu_checked_name(self) -> str:
        name = str(self.user.name)
        if not _NAME.fullmatch(name):
            raise spawn_error(
                f"the user name {name[:80]!r} is not valid on the cluster; expected letters, digits and _.@+-, not starting with a "
                "hyphen; log in as a user who exists on the cluster",
                reason="user-name",
            )
        return name

    def _gpu_prefix(self) -> list[str]:
        """Return the prefix for commands that run as the user, such as `sudo -E -u NAME`."""
        values = {"username": self._gpu_checked_name(), "homedir": self.req_homedir}
        return [format_template(word, **values) for word in shlex.split(self.exec_prefix)]

    @property
    def gpu_job_name(self) -> str:
        """The name given to this server's jobs in Slurm."""
        return (
            JOB_PREFIX + hashlib.sha256(f"{self._gpu_hub()}\0{self.user.name}\0{self.name}".encode()).hexdigest()[:20]
        )

    def gpu_sbatch(self, environment: Mapping[str, str]) -> list[str]:
        """Return the `sbatch` command that submits the job. Raises an HTTPError, which stops the spawn."""
        home = self.req_homedir
        if not home.startswith("/") or not home.isprintable():
            raise spawn_error(
                f"the home folder of {self.user.name}, {home[:80]!r}, is not an absolute path; ask your administrator",
                reason="home",
            )
        words = ["sbatch", "--parsable", "--no-requeue", f"--job-name={self.gpu_job_name}", f"--chdir={home}"]
        words.append(f"--output={home}/jupyterhub_slurmspawner_%j.log")
        names = [name for name in environment if _VARIABLE.fullmatch(name)]
        extra = [name for name in self.req_keepvars_extra.split(",") if name.strip()]
        words.append(f"--export={','.join([*names, *extra])}")
        for option in ("account", "qos", "reservation", "runtime", "nprocs", "cluster"):
            if value := getattr(self, f"req_{option}"):
                flag = {"runtime": "time", "nprocs": "cpus-per-task", "cluster": "clusters"}.get(option, option)
                words.append(f"--{flag}={value}")
        # The administrator's options come before ours, because Slurm uses the last one of repeated options.
        return [*words, *shlex.split(self.req_options), *self.gpu_request(self.gpu_allocation)]

    def cmd_formatted_for_batch(self) -> str:
        """Return the server's command for use in the script, with each word quoted."""
        return shlex.join([*shlex.split(self.batchspawner_singleuser_cmd), *self.cmd, *self.get_args()])

    def gpu_script(self) -> str:
        """Return the job's batch script."""
        ours = {"req_username", "req_homedir", "req_keepvars"}
        settings = [name for name in self.trait_names() if name.startswith("req_") and name not in ours]
        variables = {
            "username": shlex.quote(self._gpu_checked_name()),
            **{name.removeprefix("req_"): getattr(self, name) for name in settings},
            "homedir": shlex.quote(self.req_homedir),
            "path": shlex.quote(self.gpu_path) if self.gpu_path else "",
            "cmd": self.cmd_formatted_for_batch(),
        }
        return str(format_template(self.batch_script, **variables))

    async def submit_batch_script(self) -> str:
        """Submit the job and save its number at once. Raises an HTTPError, which stops the spawn.

        If this call is cancelled, the job may have been submitted anyway. A later stop or start then finds it by its name.
        """
        environment = {name: str(value) for name, value in self.get_env().items()}
        words = [*self._gpu_prefix(), *self.gpu_sbatch(environment)]
        await self._gpu_cancel_leftovers()
        self.log.info("Submitting the job for %s: %s", self._log_name, shlex.join(words))
        self._gpu_begun = True
        # The command itself needs these variables from the hub. `--export` determines the variables of the job.
        own = {name: os.environ[name] for name in ("PATH", "SLURM_CONF") if name in os.environ}
        try:
            self.job_id = job_id_of(await run(*words, stdin=self.gpu_script(), environment={**own, **environment}))
        except EngineUnavailableError as error:
            raise spawn_error_of(error) from None
        except EngineError as error:
            raise spawn_error(str(error), reason="slurm") from None
        # JupyterHub saves the state only after the start, so a hub that dies earlier would forget the job.
        if self.orm_spawner is not None:
            self.orm_spawner.state = self.get_state()
            self.db.commit()
        return self.job_id

    async def _gpu_cancel_leftovers(self) -> None:
        try:
            for job_id in await jobs_named(self._gpu_prefix(), self.gpu_job_name, self.user.name):
                self.log.warning("Cancelling job %s, left behind by an earlier start of %s", job_id, self._log_name)
                await cancel(self._gpu_prefix(), job_id)
        except EngineUnavailableError as error:
            raise spawn_error_of(error) from None
        except EngineError as error:
            self.log.warning("Could not look for jobs left behind by an earlier start of %s: %s", self._log_name, error)

    async def _gpu_start_server(self) -> Any:  # noqa: ANN401 - as the spawner below
        start = asyncio.ensure_future(super()._gpu_start_server())
        end = asyncio.ensure_future(self._gpu_until_ended())
        try:
            await asyncio.wait({start, end}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                return start.result()
            raise self._gpu_ended()
        except RuntimeError:  # batchspawner raises this if the job is gone
            raise self._gpu_ended() from None
        finally:
            for task in (start, end):
                task.cancel()
            await asyncio.wait({start, end})

    def _gpu_ended(self) -> web.HTTPError:
        job = self._gpu_job
        return spawn_error(ended_sentence(job, job.job_id if job is not None else self.job_id), reason="slurm-job")

    async def _gpu_until_ended(self) -> None:
        """Wait until the job has started and then ended. batchspawner only waits for the server's port, without checking the job."""
        while True:
            await asyncio.sleep(self.startup_poll_interval)
            if self._gpu_job is not None and self._gpu_job.runs and await self.query_job_status() == JobStatus.NOTFOUND:
                return

    async def query_job_status(self) -> JobStatus:
        """Return the job's status: `NOTFOUND` if it was never submitted or Slurm says it has ended, `UNKNOWN` if Slurm can't be queried."""
        try:
            if not self.job_id:
                return await self._gpu_query_by_name()
            job = await job_state(self._gpu_prefix(), self.job_id)
            if job is not None and job.runs and job.node:
                self._gpu_host = await self._gpu_address(job.node)
        except EngineError as error:
            self.log.warning("Could not read the state of the job for %s: %s", self._log_name, error)
            return JobStatus.UNKNOWN
        changed = job != self._gpu_job
        self._gpu_job = job if job is not None else JobState(job_id=self.job_id, state="GONE")
        self.job_status = f"{job.state} {job.node}" if job is not None else ""
        if changed:
            self._gpu_news.set()
        if job is None or job.has_ended:
            return JobStatus.NOTFOUND
        return JobStatus.RUNNING if job.runs else JobStatus.PENDING

    async def _gpu_query_by_name(self) -> JobStatus:
        if not self._gpu_begun:
            return JobStatus.NOTFOUND
        found = await jobs_named(self._gpu_prefix(), self.gpu_job_name, self.user.name)
        if not found:
            self._gpu_begun = False
            return JobStatus.NOTFOUND
        self.job_id = found[0]
        return JobStatus.PENDING

    async def _gpu_address(self, name: str) -> str:
        """Return the node's address according to Slurm, which can differ from its name. Raises EngineError."""
        if self._gpu_job is not None and self._gpu_job.node == name and self._gpu_host:
            return self._gpu_host
        return next((node.address for node in await NODES.read(math.inf) if node.name == name), name)

    def state_gethost(self) -> str:
        """Return the address of the node the job is running on."""
        return self._gpu_host

    def state_ispending(self) -> bool:
        """Return whether the job was waiting when its state was last read from Slurm."""
        return self._gpu_job is not None and not self._gpu_job.runs and not self._gpu_job.has_ended

    def state_isrunning(self) -> bool:
        """Return whether the job was running when its state was last read from Slurm."""
        return self._gpu_job is not None and self._gpu_job.runs

    async def cancel_batch_job(self) -> None:
        """Cancel the job. If Slurm does not answer, retry in the background."""
        prefix, job_id = self._gpu_prefix(), self.job_id
        if not job_id:
            return
        try:
            await cancel(prefix, job_id)
        except EngineUnavailableError as error:
            self.log.warning("Job %s for %s will be cancelled once Slurm responds: %s", job_id, self._log_name, error)
            _cancel_later(prefix, job_id, self.log)

    async def stop(self, now: bool = False) -> None:
        """Cancel the job. Unless `now` is set, wait up to `gpu_stop_wait` seconds for Slurm to report that the job has ended.

        Raises EngineError if Slurm refuses. The job still gets cancelled if this call is cancelled.
        """
        await self.cancel_batch_job()
        end_s = time.monotonic() + self.gpu_stop_wait
        while not now and self.job_id:
            if await self.query_job_status() == JobStatus.NOTFOUND:
                return
            if time.monotonic() > end_s:
                self.log.warning(
                    "Job %s for %s did not end within %g s", self.job_id, self._log_name, self.gpu_stop_wait
                )
                return
            await asyncio.sleep(_STOP_POLL_S)

    def clear_state(self) -> None:
        """Clear the state, including everything known about the job."""
        super().clear_state()
        self._gpu_begun, self._gpu_host = False, ""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state saved by an earlier hub."""
        super().load_state(state)
        self._gpu_begun = bool(self.job_id)

    async def gpu_queue(self) -> AsyncGenerator[str, None]:
        """Yield a sentence with the reason for the wait and the expected start time, whenever either of them changes."""
        said = ""
        while True:
            await self._gpu_news.wait()
            self._gpu_news.clear()
            job = self._gpu_job
            if job is None:
                continue
            sentence = f"Job {job.job_id} started on {job.node}" if job.runs else waiting_sentence(job, datetime.now())  # noqa: DTZ005
            if sentence != said and not job.has_ended:
                said = sentence
                yield sentence


_later: set["asyncio.Task[None]"] = set()


def _cancel_later(prefix: Sequence[str], job_id: str, log: logging.Logger) -> None:
    """Cancel a job as soon as Slurm answers. If the hub exits first, the job is cancelled the next time the server starts."""

    async def cancel_it() -> None:
        pause_s, longest_s = _RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
            try:
                await cancel(prefix, job_id)
            except EngineUnavailableError:
                continue
            except EngineError as error:
                log.warning("Could not cancel job %s: %s", job_id, error)
            return

    task = asyncio.get_running_loop().create_task(cancel_it())
    _later.add(task)
    task.add_done_callback(_later.discard)


class _PortHandler(BatchSpawnerAPIHandler):  # type: ignore[misc] # untyped
    @web.authenticated
    def post(self) -> None:
        """Set the port of the server the request's token was issued to. Raises HTTPError for any other request."""
        token, data = self.get_auth_token(), self.get_json_body()
        port = data.get("port") if isinstance(data, dict) else None
        if not isinstance(data, dict) or set(data) != {"port"} or isinstance(port, bool) or not isinstance(port, int):
            raise web.HTTPError(400, 'only the port can be set: send {"port": NUMBER}')
        if not 0 < port <= _PORTS:
            raise web.HTTPError(400, f"port {port} is invalid; expected 1 to {_PORTS}")
        user = self.current_user
        spawner = next(
            (one for one in getattr(user, "spawners", {}).values() if token and one.api_token == token), None
        )
        if spawner is None:
            raise web.HTTPError(403, "this token does not belong to a server")
        spawner.port = port
        self.set_status(201)
        self.finish(json.dumps({"message": "BatchSpawner data configured"}))


def _guard_route() -> None:
    """Replace batchspawner's handler, which would let a request set any attribute of the spawner."""
    for index, (route, handler) in enumerate(default_handlers):
        if handler is BatchSpawnerAPIHandler:
            default_handlers[index] = (route, _PortHandler)


_guard_route()
