"""Summarises a job's usage for its AdminComment in Slurm: its kernels' GPU hours, energy and cost, as measured by the broker.

Slurm itself accepts comments only on running jobs. Comments on jobs that have ended must go to the accounting database (slurmdbd).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR, Usage
from fractional_gpu.protocol.status import SeatStatus

Job = TypeVar("Job")
_DAY_S = 86_400


@dataclass(slots=True, kw_only=True)
class JobFigures:
    owner: str
    leases: set[str] = field(default_factory=set)
    since_s: int
    written: str = ""


def note_leases(client: SeatClient, figures: dict[Job, JobFigures], seats: Mapping[Job, SeatStatus]) -> None:
    jobs = {seat.seat_id: job for job, seat in seats.items()}
    for lease in client.status().leases:
        job = jobs.get(lease.spec.seat)
        if job is not None:
            new = JobFigures(owner=seats[job].owner, since_s=int(time.time()))
            figures.setdefault(job, new).leases.add(lease.lease_id)


def sentences_of(client: SeatClient, jobs: Mapping[Job, JobFigures]) -> dict[Job, str]:
    """Return the comment for each job or pod. The broker is asked once per user. Raises FractionalGPUError."""
    sums: dict[Job, dict[str, Usage]] = {job: {} for job in jobs}
    for owner in sorted({one.owner for one in jobs.values()}):
        of = {lease: job for job, one in jobs.items() if one.owner == owner for lease in one.leases}
        since_s = min(one.since_s for one in jobs.values() if one.owner == owner)
        report = client.usage(["lease"], since_s - _DAY_S, int(time.time()) + _DAY_S, {"user": owner})
        for entry in report.entries:
            job = of.get(entry.of.get("lease", ""))
            if job is not None:
                sums[job].setdefault(entry.currency, Usage()).add(entry.usage)
    return {job: _sentence(one, sums[job]) for job, one in jobs.items()}


def _sentence(job: JobFigures, sums: Mapping[str, Usage]) -> str:
    """Return a comment such as `jupyter-gpu: kernels=2 reserved=1.250h busy=0.310h suspended=0.800h energy=0.0420kWh cost=0.62EUR`."""
    total = Usage()
    for usage in sums.values():
        total.add(usage)
    shares = (("reserved", total.reserved_share), ("busy", total.busy_share), ("suspended", total.suspended_share))
    words = [f"kernels={len(job.leases)}", *(f"{name}={share / SHARE_HOUR:.3f}h" for name, share in shares)]
    words.append(f"energy={total.energy_mj / MJ_PER_KWH:.4f}kWh")
    words += [f"cost={sums[currency].charge_milli / 1000:.2f}{currency}" for currency in sorted(sums) if currency]
    return "jupyter-gpu: " + " ".join(words)
