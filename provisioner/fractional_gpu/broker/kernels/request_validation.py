"""Checks clients' claims: lease requests against the pools, and kernels' processes against /proc."""

import asyncio
import grp
import os
import pwd
import secrets
import time
from dataclasses import dataclass, field

from msgspec import structs

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import LEASE_VARIABLE
from fractional_gpu.broker.lanes import ATTACHING
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.model import LeaseSpec, PoolSpec, ReserveBy
from fractional_gpu.core.units import format_fraction, format_memory, plural
from fractional_gpu.host.accounts import account_name, account_uid
from fractional_gpu.host.namespaces import pid_meant_by
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.host.process import ProcessIdentity, boot_id, environment_value, identify, owner_uid
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NoRoomError, RequestTooLargeError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.messages import CLAIM, COMMAND, KERNEL, AttachRequest, LeaseRequest

_TOKEN_VARIABLE = "JUPYTER_GPU_TOKEN_FILE"  # noqa: S105 - a variable's name
_LONGEST_PATH = 1024
_EXEC_PATIENCE_S = 1.0  # a process that was started a moment ago may not show its environment yet
_EXEC_PAUSE_S = 0.01  # pause before the second look, which then doubles each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The client: its credentials from the socket, its token if it sent one, and the user on whose behalf an administrator acts."""

    credentials: PeerCredentials
    token: str | None = field(repr=False)
    admin: bool
    acting_for: str | None = None


def lease_spec(arbiter: Arbiter, peer: Peer, request: LeaseRequest) -> LeaseSpec:
    pools = arbiter.pools()
    pool = pools.get(request.pool)
    if pool is None:
        names = "pools: " + (", ".join(sorted(pools)) or "none: this broker manages no devices")
        raise BadRequestError(f"there is no pool named {request.pool[:MAX_NAME]!r}; {names}", reason="unknown-pool")
    check_kind(request.kind, KERNEL, COMMAND, CLAIM)
    if not request.fraction_milli and request.memory_mib is not None:
        request = structs.replace(request, fraction_milli=_covering_milli(arbiter, pool, request.memory_mib))
    if not 1 <= request.fraction_milli <= 1000:
        raise BadRequestError(f"fraction_milli is {request.fraction_milli}; expected 1 to 1000", reason="bad-fraction")
    most = min(pool.max_devices, len(pool.devices))
    if request.devices != 1 and not 1 <= request.devices <= most:
        has = f"pool {pool.name!r} has {plural(len(pool.devices), 'device')}, and a kernel can have at most {pool.max_devices}"
        raise BadRequestError(f"devices is {request.devices}; expected 1 to {most} ({has})", reason="bad-devices")
    if request.devices > 1 and request.fraction_milli != 1000:
        raise BadRequestError(
            f"devices is {request.devices} with a fraction of {format_fraction(request.fraction_milli)}, but only whole devices "
            "can be combined; request fraction 1, or one device",
            reason="bad-devices",
        )
    if not -1000 <= request.priority <= 1000:
        raise BadRequestError(f"priority is {request.priority}; expected -1000 to 1000", reason="bad-priority")
    if request.priority > pool.max_priority and not peer.admin:
        raise ForbiddenError(
            f"priority {request.priority} was requested, but the maximum for users of pool {pool.name!r} is {pool.max_priority}; request "
            "that or less, or ask an administrator to raise the pool's max_priority",
            reason="priority-too-high",
        )
    for name in ("kernel_id", "label"):
        if len(getattr(request, name)) > MAX_NAME:
            raise RequestTooLargeError(
                f"{name} is too long ({len(getattr(request, name))} characters); the maximum is {MAX_NAME}"
            )
    reserve_mib = cap_mib(arbiter, pool, request.fraction_milli, request.memory_mib)
    return LeaseSpec(
        lease_id=secrets.token_hex(12),
        pool=pool.name,
        owner=account_name(peer.credentials.uid),
        uid=peer.credentials.uid,
        fraction_milli=request.fraction_milli,
        reserve_mib=reserve_mib,
        request_mib=guaranteed_mib(arbiter, pool, request.fraction_milli, reserve_mib, request.request_mib),
        devices=request.devices,
        priority=request.priority,
        group=user_group(peer.credentials.uid, pool),
        gated=request.gated and request.kind != CLAIM,
        label=printable(request.label or request.kernel_id),
        claim_ms=(request.ttl_ms or pool.longest_claim_ms or 1) if request.kind == CLAIM else 0,
    )


def check_kind(kind: str, *allowed: str) -> None:
    if kind not in allowed:
        raise BadRequestError(
            f"kind is {printable(kind)[:MAX_NAME]!r}; expected one of: {', '.join(allowed)}", reason="bad-kind"
        )


def _covering_milli(arbiter: Arbiter, pool: PoolSpec, memory_mib: int) -> int:
    """Return the smallest offered fraction of the pool's smallest device that covers the memory, or a whole device if none does."""
    needed = min(1000, -(-memory_mib * 1000 // max(1, min(_sizes(arbiter, pool)))))
    return min((milli for milli in pool.fractions_milli or [needed] if milli >= needed), default=1000)


def user_group(uid: int, pool: PoolSpec) -> str:
    if not pool.group_limits:
        return ""
    try:
        user = pwd.getpwuid(account_uid(uid))
    except KeyError:
        return ""
    groups = set(os.getgrouplist(user.pw_name, user.pw_gid))
    names = {entry.gr_name for entry in grp.getgrall() if entry.gr_gid in groups}
    return next((name for name, _ in pool.group_limits if name in names), "")


def _sizes(arbiter: Arbiter, pool: PoolSpec) -> list[int]:
    sizes = [device.leasable_mib for device in arbiter.devices() if device.device_id in pool.devices]
    if not sizes:
        raise NoRoomError(
            f"pool {pool.name!r} has no devices at the moment; `jupyter gpu status` lists all devices",
            reason="no-device",
        )
    return sizes


def cap_mib(arbiter: Arbiter, pool: PoolSpec, fraction_milli: int, memory_mib: int | None) -> int:
    sizes = _sizes(arbiter, pool)
    if memory_mib is None:
        return max(1, min(sizes) * fraction_milli // 1000)
    if memory_mib < 1:
        raise BadRequestError(f"memory_mib is {memory_mib}; expected 1 or more", reason="bad-memory")
    if memory_mib > max(sizes):
        raise BadRequestError(
            f"{format_memory(memory_mib)} of memory was requested, but the largest device of pool {pool.name!r} "
            f"can give {format_memory(max(sizes))}; request that or less",
            reason="larger-than-device",
        )
    return memory_mib


def guaranteed_mib(
    arbiter: Arbiter, pool: PoolSpec, fraction_milli: int, reserve_mib: int, request_mib: int | None
) -> int | None:
    """Return the MiB that the pool guarantees, or None if it reserves the lease's whole memory cap. Raises BadRequestError."""
    if pool.reserve_by is ReserveBy.CAP:
        if request_mib is not None:
            raise BadRequestError(
                f"request_mib is {request_mib}, but pool {pool.name!r} always reserves a kernel's full memory cap; leave request_mib out",
                reason="bad-request-mib",
            )
        return None
    if request_mib is None:
        return min(reserve_mib, max(1, min(_sizes(arbiter, pool)) * fraction_milli // 1000))
    if not 1 <= request_mib <= reserve_mib:
        raise BadRequestError(
            f"request_mib is {request_mib}; expected 1 to {reserve_mib}, the kernel's memory cap",
            reason="bad-request-mib",
        )
    return request_mib


async def verified_process(peer: Peer, kernel: Kernel, request: AttachRequest) -> ProcessIdentity:
    try:
        pid, identity, uid = await ATTACHING.run(_named_process, peer, request.pid)
        lease_id = await _environment_soon(pid, LEASE_VARIABLE, kernel.lease_id)
    except (ProcessLookupError, ValueError) as error:
        raise BadRequestError(f"process {request.pid} cannot hold a lease: {error}", reason="no-process") from None
    except PermissionError:
        raise ForbiddenError(
            f"the broker is not permitted to inspect process {request.pid}", reason="no-permission"
        ) from None
    stated = ProcessIdentity(request.boot_id, pid, request.start_time)
    if identity != stated or request.boot_id != boot_id():
        raise BadRequestError(
            f"pid {request.pid} is not the process that the request describes (start time differs)",
            reason="wrong-identity",
        )
    if uid != kernel.uid or (uid != peer.credentials.uid and not peer.admin):
        raise ForbiddenError(f"process {request.pid} belongs to another user", reason="wrong-uid")
    if lease_id != kernel.lease_id:
        raise ForbiddenError(f"process {request.pid} was not started for this lease", reason="wrong-lease")
    return identity


async def holder_of(peer: Peer, named_pid: int) -> ProcessIdentity:
    """Return the process with this pid, which will hold the peer's claim until it ends. Raises BadRequestError or ForbiddenError."""
    try:
        _, identity, uid = await ATTACHING.run(_named_process, peer, named_pid)
    except (ProcessLookupError, PermissionError, ValueError) as error:
        raise BadRequestError(f"process {named_pid} cannot hold a claim: {error}", reason="no-process") from None
    if uid != peer.credentials.uid and not peer.admin:
        raise ForbiddenError(f"process {named_pid} belongs to another user", reason="wrong-uid")
    return identity


def _named_process(peer: Peer, named_pid: int) -> tuple[int, ProcessIdentity, int]:
    """Resolve a pid from the peer's pid namespace. Blocks. Raises ProcessLookupError, for example if the broker cannot see the peer."""
    if peer.credentials.pid <= 0:
        raise ProcessLookupError("the requesting process is in a pid namespace that the broker cannot see")
    try:
        pid = pid_meant_by(peer.credentials.pid, named_pid)
    except PermissionError:
        pid = named_pid  # other users' namespaces need root, so verify the pid in this namespace
    return pid, identify(pid), owner_uid(pid)


def server_of(peer: Peer) -> ProcessIdentity | None:
    """Return the client's process, which starts the lease's kernel. Return None if it is in a pid namespace the broker cannot see."""
    try:
        return identify(peer.credentials.pid) if peer.credentials.pid > 0 else None
    except (ProcessLookupError, PermissionError):
        return None


def token_file_of(identity: ProcessIdentity) -> str:
    """Return the token file's path from the process's environment, or "" if there is no usable path. Blocks."""
    try:
        path = environment_value(identity.pid, _TOKEN_VARIABLE) or ""
    except (ProcessLookupError, PermissionError):
        return ""
    return path if path.startswith("/") and len(path) <= _LONGEST_PATH and path.isprintable() else ""


async def _environment_soon(pid: int, name: str, expected: str) -> str | None:
    """Return the environment variable's value, waiting briefly for it to become `expected`.

    `exec` reports success before Linux puts the new environment in place. In between, the environment reads as empty. Raises the same
    errors as `environment_value`.
    """
    pause_s, end_s = _EXEC_PAUSE_S, time.monotonic() + _EXEC_PATIENCE_S
    while (value := await ATTACHING.run(environment_value, pid, name)) != expected and time.monotonic() < end_s:
        await asyncio.sleep(pause_s)
        pause_s *= 2
    return value
