"""What the meter is told of a lease: what the arbiter's books say of it, as a `Holding`. Broker and simulator share it."""

from typing import Protocol

from fractional_gpu.core.metering.meter import Holding, Meter
from fractional_gpu.core.metering.usage import Party
from fractional_gpu.core.model import LeaseSpec, LeaseState

_WITHOUT_PROCESS = frozenset({LeaseState.UNATTACHED, LeaseState.ENDED})


class _Gate(Protocol):
    @property
    def ticket(self) -> object:
        """The place in the queue of its next cell, which waits there; None: none does."""


class Metered(Protocol):
    """A lease, as the books have it."""

    spec: LeaseSpec
    state: LeaseState
    held_mib: int
    device_ids: tuple[str, ...]
    busy: bool
    used_mib: int
    saved_mib: int

    @property
    def gate(self) -> _Gate:
        """Its gate."""


class Observer:
    """Makes what the meter is told. The party of a lease is made once for as long as its spec stays."""

    def __init__(self) -> None:
        self._parties: dict[str, tuple[LeaseSpec, Party]] = {}

    def holding(self, lease: Metered) -> Holding | None:
        """Return what the lease is from now on; None: it has no process, so nothing counts, even if room is reserved for its start.

        It holds its devices while it has a reservation there, so also during swaps. It is busy while a cell, or what an ended kernel left
        behind, may run on them: not while it is swapped, not while its truth is unknown, and not while its cell waits at a closed gate.
        """
        spec, state = lease.spec, lease.state
        if state in _WITHOUT_PROCESS:
            return None
        held = lease.held_mib > 0
        return Holding(
            party=self._party(spec),
            milli=spec.fraction_milli,
            count=spec.devices,
            devices=lease.device_ids if held else (),
            busy=held and lease.busy and state is LeaseState.RESIDENT and lease.gate.ticket is None,
            suspended=state is LeaseState.SUSPENDED,
            device_mib=lease.used_mib if held else 0,
            host_mib=lease.saved_mib,
        )

    def forget(self, lease_id: str) -> None:
        """Forget a lease that has ended."""
        self._parties.pop(lease_id, None)

    def _party(self, spec: LeaseSpec) -> Party:
        known = self._parties.get(spec.lease_id)
        if known is not None and known[0] is spec:
            return known[1]
        party = Party(pool=spec.pool, owner=spec.owner, group=spec.group, label=spec.label, seated=bool(spec.seat))
        self._parties[spec.lease_id] = spec, party
        return party


def tell(meter: Meter, at_ms: int, wall_ms: int, lease_id: str, holding: Holding | None) -> None:
    """Tell the meter what the lease is from now on; None: it counts no more. The same again changes nothing."""
    if holding is not None:
        meter.set_lease(at_ms, wall_ms, lease_id, holding)
    else:
        meter.end_lease(at_ms, wall_ms, lease_id)
