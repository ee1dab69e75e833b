"""Takes back leases that the ledger does not know, from the processes that carry them.

A ledger can be lost while kernels live: deleted, moved away, replaced by an older copy. Each kernel still has its lease's id and the path
of its broker's socket in its environment, and a second record of the lease may lie in a file that a broker wrote (`lease_files`).

- The ledger wins. A lease that it knows, as live or as ended, is not looked for.
- A record counts if the process that it names lives (boot, pid, start time), belongs to the user that it names, and carries the lease.
- Without a record the environment proves one thing: which user's process makes the claim. Such a lease gets priority 0, no seat, the pool
  of its device and the size of what the driver and the devices say it has. A process that has nothing there gets nothing from the
  search: a flood of processes takes no room. When its kernel requests the GPU, a lease is requested for it, within every limit.
- What is saved, of unknown size, comes back to a device that it has alone, and gets the size that it uses then.
- Where the device of a checkpoint is unknown (several devices, no record), the lease is quarantined: a restore elsewhere could kill it.
"""

import asyncio
import json
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Final

import msgspec

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.kernels.connection import check_endpoints, command_connection, connection_from_json
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import LEASE_VARIABLE, NOMINAL_MIB, HostSnapshot
from fractional_gpu.broker.kernels.request_validation import Peer, fraction_for, guaranteed_mib, user_group
from fractional_gpu.broker.lanes import ATTACHING
from fractional_gpu.broker.persistence.lease_files import LeaseFiles, read_lease_files, remove_lease_file
from fractional_gpu.broker.recovery.recovery import follow_found, identity_of, kernel_of, take_over
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.effects import LeaseRefused
from fractional_gpu.core.events import Attached, LeaseRequested, ResizeRequested
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec
from fractional_gpu.gpu.interface import GPUError, ProcessState
from fractional_gpu.host.accounts import account_name, account_uid
from fractional_gpu.host.process import (
    ProcessIdentity,
    environment_value,
    find_ipykernel,
    is_alive,
    loads_extension,
    owner_uid,
    read_command,
    read_environment,
    scan,
)
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.errors import ConflictError, NoRoomError, RequestTooLargeError
from fractional_gpu.protocol.limits import MAX_LEASES, MAX_LEASES_PER_UID, MAX_NAME
from fractional_gpu.protocol.messages import COMMAND

# -- lost processes ----------------------------------------------------------------------------------------------------
# What `/proc` says about processes that carry a lease in their environment, for a broker that lost its ledger.
#
# - A process writes its environment, its command line and its connection file itself. So they decide nothing about sizes, priorities or
#   other users: only the uid and the identity of the process come from the operating system.
# - A file that the command line names is read only if it belongs to the process's user, and without waiting for it.


UNKNOWN_CONNECTION: Final = "{}"
"""Stands for the connection of a kernel whose connection file is gone: it cannot be heard, so it counts as busy."""

_SOCKET_VARIABLE: Final = "JUPYTER_GPU_SOCKET"
KIND_VARIABLE: Final = "JUPYTER_GPU_KIND"
_NAME_VARIABLE: Final = "JPY_SESSION_NAME"
_LONGEST_FILE: Final = 64 * 1024  # bytes of a connection file
_LEASE_ID: Final = re.compile(r"[0-9a-zA-Z_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """The oldest process of a user that carries a lease's id: by all appearances the root of its kernel's tree."""

    lease_id: str
    uid: int
    identity: ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a process's command line says of it. `connection`: a connection file's JSON, checked, or UNKNOWN_CONNECTION."""

    connection: str = UNKNOWN_CONNECTION
    kernel_id: str = ""
    is_kernel: bool = False  # it names a connection file
    ipykernel: bool = False
    gated: bool = False  # our extension is to load
    label: str = ""


def carriers(uid: int | None, socket: str | None = None) -> list[Carrier]:
    """Return the oldest process of each lease and user, oldest first; of one user only if `uid` is given.

    With `socket`, only those that were started for the broker on that socket. Blocks. Raises OSError.
    """
    snapshot = scan(LEASE_VARIABLE, None if uid is None else {uid})
    oldest: dict[tuple[str, int], Carrier] = {}
    for lease_id, members in snapshot.marked(uid).items():
        if not _LEASE_ID.fullmatch(lease_id):
            continue
        for identity in members:
            owner = snapshot.owner(identity)
            if owner is not None:
                oldest.setdefault((lease_id, owner), Carrier(lease_id=lease_id, uid=owner, identity=identity))
    found = sorted(oldest.values(), key=lambda one: (one.identity.start_time, one.identity.pid))
    return [one for one in found if socket is None or _is_for(one.identity.pid, socket)]


def _is_for(pid: int, socket: str) -> bool:
    try:
        own = environment_value(pid, _SOCKET_VARIABLE)
    except (ProcessLookupError, PermissionError):
        return False
    return bool(own) and os.path.realpath(str(own)) == os.path.realpath(socket)


def carries(pid: int, lease_id: str) -> bool:
    """Return whether the process that has this pid now carries the lease."""
    try:
        return pid > 0 and environment_value(pid, LEASE_VARIABLE) == lease_id
    except (ProcessLookupError, PermissionError):
        return False


def still_carries(identity: ProcessIdentity, uid: int, lease_id: str) -> bool:
    """Return whether exactly this process lives, belongs to the user, and carries the lease."""
    try:
        return is_alive(identity) and owner_uid(identity.pid) == uid and carries(identity.pid, lease_id)
    except (ProcessLookupError, PermissionError):
        return False


def command_of(one: Carrier) -> Command:
    """Return what the process's command line says; an empty `Command` for a process that is gone. Blocks."""
    pid = one.identity.pid
    try:
        kind = environment_value(pid, KIND_VARIABLE)
        words = read_command(pid)
        name = read_environment(pid).get(_NAME_VARIABLE, "")
    except OSError:
        return Command()
    if kind == COMMAND:
        connection = command_connection(
            served=True
        )  # whether it serves is not known: idle ones shall not stay for ever
        return Command(connection=connection, is_kernel=True, label=printable(PurePath(words[0]).name)[:MAX_NAME])
    paths = [path for word in words if (path := word.rpartition("=")[2]).endswith(".json")]
    connection = next((text for path in paths if (text := _connection(path, one.uid, pid))), "")
    named = next((PurePath(path).stem for path in paths if PurePath(path).name.startswith("kernel-")), "")
    return Command(
        connection=connection or UNKNOWN_CONNECTION,
        kernel_id=printable(named.removeprefix("kernel-"))[:MAX_NAME],
        is_kernel=bool(connection or named),
        ipykernel=find_ipykernel(words) is not None,
        gated=loads_extension(words),
        label=printable(PurePath(name).name)[:MAX_NAME],
    )


def _connection(path: str, uid: int, pid: int) -> str:
    """Return the connection file's text if it is one, and the user's own; else ""."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
            return ""
        connection = json.loads(os.read(descriptor, _LONGEST_FILE))
        check_endpoints(connection_from_json(connection), uid, pid)
    except (OSError, ValueError, RecursionError):
        return ""
    finally:
        os.close(descriptor)
    return json.dumps(connection)


# -- lost leases -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_EVERY_S: Final = 1.0
_DEFAULT_MILLI: Final = 250
_UNSIZED: Final = "unsized-leases"  # kept in the ledger under this name
_AWAY: Final = frozenset(
    {ProcessState.CHECKPOINTED, ProcessState.CHECKPOINTING, ProcessState.RESTORING, ProcessState.UNKNOWN}
)


class LostLeases:
    """Finds the lost leases of one broker on `socket`, whose second records are `files`.

    `everyone`: it serves all users of the machine, not only its own.
    """

    def __init__(
        self, broker: Broker, swaps: Swaps, ledger: Ledger, files: LeaseFiles, *, socket: str, everyone: bool
    ) -> None:
        self.files = files
        self._broker = broker
        self._swaps = swaps
        self._ledger = ledger
        self._socket = socket
        self._uid = None if everyone else os.getuid()
        self._one_at_a_time = asyncio.Lock()
        self._unsized = _read_unsized(ledger)

    # -- at the start --------------------------------------------------------------------------------------------------------

    async def find(self) -> list[LeaseRecord]:
        """Return a record of every lease that lives and that the ledger does not know. To be called before `recover`. Raises OSError."""
        live = self._ledger.live_leases()
        records = await asyncio.to_thread(_recorded, self.files.folder, self._ledger)
        known = {record.spec.lease_id for record in (*live, *records)}
        lost = [
            one
            for one in await ATTACHING.run(carriers, self._uid, self._socket)
            if one.lease_id not in known and not self._ledger.has_lease(one.lease_id)
        ]
        roots = [identity for record in (*live, *records) if (identity := identity_of(record)) is not None]
        found = [*records, *await self._examine_all(lost, roots)]
        for record in found:
            how = "its second record" if record.spec.lease_id in known else "its processes"
            log.warning("lease %s is not in the ledger: taken back from %s", record.spec.lease_id[:8], how)
        return found

    async def _examine_all(self, lost: Sequence[Carrier], roots: Sequence[ProcessIdentity]) -> list[LeaseRecord]:
        """Return a record of each of these that has something on a device, or saved from one."""
        if not lost:
            return []
        counts: Counter[int] = Counter()
        found: dict[str, LeaseRecord] = {}
        with self._swaps.inspector.with_roots([*roots, *(one.identity for one in lost)]):
            try:
                host = await self._swaps.inspector.take()
                for one in _most_credible(lost, host):
                    if one.lease_id in found or counts[account_uid(one.uid)] >= MAX_LEASES_PER_UID:
                        continue
                    counts[account_uid(one.uid)] += 1
                    record = await self._examine(one, host)
                    if record is not None:
                        found[one.lease_id] = record
            except GPUError as error:
                log.warning("the devices do not say what %d unknown kernels have: %s", len(lost), error)
        return list(found.values())

    async def _examine(self, one: Carrier, host: HostSnapshot) -> LeaseRecord | None:
        """Return a record of what the driver and the devices say of the process and those below it; None if that is nothing."""
        kernel = Kernel(lease_id=one.lease_id, uid=one.uid, token_sha256="", identity=one.identity)
        pids = {identity.pid for identity in self._swaps.inspector.tree(kernel, host)}
        used_mib = sum(host.used_mib(pid) for pid in pids)
        try:
            states = set((await self._swaps.inspector.states(kernel, host)).values())
        except GPUError as error:
            log.warning(
                "lease %s: what process %d has cannot be found out: %s", one.lease_id[:8], one.identity.pid, error
            )
            states = set()
        command = await ATTACHING.run(command_of, one)
        # A claim alone gets no lease, and neither does a program on a device that is no kernel.
        away = bool(states & _AWAY)
        if not (states or used_mib) or not (away or command.is_kernel):
            return None
        where = host.homes(pids) or (tuple(host.uses) if len(host.uses) == 1 else ())
        spec = self._spec(one, command, where, None if away else max(used_mib, NOMINAL_MIB))
        if away:
            self._unsized.add(one.lease_id)
            self._keep_unsized()
        state = LeaseState.SUSPENDED if away else LeaseState.RESIDENT
        return _record(one, command, spec, state, where)

    def _spec(self, one: Carrier, command: Command, where: Sequence[str], used_mib: int | None) -> LeaseSpec:
        """Return the lease's spec: the smallest fraction that holds what it uses; a whole device if that is unknown."""
        arbiter = self._broker.arbiter
        pool = self._pool(where)
        leasable = {device.device_id: device.leasable_mib for device in arbiter.devices()}
        if used_mib is None or len(where) > 1:
            own = [leasable[device_id] for device_id in where if device_id in leasable]
            milli, reserve_mib = 1000, max(own or leasable.values(), default=1)
        else:
            milli, reserve_mib = fraction_for(arbiter, pool, used_mib)
        return LeaseSpec(
            lease_id=one.lease_id,
            pool=pool.name,
            owner=account_name(one.uid),
            uid=one.uid,
            fraction_milli=milli,
            reserve_mib=reserve_mib,
            request_mib=guaranteed_mib(arbiter, pool, milli, reserve_mib, None),
            devices=max(1, len(where)),
            group=user_group(one.uid, pool),
            gated=command.gated,
            label=command.label,
        )

    def _pool(self, where: Sequence[str]) -> PoolSpec:
        """Return the pool of the device that the lease is on, or the default one."""
        pools = self._broker.arbiter.pools()
        own = next((pool for pool in pools.values() if where and where[0] in pool.devices), None)
        return own or pools.get("default") or pools[min(pools)]

    # -- afterwards ----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Give leases of unknown size the size that they use, once they are back on a device. Returns only by cancellation."""
        while True:
            await asyncio.sleep(_EVERY_S)
            for lease_id in list(self._unsized):
                if await self._settle_size(lease_id):
                    self._unsized.discard(lease_id)
                    self._keep_unsized()

    async def _settle_size(self, lease_id: str) -> bool:
        """Set the lease's size if it can be known by now; return whether the size is settled."""
        broker = self._broker
        kernel, view = broker.kernels.get(lease_id), broker.arbiter.lease(lease_id)
        if kernel is None or view is None:
            return True
        if view.state is not LeaseState.RESIDENT or view.spec.devices > 1:
            return view.spec.devices > 1
        pool = broker.arbiter.pools().get(view.spec.pool)
        if pool is None:
            return False  # it is not configured any more, and offers no sizes
        try:
            await broker.measure(kernel)
            view = broker.arbiter.lease(lease_id)
            if view is None or view.state is not LeaseState.RESIDENT or not view.used_mib:
                return view is None
            milli, reserve_mib = fraction_for(broker.arbiter, pool, view.used_mib)
            request_mib = guaranteed_mib(broker.arbiter, pool, milli, reserve_mib, None)
        except (GPUError, NoRoomError):  # it cannot be measured now, or its pool has no device
            return False
        broker.dispatch(
            ResizeRequested(
                at_ms=now_ms(),
                lease_id=lease_id,
                fraction_milli=milli,
                reserve_mib=reserve_mib,
                request_mib=request_mib,
            )
        )
        view = broker.arbiter.lease(lease_id)
        return view is None or view.spec.reserve_mib == reserve_mib

    def _keep_unsized(self) -> None:
        text = json.dumps(sorted(self._unsized))
        self._broker.writer.submit(partial(self._ledger.keep, _UNSIZED, text))

    # -- on demand -----------------------------------------------------------------------------------------------------------

    async def recall(self, peer: Peer, lease_id: str) -> None:
        """Take back the lease of the kernel that makes the request, unless it is in the ledger as ended. Any other stays as it is.

        Raises NoRoomError, RequestTooLargeError or ConflictError where its lease cannot be had now: nothing of the
        kernel is lost by that. Cancelled: the lease is there, or not yet.
        """
        uid, broker = peer.credentials.uid, self._broker
        async with self._one_at_a_time:
            if lease_id in broker.kernels or not await ATTACHING.run(carries, peer.credentials.pid, lease_id):
                return
            if self._uid is not None and uid != self._uid:
                return
            if await broker.writer.read(partial(self._ledger.has_lease, lease_id)):
                return
            self._check_number(uid)
            files = await ATTACHING.run(read_lease_files, self.files.folder)
            records = [one for one in files if one.spec.lease_id == lease_id and one.uid == uid and _lives(one)]
            lost = [one for one in await ATTACHING.run(carriers, uid) if one.lease_id == lease_id]
            records = records or await self._examine_all(lost, [])
            if records:
                await take_over(broker, self._swaps, records)
            elif lost:
                await self._request(lost[0])

    def _check_number(self, uid: int) -> None:
        """Raise what a request for one lease more raises."""
        account = account_uid(uid)
        kernels = self._broker.kernels.values()
        own = sum(account_uid(kernel.uid) == account for kernel in kernels)
        if own >= MAX_LEASES_PER_UID or len(kernels) >= MAX_LEASES:
            raise RequestTooLargeError(
                f"this kernel's lease was lost, and {account_name(uid)} or this host has no place for another one; shut a kernel down "
                "that is not needed, and run the cell again: this kernel keeps its variables"
            )

    async def _request(self, one: Carrier) -> None:
        """Request a new lease, of the same id, for a kernel that has nothing on a device."""
        broker = self._broker
        if self._swaps.off:
            raise ConflictError(
                f"the lease of this kernel was lost, and whether its GPU memory is saved cannot be found out now: {self._swaps.off}; run "
                "the cell again when the driver answers: the kernel keeps its variables",
                reason="driver",
            )
        command = await ATTACHING.run(command_of, one)
        pool = self._pool(())
        milli = min((size for size in pool.fractions_milli if size >= _DEFAULT_MILLI), default=_DEFAULT_MILLI)
        share_mib = max(1, min(device.leasable_mib for device in broker.arbiter.devices()) * milli // 1000)
        milli, reserve_mib = fraction_for(broker.arbiter, pool, share_mib)
        spec = LeaseSpec(
            lease_id=one.lease_id,
            pool=pool.name,
            owner=account_name(one.uid),
            uid=one.uid,
            fraction_milli=milli,
            reserve_mib=reserve_mib,
            request_mib=guaranteed_mib(broker.arbiter, pool, milli, reserve_mib, None),
            group=user_group(one.uid, pool),
            gated=True,  # its extension made the request
            label=command.label,
        )
        record = _record(one, command, spec, LeaseState.NO_CONTEXT)
        kernel = broker.kernels[spec.lease_id] = kernel_of(record)
        for effect in broker.dispatch(LeaseRequested(at_ms=now_ms(), spec=spec)):
            if isinstance(effect, LeaseRefused) and effect.lease_id == spec.lease_id:
                del broker.kernels[spec.lease_id]
                raise NoRoomError(
                    f"the lease of this kernel was lost, and it cannot have another now: {effect.sentence}; the kernel keeps its variables",
                    reason=effect.reason,
                )
        kernel.identity = None
        broker.dispatch(Attached(at_ms=now_ms(), lease_id=one.lease_id, gated=True))
        follow_found(broker, kernel, one.identity, record.connection)
        broker.records.save(kernel)
        log.warning("lease %s is not in the ledger: process %d has a new one", one.lease_id[:8], one.identity.pid)


def _read_unsized(ledger: Ledger) -> set[str]:
    """Return the leases whose size is still to be found out. Raises LedgerError."""
    try:
        return msgspec.json.decode(ledger.kept(_UNSIZED) or "[]", type=set[str])
    except msgspec.DecodeError as error:  # such leases keep the size that they have
        log.warning("which leases have no known size cannot be read: %s", error)
        return set()


def _recorded(folder: Path, ledger: Ledger) -> list[LeaseRecord]:
    """Return what `living_records` returns, and remove the files of leases that are over. Blocks. Raises LedgerError."""
    found = living_records(folder, ledger)
    kept = {record.spec.lease_id for record in (*found, *ledger.live_leases())}
    for record in read_lease_files(folder):
        if record.spec.lease_id not in kept:
            remove_lease_file(folder, record.spec.lease_id)
    return found


def living_records(folder: Path, ledger: Ledger | None) -> list[LeaseRecord]:
    """Return the second records of leases that live and that the ledger, if there is one, does not know. Blocks. Raises LedgerError."""
    return [
        record
        for record in read_lease_files(folder)
        if _lives(record) and (ledger is None or not ledger.has_lease(record.spec.lease_id))
    ]


def _lives(record: LeaseRecord) -> bool:
    identity = identity_of(record)
    return identity is not None and still_carries(identity, record.uid, record.spec.lease_id)


def _most_credible(lost: Iterable[Carrier], host: HostSnapshot) -> list[Carrier]:
    """Return those that have memory on a device first, then the oldest: of two that claim one lease, the first one counts."""
    return sorted(lost, key=lambda one: (not host.used_mib(one.identity.pid), one.identity.start_time))


def _record(
    one: Carrier, command: Command, spec: LeaseSpec, state: LeaseState, where: Sequence[str] = ()
) -> LeaseRecord:
    return LeaseRecord(
        spec=spec,
        state=state,
        generation=0,
        device_id=where[0] if where else None,
        saved_mib=0,  # unknown
        uid=one.uid,
        kernel_id=command.kernel_id,
        token_sha256="",  # unknown: `Service` learns it from the kernel's own process
        boot_id=one.identity.boot_id,
        pid=one.identity.pid,
        start_time=one.identity.start_time,
        connection=command.connection,
        language="python" if command.ipykernel else "",
        ipykernel=command.ipykernel,
        created_ms=wall_ms(),
        suspends=0,
        resumes=0,
        home_device_id=where[0] if where else None,
        device_ids=tuple(where) if len(where) > 1 else (),
        home_device_ids=tuple(where) if len(where) > 1 else (),
    )
