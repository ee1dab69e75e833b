"""Manages Slurm jobs' seats on this node. A seat is a job's allocation, registered with the node's broker.

The seat folder (`/run/jupyter-gpu/seats`, owned by root, mode 0711) contains these files for job N:

- `job-N.json` contains the seat and its token, for the job's kernels. Only the job's user can read it (mode 0600).
- `job-N.env` contains lines such as `NAME=value` or `print TEXT` for the job's tasks. All users can read it. It names the seat file even
  before that file exists.
- `job-N.wanted` contains the job's request until the job ends. Only root can read it. The agent uses it to register a seat that the Prolog
  could not register, or that the broker lost along with its ledger.

A share covers a whole job on one node. Each array task and each component of a heterogeneous job counts as a separate job. A job on several
nodes has a seat on each of them.
"""

import fcntl
import grp
import json
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fractional_gpu.client.seat import Seat, SeatClient, write_seat
from fractional_gpu.core.units import format_fraction
from fractional_gpu.engines.engine import EngineError
from fractional_gpu.engines.slurm import OPEN, SHARD, SlurmJob, parse_gres, total_of
from fractional_gpu.host.files import open_own, replace_file
from fractional_gpu.host.workload import BASE_MIB
from fractional_gpu.protocol.errors import BadRequestError, NoRoomError, NotFoundError
from fractional_gpu.protocol.messages import SLURM, ProgressKind, Workload
from fractional_gpu.protocol.seats import SeatRequest
from fractional_gpu.protocol.status import SeatStatus

WHOLE = 1000
_SERVER = "slurm-"
_MOST_GROUPS = 200
_TTL_MS = 60_000
_WANTED = re.compile(r"job-([1-9][0-9]{0,9})\.wanted", re.ASCII)
_LONGEST = 16 * 1024  # characters
_KINDS = ("wanted", "env", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeat:
    """A job's entitlement on this node. `devices` lists the UUIDs of the devices it may use; None means any device in the pool.

    `memory_mib` is the job's memory limit on the node, or None. With `fits`, the share is reduced if its data wouldn't otherwise fit into
    that memory.
    """

    job_id: int
    uid: int
    user: str
    pool: str
    fraction_milli: int
    devices: list[str] | None = None
    has_groups: bool = True  # whether Slurm gives each job separate control groups, which identify its processes
    memory_mib: int | None = None
    fits: bool = True

    def request(self) -> SeatRequest:
        """Return a request that the broker grants without a forecast, because Slurm has already decided."""
        return SeatRequest(
            owner=self.user,
            pool=self.pool,
            fraction_milli=self.fraction_milli,
            groups=_groups_of(self.user),
            server=f"{_SERVER}{self.job_id}",
            uid=self.uid,
            ttl_ms=_TTL_MS,
            admitted=True,
            allowed_devices=self.devices,
            workload=Workload(engine=SLURM, id=str(self.job_id)) if self.has_groups else None,
        )


def job_of(seat: SeatStatus) -> int | None:
    if seat.workload is not None:
        return int(seat.workload.id) if seat.workload.engine == SLURM and seat.workload.id.isdecimal() else None
    number = seat.server.removeprefix(_SERVER)
    # A user of a hub may give a server such a name, but the seat then names the hub and was not admitted by an engine.
    return int(number) if seat.admitted and not seat.hub and seat.server != number and number.isdecimal() else None


def share_of_job(job: SlurmJob, pools: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the pool and the milli-GPU that a job requested, or None if it requested no share.

    `pools` maps each GRES (Slurm's generic resource) to its pool. Raises EngineError if one seat can't cover the request.
    """
    asked = {key: milli for key, milli in job.gres.items() if key.partition(":")[0] in pools and milli > 0}
    if not asked:
        return None
    if len(asked) > 1:
        raise EngineError(
            f"job {job.job_id} asks for {len(asked)} shares ({', '.join(sorted(asked))}), but a job can only have one seat on a node; "
            "ask for one of them"
        )
    key, milli = next(iter(asked.items()))
    name, _, kind = key.partition(":")
    if kind != OPEN:
        raise EngineError(
            f"job {job.job_id} asks for --gres={key}:{milli}, which bypasses the node's admission limit; ask for "
            f"--gres={name}:{OPEN}:{milli}"
        )
    if milli > WHOLE:
        raise EngineError(
            f"job {job.job_id} asks for {milli} thousandths of a GPU ({key}:{milli}); a share is at most {key}:{WHOLE}, a whole GPU; "
            "for several GPUs ask Slurm for whole ones (--gres=gpu:N) on nodes that have them"
        )
    return pools[name], milli


def share_of_shards(job: SlurmJob, node_gres: str, indexes: Sequence[int]) -> int | None:
    """Return how many milli-GPU a job's shards amount to, or None if it has no shards.

    `node_gres` says how many shards a GPU has. `indexes` are the indexes of the GPUs that Slurm chose. Raises EngineError.
    """
    shards = total_of(job.gres, SHARD)
    if not shards:
        return None
    there = parse_gres(node_gres)
    gpus, parts = total_of(there, "gpu"), total_of(there, SHARD)
    if not gpus or parts < gpus:
        raise EngineError(
            f"the size of a shard is unknown: the node has {node_gres!r}, but needs gpu:N and at least N shards"
        )
    if len(indexes) != 1:
        raise EngineError(
            f"job {job.job_id} has shards on {len(indexes)} GPUs, but a share must be on one; ask for at most {parts // gpus} shards"
        )
    return min(WHOLE, shards * WHOLE * gpus // parts)


class SeatFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Create the seat folder. Raises OSError, or EngineError if another user might have created it."""
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        status = self.folder.lstat()
        if self.folder.is_symlink() or status.st_uid != os.geteuid():
            raise EngineError(
                f"the seats folder {self.folder} belongs to another user (uid {status.st_uid}); remove it, and it will be "
                "created again"
            )
        if status.st_mode & 0o777 != 0o711:
            self.folder.chmod(0o711)

    def _path(self, job_id: int, kind: str) -> Path:
        return self.folder / f"job-{job_id}.{kind}"

    def register(self, client: SeatClient, wanted: JobSeat) -> tuple[JobSeat, list[str]]:
        """Take a seat for the job, and write the seat file. Return what was registered and any warnings.

        An idle kernel can leave the GPU only if its data fits into the job's memory. The job has no control group yet, so the amount of
        memory comes from its request to Slurm. Raises BadRequestError if there is too little, NoRoomError if the broker refuses, other
        subclasses of FractionalGPUError, and OSError.
        """
        for line in client.take_seat(wanted.request()):
            if line.kind == ProgressKind.REFUSED:
                raise NoRoomError(line.sentence, reason=line.reason)
            if line.kind != ProgressKind.GRANTED:
                continue
            need_mib = BASE_MIB + line.memory_mib
            if wanted.memory_mib is not None and wanted.memory_mib < need_mib:
                client.release_seat(line.seat_id)
                return self._register_smaller(client, wanted, line.memory_mib)
            seat = Seat(
                seat_id=line.seat_id,
                token=line.token,
                pool=wanted.pool,
                fraction_milli=wanted.fraction_milli,
                memory_mib=line.memory_mib,
            )
            write_seat(seat, self._path(wanted.job_id, "json"), uid=wanted.uid)
            client.confirm_seat(line.seat_id)
            return wanted, [line.warning] if line.warning else []
        raise NoRoomError("the broker ended the request for the seat without a reason; see its log")

    def _register_smaller(self, client: SeatClient, wanted: JobSeat, cap_mib: int) -> tuple[JobSeat, list[str]]:
        has_mib = wanted.memory_mib or 0
        why = (
            f"the job has {has_mib} MiB of memory, less than the {BASE_MIB} MiB that a kernel uses plus the {cap_mib} MiB of GPU "
            f"memory saved there while it is idle; ask for --mem={BASE_MIB + cap_mib}M"
        )
        offers = next((pool.fractions_milli for pool in client.capacity().pools if pool.name == wanted.pool), [])
        most_milli = wanted.fraction_milli * (has_mib - BASE_MIB) // cap_mib
        fitting = [milli for milli in offers if milli <= most_milli]
        if not wanted.fits or not fitting:
            raise BadRequestError(why)
        seat, said = self.register(client, replace(wanted, fraction_milli=max(fitting)))
        share = format_fraction(seat.fraction_milli)
        return seat, [
            f"this job's share is {share} GPU instead of {format_fraction(wanted.fraction_milli)}: {why}",
            *said,
        ]

    def write_environment(self, wanted: JobSeat, socket: str, lines: Sequence[str] = ()) -> None:
        values = {
            "JUPYTER_GPU_SOCKET": socket,
            "JUPYTER_GPU_SEAT_FILE": str(self._path(wanted.job_id, "json")),
            "JUPYTER_GPU_DEFAULT_POOL": wanted.pool,
            "JUPYTER_GPU_DEFAULT_FRACTION": f"{wanted.fraction_milli}m",
            "JUPYTER_GPU_DEFAULT_PROVISIONER": "fractional-gpu-provisioner",
            "CUDA_VISIBLE_DEVICES": "",
        }
        about = (
            f"batch jupyter gpu: {format_fraction(wanted.fraction_milli)} GPU for kernels in environments that have "
            "jupyter-fractional-gpu; other kernels and programs see no GPU"
        )
        self._write_environment(wanted.job_id, [*(f"{name}={value}" for name, value in values.items()), about], lines)

    def write_refusal(self, job_id: int, socket: str, line: str) -> None:
        try:
            self._write_environment(job_id, [f"JUPYTER_GPU_SOCKET={socket}", "CUDA_VISIBLE_DEVICES="], [line])
        except OSError:  # a full disk still has room for an empty file, and the task prolog explains that
            self._path(job_id, "env").touch()
            self._path(job_id, "env").chmod(0o644)

    def _write_environment(self, job_id: int, values: Sequence[str], lines: Sequence[str]) -> None:
        told = [f"print jupyter gpu: {_one_line(line)}" for line in lines]
        text = "\n".join([*map(_one_line, values), *told]) + "\n"
        replace_file(self._path(job_id, "env"), text.encode(), prepare=lambda descriptor: os.fchmod(descriptor, 0o644))

    @contextmanager
    def writing_wanted(self, wanted: JobSeat) -> Iterator[None]:
        """Write the job's request, and keep other processes from registering it until the block ends. Raises OSError."""

        def lock(descriptor: int) -> None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)

        content = json.dumps(asdict(wanted)).encode()
        descriptor = replace_file(self._path(wanted.job_id, "wanted"), content, prepare=lock, keep=True)
        try:
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def claimed(self, job_id: int) -> Iterator[bool]:
        """Yield whether this process may register the job's request. If so, other processes are locked out until the block exits."""
        with ExitStack() as stack:
            try:
                descriptor = open_own(self._path(job_id, "wanted"), os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            except OSError:  # the job has ended, or its Prolog is registering it
                free = False
            yield free

    def wanted(self) -> Iterator[JobSeat]:
        """Yield the requests of all jobs whose Epilog has not run."""
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.folder)):  # noqa: PTH208 - names only
                if _WANTED.fullmatch(name) and (found := self._read_wanted(self.folder / name)) is not None:
                    yield found

    @staticmethod
    def _read_wanted(path: Path) -> JobSeat | None:
        try:
            with os.fdopen(open_own(path, os.O_RDONLY)) as file:
                return JobSeat(**json.loads(file.read(_LONGEST)))
        except (OSError, ValueError, TypeError):
            return None  # the file was removed, or is not ours

    def knows(self, job_id: int) -> bool:
        return any(self._path(job_id, kind).exists() for kind in _KINDS)

    def is_wanted(self, job_id: int) -> bool:
        """Return whether the job's request still exists, which means that its Epilog has not run."""
        return self._path(job_id, "wanted").exists()

    def remove(self, job_id: int) -> None:
        for kind in _KINDS:
            self._path(job_id, kind).unlink(missing_ok=True)

    def release(self, client: SeatClient, job_id: int) -> None:
        for seat in client.seats().seats:
            if job_of(seat) == job_id:
                with suppress(NotFoundError):
                    client.release_seat(seat.seat_id)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _groups_of(user: str) -> list[str]:
    try:
        numbers = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        return []
    names = []
    for number in numbers[:_MOST_GROUPS]:
        with suppress(KeyError):
            names.append(grp.getgrgid(number).gr_name)
    return names
