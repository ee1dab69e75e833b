"""Slurm's Prolog and Epilog on a node. The Prolog registers a job's allocation as a seat, and the Epilog ends the seat. They run as root.

Slurm drains a node whose Prolog or Epilog fails, so both exit successfully even if the broker, the controller or the disk fails. Errors
appear in the log and in the job's output. Slurm waits about ten seconds for a Prolog (BatchStartTimeout). The Prolog waits for the
controller for up to `CONTROLLER_S` and for the broker for up to `BROKER_S`. If they take longer, the agent registers the seat later.
Neither the Prolog nor the Epilog starts a broker, because the broker would end with the job.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.engines.engine import EngineError
from fractional_gpu.engines.job_seats import JobSeat, SeatFiles, job_of, share_of_job, share_of_shards
from fractional_gpu.engines.slurm import SHARD, Slurm, SlurmJob, job_number, total_of
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError, ForbiddenError, FractionalGPUError

FIT, ALLOW = "fit", "allow"
CONTROLLER_S = 3.0
BROKER_S = 3.0
_PROC_GPUS = Path("/proc/driver/nvidia/gpus")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSettings:
    """Settings shared by the Prolog, the Epilog and the agent.

    `pools` maps each GRES (Slurm's generic resource) to its pool. `shard_pool` is the pool for jobs with shards, or "" to ignore them.
    `has_groups` says whether Slurm gives each job its own control groups (`proctrack/cgroup`). `short_memory` says what to do if the job's
    memory limit is too small for the data on its share of the GPU.
    """

    socket: str
    folder: Path
    pools: Mapping[str, str] = field(default_factory=lambda: {"jgpu": "default"})
    shard_pool: str = ""
    has_groups: bool = True
    short_memory: str = FIT
    controller_s: float = CONTROLLER_S
    broker_s: float = BROKER_S


def begin(settings: HookSettings, environment: Mapping[str, str], log: Callable[[str], None]) -> None:
    files = SeatFiles(settings.folder)
    number: int | None = None
    try:
        number = job_number(environment.get("SLURM_JOB_ID", ""))
        slurm = Slurm(environment.get("SLURMD_NODENAME", ""), timeout_s=settings.controller_s)
        job = slurm.job(number)
        if job is None:
            raise EngineError(f"Slurm does not know of a job {number}")
        wanted = _wanted(settings, slurm, job, environment)
        if wanted is None:
            return
        files.prepare()
        with files.writing_wanted(wanted):
            seat, told = _register(settings, files, wanted, log)
            files.write_environment(seat, settings.socket, told)
    except (FractionalGPUError, OSError) as error:
        log(f"job {environment.get('SLURM_JOB_ID', '?')[:20]!a}: no seat: {error}")
        if number is not None:
            with suppress(OSError, EngineError):
                files.prepare()
                files.remove(number)
                files.write_refusal(number, settings.socket, f"this job has no GPU share: {error}")


def end(settings: HookSettings, environment: Mapping[str, str], log: Callable[[str], None]) -> None:
    """End the seat of a job that has ended, and remove its files. If the broker doesn't answer, the node agent ends the seat later."""
    files = SeatFiles(settings.folder)
    try:
        number = job_number(environment.get("SLURM_JOB_ID", ""))
        if not files.knows(number):
            return
        try:
            with _client(settings) as client:
                files.release(client, number)
            log(f"job {number}: its seat has ended")
        finally:
            files.remove(number)
    except (FractionalGPUError, OSError) as error:
        log(
            f"job {environment.get('SLURM_JOB_ID', '?')[:20]!a}: the Epilog could not end its seat, so the seat will end later: {error}"
        )


def register_late(settings: HookSettings, client: SeatClient, wanted: JobSeat, log: Callable[[str], None]) -> bool:
    files = SeatFiles(settings.folder)
    try:
        with files.claimed(wanted.job_id) as free:
            if not free or any(job_of(seat) == wanted.job_id for seat in client.seats().seats):
                return False
            try:
                seat, told = files.register(client, wanted)
                files.write_environment(seat, settings.socket, told)
            finally:
                if not files.is_wanted(wanted.job_id):  # the Epilog ran in the meantime and may have missed this seat
                    files.remove(wanted.job_id)
                    files.release(client, wanted.job_id)
    except (FractionalGPUError, OSError) as error:
        log(f"job {wanted.job_id}: still without a seat: {error}")
        return False
    log(f"job {wanted.job_id}: a seat of {wanted.fraction_milli} thousandths in pool {wanted.pool!r}, registered late")
    return True


def _wanted(settings: HookSettings, slurm: Slurm, job: SlurmJob, environment: Mapping[str, str]) -> JobSeat | None:
    share, devices = share_of_job(job, settings.pools), None
    if share is None:
        if not settings.shard_pool or not total_of(job.gres, SHARD):
            return None
        indexes = [int(word) for word in environment.get("SLURM_JOB_GPUS", "").split(",") if word.isdecimal()]
        milli_of_shards = share_of_shards(job, slurm.fields().get("Gres", ""), indexes)
        if milli_of_shards is None:
            return None
        share, devices = (settings.shard_pool, milli_of_shards), [_device(settings, indexes[0])]
    pool, milli = share
    return JobSeat(
        job_id=job.job_id,
        uid=job.uid,
        user=job.user,
        pool=pool,
        fraction_milli=milli,
        devices=devices,
        has_groups=settings.has_groups,
        memory_mib=job.memory_mib if settings.has_groups and settings.short_memory != ALLOW else None,
        fits=settings.short_memory == FIT,
    )


def _register(
    settings: HookSettings, files: SeatFiles, wanted: JobSeat, log: Callable[[str], None]
) -> tuple[JobSeat, list[str]]:
    try:
        with _client(settings) as client:
            seat, told = files.register(client, wanted)
    except (BadRequestError, ForbiddenError):
        raise
    except (FractionalGPUError, OSError) as error:
        log(f"job {wanted.job_id}: no seat yet: {error}")
        later = "; it will get one when the node's broker responds" if isinstance(error, BrokerUnavailableError) else ""
        return wanted, [f"this job has no GPU share yet: {error}{later}"]
    log(f"job {seat.job_id}: a seat of {seat.fraction_milli} thousandths in pool {seat.pool!r} for {seat.user!a}")
    return seat, told


@contextmanager
def _client(settings: HookSettings) -> Iterator[SeatClient]:
    """Yield a client whose calls all end within `broker_s`, because the usual wait for a seat is too long for a hook."""
    with SeatClient(settings.socket, timeout_s=settings.broker_s) as client:
        timer = threading.Timer(settings.broker_s, client.close)
        timer.daemon = True
        timer.start()
        try:
            yield client
        finally:
            timer.cancel()


def _device(settings: HookSettings, index: int) -> str:
    """Return the UUID of the device `/dev/nvidiaINDEX`, which Slurm assigned to a job. Raises FractionalGPUError."""
    for folder in sorted(_PROC_GPUS.iterdir()) if _PROC_GPUS.is_dir() else ():
        text = (folder / "information").read_text(errors="replace")
        minor, uuid = _MINOR.search(text), _UUID.search(text)
        if minor is not None and uuid is not None and int(minor[1]) == index:
            return uuid[1]
    with _client(settings) as client:  # simulated devices have no device files, so ask the broker
        for device in client.status().devices:
            if device.index == index:
                return device.device_id
    raise EngineError(
        f"Slurm chose GPU {index}, which the broker does not manage: the pools must include all devices in gres.conf"
    )
