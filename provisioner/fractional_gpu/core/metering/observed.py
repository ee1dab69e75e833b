"""What the meter is told of a lease: the arbiter's view of it as a `Holding`. Broker and simulator share it."""

from fractional_gpu.core.metering.meter import Holding, Meter
from fractional_gpu.core.metering.usage import Party
from fractional_gpu.core.model import LeaseState, LeaseView

_WITHOUT_PROCESS = frozenset({LeaseState.UNATTACHED, LeaseState.ENDED})


def is_metered(view: LeaseView) -> bool:
    """Whether the lease has a process. One without counts nothing, even if room is reserved for its start: that time is the pool's."""
    return view.state not in _WITHOUT_PROCESS


def holding_of(view: LeaseView) -> Holding:
    """Return what the lease is from now on. Raises ValueError for a lease that is not metered.

    It holds its devices while it has a reservation there, so also during swaps. It is busy while a cell, or what an ended kernel left
    behind, may run on them: not while it is swapped, not while its truth is unknown, and not while its cell waits at a closed gate.
    """
    if not is_metered(view):
        raise ValueError(f"lease {view.spec.lease_id!r} is {view.state.value}: only a lease with a process is metered")
    spec, held = view.spec, view.reserved_mib > 0
    return Holding(
        party=Party(pool=spec.pool, owner=spec.owner, group=spec.group, label=spec.label, seated=bool(spec.seat)),
        milli=spec.fraction_milli,
        count=spec.devices,
        devices=view.device_ids if held else (),
        busy=held and view.busy and view.state is LeaseState.RESIDENT and not view.at_gate,
        suspended=view.state is LeaseState.SUSPENDED,
        device_mib=view.used_mib if held else 0,
        host_mib=view.saved_mib,
    )


def observe(meter: Meter, at_ms: int, wall_ms: int, lease_id: str, view: LeaseView | None) -> None:
    """Tell the meter what the lease is from now on. `view`: None for one that has ended; to call it again with the same changes nothing."""
    if view is not None and is_metered(view):
        meter.set_lease(at_ms, wall_ms, lease_id, holding_of(view))
    else:
        meter.end_lease(at_ms, wall_ms, lease_id)
