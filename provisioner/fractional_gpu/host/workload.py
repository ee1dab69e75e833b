"""Finds the Slurm job or Kubernetes pod a process belongs to, based on its control group, and checks that group's memory limit.

Only root and the engine's daemons can move processes into these groups, and a process cannot leave its group, so the group can be trusted.
Paths must start at the root of the hierarchy, because a user can create a group with the same name further down, in a delegated group. We
recognise Slurm groups in control group versions 1 (`/slurm/uid_1000/job_12/step_0` or `/slurm_NODE/...`) and 2
(`/system.slice/slurmstepd.scope/job_12/...`). We also recognise Kubernetes groups with the systemd and cgroupfs drivers, including those in
kind. A reader in a separate control group namespace sees each level above its own group as `/..`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from fractional_gpu.host.control_groups import ROOT, mounts
from fractional_gpu.host.memory import group_limit, group_used_mib
from fractional_gpu.host.process import PROC, lines_of, read_of

SLURM: Final = "slurm"
KUBERNETES: Final = "kubernetes"

_UP: Final = re.compile(r"(?:/\.\.)+(?=/|$)")
_SLURM: Final = re.compile(
    r"(?:/slurm(?:_[^/]+)?/uid_\d+|/system\.slice/(?:[^/]+_)?slurmstepd\.scope)/job_(\d+)(?=/|$)", re.ASCII
)
_UID: Final = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD: Final = re.compile(
    r"(?:/kubelet\.slice)?/(?:kubelet-)?kubepods\.slice(?:/(?:kubelet-)?kubepods-(?:burstable|besteffort)\.slice)?"
    rf"/(?:kubelet-)?kubepods(?:-burstable|-besteffort)?-pod({_UID})\.slice(?=/|$)"
    rf"|(?:/kubelet)?/kubepods(?:/burstable|/besteffort)?/pod({_UID})(?=/|$)",
    re.ASCII,
)
# The same paths as seen from a neighbouring group, without the names that both groups share.
_POD_OF_NEIGHBOUR: Final = re.compile(
    r"(?:/(?:kubelet-)?kubepods\.slice)?(?:/(?:kubelet-)?kubepods-(?:burstable|besteffort)\.slice)?"
    rf"/(?:kubelet-)?kubepods(?:-burstable|-besteffort)?-pod({_UID})\.slice(?=/|$)"
    rf"|(?:/kubepods)?(?:/burstable|/besteffort)?/pod({_UID})(?=/|$)",
    re.ASCII,
)
_PLACES: Final = {
    SLURM: ("slurm*/uid_*/job_{id}", "system.slice/*slurmstepd.scope/job_{id}"),
    KUBERNETES: (
        "*kubepods.slice/*-pod{id_}.slice",
        "*kubepods.slice/*/*-pod{id_}.slice",
        "kubelet.slice/*kubepods.slice/*-pod{id_}.slice",
        "kubelet.slice/*kubepods.slice/*/*-pod{id_}.slice",
        "kubepods/pod{id}",
        "kubepods/*/pod{id}",
        "kubelet/kubepods/pod{id}",
        "kubelet/kubepods/*/pod{id}",
    ),
}
BASE_MIB: Final = 1024
"""The host memory in MiB that a kernel uses for Python, a framework and the driver, before any device memory is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job or pod. `group` is its control group's path from the root of the hierarchy, or "" if the reader cannot see it."""

    engine: str  # SLURM or KUBERNETES
    id: str  # the job's number, or the pod's UID with dashes
    group: str

    @property
    def name(self) -> str:
        return workload_name(self.engine, self.id)


def workload_name(engine: str, workload_id: str) -> str:
    return f"Slurm job {workload_id}" if engine == SLURM else f"pod {workload_id}"


def parse_workload(cgroup: bytes) -> Workload | None:
    """Parse /proc/PID/cgroup. Return None if it names no workload, or if its hierarchies disagree."""
    found: dict[str, Workload] = {}
    for line in lines_of(cgroup):
        path = line.split(":", 2)[-1]
        if path.startswith("/") and (one := _of_path(path)) is not None:
            found[one.name] = one
    return next(iter(found.values())) if len(found) == 1 else None


def workload_of(pid: int, *, proc: Path = PROC) -> Workload | None:
    return parse_workload(read_of(pid, "cgroup", proc=proc))


def own_workload(environment: Mapping[str, str], *, proc: Path = PROC) -> str:
    """Return the name of our job or pod, or "". If control groups are hidden, rely on the engine's environment variables. Never raises."""
    try:
        found = parse_workload((proc / "self" / "cgroup").read_bytes())
    except OSError:
        found = None
    if found is not None:
        return found.name
    if job := environment.get("SLURM_JOB_ID", ""):
        return workload_name(SLURM, job[:32])
    return "a Kubernetes pod" if environment.get("KUBERNETES_SERVICE_HOST") else ""


def serves_whole_host(*, proc: Path = PROC) -> bool:
    """Return whether this process serves the whole host, not just a pod. In a pod, it shares process 1's control group. Raises OSError."""
    return (proc / "1" / "cgroup").read_bytes() != (proc / "self" / "cgroup").read_bytes()


def _of_path(path: str) -> Workload | None:
    above = _UP.match(path)
    start = above.end() if above is not None else 0
    if (job := _SLURM.match(path, start)) is not None:
        return Workload(engine=SLURM, id=job[1], group=job[0] if above is None else "")
    pod = (_POD if above is None else _POD_OF_NEIGHBOUR).match(path, start)
    if pod is None:
        return None
    uid = (pod[1] or pod[2]).replace("_", "-")
    return Workload(engine=KUBERNETES, id=uid, group=pod[0] if above is None else "")


def find_group(engine: str, workload_id: str, *, proc: Path = PROC) -> str:
    """Return the path of the workload's control group, or "" if no fully mounted hierarchy contains it. Raises OSError."""
    forms = [place.format(id=workload_id, id_=workload_id.replace("-", "_")) for place in _PLACES.get(engine, ())]
    for mount in mounts(proc=proc):
        if mount.root != ROOT:
            continue
        for form in forms:
            for folder in mount.point.glob(form):
                path = f"/{folder.relative_to(mount.point)}"
                found = _of_path(path)
                if found is not None and (found.engine, found.id) == (engine, workload_id):
                    return path
    return ""


def group_exists(group: str, *, proc: Path = PROC) -> bool | None:
    """Return whether this group exists in any hierarchy, or None if it is outside the mounted parts of all of them. Raises OSError."""
    folders = [mount.folder(PurePosixPath(group)) for mount in mounts(proc=proc)]
    shown = [folder.is_dir() for folder in folders if folder is not None]
    return any(shown) if shown else None


def memory_warning(engine: str, group: str, cap_mib: int, *, proc: Path = PROC) -> str:
    """Return why the group can't hold a suspended kernel with `cap_mib` of device memory, or "" if it can. Raises OSError or ValueError."""
    limit = group_limit(group, proc=proc)
    base_mib = max(BASE_MIB, group_used_mib(group, proc=proc))
    if limit is None or limit.mib >= base_mib + cap_mib:
        return ""
    remedy = "--mem" if engine == SLURM else "resources.limits.memory"
    return (
        f"{limit.limited_by} is less than the {base_mib} MiB that a kernel uses plus the {cap_mib} MiB of GPU memory saved there "
        f"while it is idle: kernels there may fail to suspend, and then keep others from the GPU; raise {remedy} to "
        f"{base_mib + cap_mib} MiB"
    )
