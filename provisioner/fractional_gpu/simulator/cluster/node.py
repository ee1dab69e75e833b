"""What the broker of one node forecasts for the engine: how many thousandths more of its devices it would give away.

The forecast is the one by which a hub's seats are placed (`core.seat_packing`), asked as the node's agent asks it: how many seats of each
fraction on offer, of users of whom nothing is known, the node takes within the pool's `wait_bound`; what is admissible may be divided into
any of these. A job that has begun is a seat on the device that the forecast chooses. What its user does is learnt from the cells that have
ended on this node, as the ledger of its broker has it.
"""

from dataclasses import dataclass, field

from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.core.seat_packing import (
    PRIOR_USAGE,
    SeatDevice,
    SeatLoad,
    admissible_milli,
    choose_device,
    estimated_usage,
    least_waiting,
    more_seats_in,
)
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.traces import Session

__all__ = ["WAIT_BOUND_MILLI", "WAIT_TARGET_MS", "Node", "WaitTerms"]

WAIT_TARGET_MS = 30_000
WAIT_BOUND_MILLI = 50
"""The usual `wait_target` and `wait_bound` of a pool: one cell of twenty may wait longer than half a minute."""
_ANY_FRACTIONS = (125, 250, 500, 750, 1000)  # of a pool that gives any
_MOST_ON_A_DEVICE_MILLI = 16_000
_DUTY_STEP = 10  # thousandths: forecasts of like loads are computed once


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTerms:
    """How long a cell should wait at most (ms), and the thousandths of the cells that may wait longer.

    `together`: devices on which each other's suspended kernels may resume are forecast together; False: one by one, for comparison.
    """

    target_ms: int = WAIT_TARGET_MS
    bound_milli: int = WAIT_BOUND_MILLI
    together: bool = True


@dataclass(slots=True)
class _User:
    lived_ms: int = 0  # of jobs that have ended
    busy_ms: int = 0


@dataclass(slots=True)
class _Seat:
    session: Session  # as it runs: from its own begin on
    mib: int
    devices: tuple[int, ...]


@dataclass(slots=True)
class Node:
    """One node's seats, and what it would still admit. Thousandths are milli-GPU."""

    host: Host
    terms: WaitTerms
    _seats: dict[str, _Seat] = field(default_factory=dict)
    _users: dict[str, _User] = field(default_factory=dict)

    def seat(self, session: Session, lease: LeaseSpec, now_ms: int) -> None:
        """Count a job from now on, on the devices where the forecast places it. `session` has its times as it runs."""
        places = self._places(now_ms)
        load = self._load(session.user, lease.reserve_mib, now_ms)
        taken: list[int] = []
        for _ in range(lease.devices):
            left = [place for number, place in enumerate(places) if number not in taken]
            device_id, _ = choose_device(load, left, target_ms=self.terms.target_ms, bound_milli=self.terms.bound_milli)
            if device_id is None:
                place, _ = least_waiting(load, left)
                device_id = (place or left[0]).device_id
            taken.append(next(number for number, place in enumerate(places) if place.device_id == device_id))
        self._seats[session.session_id] = _Seat(session, lease.reserve_mib, tuple(taken))

    def unseat(self, session_id: str) -> None:
        """Count a job no more; what its user did is remembered."""
        session = self._seats.pop(session_id).session
        user = self._users.setdefault(session.user, _User())
        user.lived_ms += session.close_ms - session.open_ms
        user.busy_ms += sum(cell.duration_ms for cell in session.cells if cell.gpus)

    def admissible_milli(self, now_ms: int) -> int:
        """Return how many thousandths more the node would give away."""
        pool = self.host.pools[0]
        places, counts = self._places(now_ms), {}
        for milli in pool.fractions_milli or _ANY_FRACTIONS:
            mib = max(1, self.host.device_mib * milli // 1000)
            counts[milli] = more_seats_in(
                places,
                SeatLoad(mib=mib, duty_milli=PRIOR_USAGE.duty_milli),
                target_ms=self.terms.target_ms,
                bound_milli=self.terms.bound_milli,
                most=_MOST_ON_A_DEVICE_MILLI // milli,
            )
        return admissible_milli(counts)

    def _places(self, now_ms: int) -> list[SeatDevice]:
        pool = self.host.pools[0]
        loads: list[list[SeatLoad]] = [[] for _ in self.host.devices]
        for seat in self._seats.values():
            for number in seat.devices:
                loads[number].append(self._load(seat.session.user, seat.mib, now_ms))
        return [
            SeatDevice(
                device_id=device.device_id,
                capacity_mib=device.leasable_mib,
                loads=tuple(there),
                kind=device.name if self.terms.together and pool.may_move and not device.why_no_move else "",
            )
            for device, there in zip(self.host.devices, loads, strict=True)
        ]

    def _load(self, user: str, mib: int, now_ms: int) -> SeatLoad:
        known = self._users.get(user, _User())
        live_ms, busy_ms = known.lived_ms, known.busy_ms
        for seat in self._seats.values():
            if seat.session.user == user:
                live_ms += now_ms - seat.session.open_ms
                busy_ms += _busy_ms(seat.session, now_ms)
        duty_milli = estimated_usage(live_ms=live_ms, busy_ms=busy_ms, busy_mib_ms=0).duty_milli
        return SeatLoad(mib=mib, duty_milli=min(1000, -(-duty_milli // _DUTY_STEP) * _DUTY_STEP))


def _busy_ms(session: Session, now_ms: int) -> int:
    """Return how long GPU cells of the session have run until now."""
    return sum(
        min(cell.duration_ms, now_ms - cell.start_ms) for cell in session.cells if cell.gpus and cell.start_ms < now_ms
    )
