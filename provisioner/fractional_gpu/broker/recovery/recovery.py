"""Recovers leases when a broker starts: finds out what has become of the previous broker's leases.

Nothing is replayed. For each lease in the ledger, /proc shows whether its process is alive, and the driver reports the process's state.
Half-done work is finished or undone, whichever is safe. A lease in an unknown state is quarantined.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import zmq

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import CheckpointState, Ending, Kernel, PendingRequests, Survivor
from fractional_gpu.broker.kernels.process_inspector import HostSnapshot
from fractional_gpu.broker.swap.swap import Swaps, Truth
from fractional_gpu.core.events import LeaseRecovered
from fractional_gpu.core.model import HOLDING, LeaseState
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.host.process import ProcessIdentity, is_alive
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord

log = logging.getLogger(__name__)

_WITH_MEMORY = HOLDING | {LeaseState.SUSPENDED}
_IN_A_SWAP = frozenset({LeaseState.SUSPENDING, LeaseState.SUSPENDED, LeaseState.RESUMING, LeaseState.QUARANTINED})
_HOMELESS = (
    "its GPU memory is saved, but the record of its device was lost: run `jupyter gpu broker --stop`, then `jupyter gpu rescue`, while "
    "no other process uses the GPUs; the kernel keeps its variables"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundLease:
    record: LeaseRecord
    left: list[Survivor]  # processes with device memory that an ended kernel left behind
    truth: Truth | None  # None if unknown


async def recover(broker: Broker, swaps: Swaps, ledger: Ledger, lost: Sequence[LeaseRecord] = ()) -> None:
    """Tell the arbiter the actual states of the leases in the ledger and in `lost`. It must already know the pools and devices."""
    begun_s = time.monotonic()
    records = [*ledger.live_leases(), *lost]
    broker.kernels.update({record.spec.lease_id: kernel_of(record) for record in records})
    host = None  # one snapshot for all leases; without it each lease takes its own, which may fail
    try:
        host = await swaps.inspector.take()
    except GPUError as error:
        log.warning("the devices are not responding: %s", error)
    found = [await _examine(broker, swaps, record, host) for record in records]
    # Introduce all leases at once and only now. An arbiter that knew of only some leases would give away the room of the others.
    for one in found:
        _introduce(broker, one)
    log.info("found %d leases in %.3f s", len(records), time.monotonic() - begun_s)


async def _examine(broker: Broker, swaps: Swaps, record: LeaseRecord, host: HostSnapshot | None) -> _FoundLease:
    """Determine the lease's state. Half-done work is finished or undone, whichever is safe (`Swaps.truth`)."""
    kernel = broker.kernels[record.spec.lease_id]
    if kernel.launch.claim:  # a claim has no process
        state = record.state if record.state is LeaseState.RESIDENT else LeaseState.UNATTACHED
        return _FoundLease(record=record, left=[], truth=Truth(state=state, device_id=record.device_id))
    left = await _find_left(broker, kernel, record, host)
    kernel.checkpoint.needs_driver = bool(swaps.inspector.off) and record.state in _IN_A_SWAP
    if kernel.checkpoint.needs_driver and kernel.identity is not None:
        # If the driver cannot be asked, the devices' counters are used instead. They count a locked process or a half-saved tree as
        # running. If such a lease were marked resident, it would stay locked for good, so a lease found in a swap waits for the driver.
        truth = None
    else:
        truth = await swaps.truth(kernel, record.device_id, record.saved_mib, host)
    return _FoundLease(record=record, left=left, truth=truth)


def _introduce(broker: Broker, found: _FoundLease) -> None:
    record = found.record
    kernel = broker.kernels[record.spec.lease_id]
    state, device_id, saved_mib = _believe(record, found.truth)
    pin_left_ms = record.pinned_until_ms - broker.deadlines.now_ms() if record.pinned_until_ms else 0
    kernel.measurement.has_used = saved_mib > 0
    identity, kernel.identity = kernel.identity if state is not LeaseState.UNATTACHED else None, None
    log.info("lease %s: found %s (was %s)", kernel.lease_id[:8], state, record.state)
    broker.dispatch(
        LeaseRecovered(
            at_ms=now_ms(),
            spec=record.spec,
            state=state,
            generation=record.generation + 1,
            device_id=device_id,
            saved_mib=saved_mib,
            busy=identity is not None,  # its messages have not been heard yet, and doubt counts as busy
            device_ids=next((known for known in (record.device_ids, record.home_ids) if known[:1] == (device_id,)), ()),
            sentence=_HOMELESS if state is LeaseState.SUSPENDED and device_id is None else "",
            pinned_until_ms=now_ms() + pin_left_ms if pin_left_ms > 0 else 0,
        )
    )
    if kernel.launch.claim:
        if broker.kernels.get(kernel.lease_id) is kernel:  # the claim's time is not over
            broker.watch_holder(kernel)
    elif found.left and state is not LeaseState.UNATTACHED:
        if not broker.survivors.keep(kernel, found.left):
            broker.survivors.kernel_ended(kernel, kernel.ending.root)
    elif identity is not None:
        _follow_found(broker, kernel, identity, record.connection)
    elif kernel.ending.released or state is not LeaseState.UNATTACHED:
        broker.survivors.kernel_ended(kernel, kernel.ending.root)
    else:
        broker.end_burst(kernel)
    broker.records.save(kernel)


async def _find_left(broker: Broker, kernel: Kernel, record: LeaseRecord, host: HostSnapshot | None) -> list[Survivor]:
    """Return the processes with device memory that an ended kernel left behind. The first becomes `kernel.identity`."""
    if kernel.identity is not None or record.state not in _WITH_MEMORY or host is None:
        return []
    kernel.ending.root = root = record.identity
    try:
        left = await broker.survivors.find(kernel, root, host, saved=record.state in _IN_A_SWAP)
    except GPUError as error:
        log.warning("lease %s: cannot find the processes that its kernel left behind: %s", kernel.lease_id[:8], error)
        return []
    kernel.identity = left[0].identity if left else None
    return left


def _follow_found(broker: Broker, kernel: Kernel, identity: ProcessIdentity, connection: str) -> None:
    """Watch the found process, even if its messages cannot be received. If the process is gone, treat the kernel as ended."""
    try:
        try:
            broker.follow(kernel, identity, connection)
        except (ValueError, zmq.ZMQError) as error:
            # This broker refuses the connection, or its socket is gone.
            log.warning("lease %s: cannot listen to its kernel, so it counts as busy: %s", kernel.lease_id[:8], error)
            kernel.watch_process(identity, partial(broker.process_gone, kernel, identity))
            kernel.connection = connection
    except ProcessLookupError:
        broker.process_unwatched(kernel, identity)


def kernel_of(record: LeaseRecord) -> Kernel:
    lives = record.identity is not None and record.connection and is_alive(record.identity)
    return Kernel(
        lease_id=record.spec.lease_id,
        uid=record.uid,
        token_sha256=record.token_sha256,
        created_ms=record.created_ms,
        facts=record.facts,
        gated=record.spec.gated,
        taken_over=record.taken_over,
        identity=record.identity if lives else None,
        members=frozenset(record.members),
        launch=record.launch,
        ending=Ending(released=record.released),
        requests=PendingRequests(size_before_burst=record.own_size),
        checkpoint=CheckpointState(homes=record.home_ids),
    )


def _believe(record: LeaseRecord, truth: Truth | None) -> tuple[LeaseState, str | None, int]:
    if truth is None or truth.state is LeaseState.QUARANTINED:
        # The ledger gets every reservation before a kernel uses it, so a reservation that is not in the ledger does not exist.
        return LeaseState.QUARANTINED, record.device_id if record.state in HOLDING else None, record.saved_mib
    if truth.state is LeaseState.NO_CONTEXT and record.state in HOLDING and record.device_id is not None:
        # The kernel had a reservation, and its gate may be open. The reservation stays, as the kernel may create a context at any moment.
        return LeaseState.RESIDENT, record.device_id, 0
    if truth.state is LeaseState.RESIDENT:
        device_id = truth.device_id or record.device_id
        return (LeaseState.RESIDENT, device_id, 0) if device_id else (LeaseState.QUARANTINED, None, record.saved_mib)
    return truth.state, truth.device_id or record.device_id, truth.saved_mib
