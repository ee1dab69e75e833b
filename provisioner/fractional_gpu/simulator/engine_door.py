"""Simulates an engine (Slurm or Kubernetes) that places jobs by a count of how much more GPU each node's broker could grant.

See docs/cluster-simulation.md. The count comes from the forecast that also places seats (`core.seat_packing`), within the pool's
oversubscription limit. It assumes that every user computes for the same share of the time (the trace's average), and that kernels can move
between all devices of a pool.
"""

from collections.abc import Sequence

from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.core.seat_packing import SeatDevice, SeatLoad, choose_device
from fractional_gpu.simulator.hosts import Door, DoorRule
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.traces import Session

AGENT_MS = 2_000  # from a job's end until the node's agent has updated the count


class EngineDoor(Door):
    """A door that gives each job to the node with the most room whose count is high enough. If there is no such node, the job is queued.

    `target_ms` and `bound_milli` are the pool's `wait_target` and `wait_bound`.
    """

    notice_ms = AGENT_MS

    def __init__(self, hosts: Sequence[Host], trace: Sequence[Session], *, target_ms: int, bound_milli: int) -> None:
        super().__init__(hosts, trace, DoorRule.SLURM_COUNT)
        self._target_ms, self._bound_milli = target_ms, bound_milli
        open_ms = sum(session.close_ms - session.open_ms for session in trace)
        busy_ms = sum(cell.duration_ms for session in trace for cell in session.cells if cell.gpus)
        self._duty_milli = min(1000, 1000 * busy_ms // max(1, open_ms))
        self._pools = [{pool.name: (pool, host.leasable_in(pool)) for pool in host.pools} for host in hosts]
        self._seats_mib = [{pool.name: list[int]() for pool in host.pools} for host in hosts]
        self._refused: set[object] = set()  # kinds of jobs that wait, until a job ends

    def choose(self, session: Session) -> tuple[int, LeaseSpec] | None:
        kind, able = (self._leases.size(session), session.pool), self._able(session)
        if kind not in self._refused:
            for host in sorted(able, key=lambda host: (-self._room_mib[host][able[host].pool], host)):
                lease = able[host]
                if self._covers(host, lease):
                    self._seats_mib[host][lease.pool] += [lease.reserve_mib] * lease.devices
                    self._count(host, lease, 1)
                    return host, lease
        self._refused.add(kind)
        return None

    def _covers(self, host: int, lease: LeaseSpec) -> bool:
        pool, sizes_mib = self._pools[host][lease.pool]
        seats_mib = [*self._seats_mib[host][lease.pool], *[lease.reserve_mib] * lease.devices]
        most_milli = pool.oversubscription_milli
        if most_milli is not None and sum(seats_mib) > sum(sizes_mib) * most_milli // 1000:
            return False
        load, *loads = [SeatLoad(mib=mib, duty_milli=self._duty_milli) for mib in reversed(seats_mib)]
        places = [  # the forecast sees devices of one kind as one, so all seats may be on the first
            SeatDevice(device_id=str(number), capacity_mib=mib, loads=() if number else tuple(loads), kind="any")
            for number, mib in enumerate(sizes_mib)
        ]
        return choose_device(load, places, target_ms=self._target_ms, bound_milli=self._bound_milli)[0] is not None

    def closed(self, host: int, lease: LeaseSpec) -> None:
        super().closed(host, lease)
        self._refused.clear()
        for _ in range(lease.devices):
            self._seats_mib[host][lease.pool].remove(lease.reserve_mib)
