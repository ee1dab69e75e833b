"""What clients say of themselves, checked: the wish for a lease against the pools, and the process behind one against /proc."""

import asyncio
import pwd
import secrets
import time
from dataclasses import dataclass

from provisioner.broker.decode import printable
from provisioner.broker.kernels import Kernel
from provisioner.broker.sight import LEASE_VARIABLE
from provisioner.core.arbiter import Arbiter
from provisioner.core.model import LeaseSpec, PoolSpec
from provisioner.core.units import format_memory
from provisioner.host.peers import PeerCredentials
from provisioner.host.process import ProcessIdentity, boot_id, environment_value, identify, owner_uid
from provisioner.protocol.errors import BadRequestError, ForbiddenError, NoRoomError, RequestTooLargeError
from provisioner.protocol.limits import MAX_NAME
from provisioner.protocol.messages import AttachRequest, LeaseRequest

__all__ = ["Peer", "lease_spec", "user_name", "verified_process"]

_EXEC_PATIENCE_S = 1.0  # a process that was started a moment ago may not show its environment yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who asks: credentials from the socket, and the token if one was sent."""

    credentials: PeerCredentials
    token: str | None
    admin: bool


def lease_spec(arbiter: Arbiter, peer: Peer, request: LeaseRequest) -> LeaseSpec:
    """Check the request against the pools. Raises BadRequestError that names the field, the value and what is allowed."""
    pools = arbiter.pools()
    pool = pools.get(request.pool)
    if pool is None:
        names = ", ".join(sorted(pools)) or "none: this broker manages no devices"
        raise BadRequestError(f"there is no pool {request.pool[:MAX_NAME]!r}; pools: {names}", reason="unknown-pool")
    if not 1 <= request.fraction_milli <= 1000:
        raise BadRequestError(f"fraction_milli is {request.fraction_milli}; allowed: 1 to 1000", reason="bad-fraction")
    if request.devices != 1:
        raise BadRequestError(
            f"devices is {request.devices}; allowed: 1 (this version gives a lease one device)",
            reason="bad-devices",
        )
    if not -1000 <= request.priority <= 1000:
        raise BadRequestError(f"priority is {request.priority}; allowed: -1000 to 1000", reason="bad-priority")
    for field in ("kernel_id", "label"):
        if len(getattr(request, field)) > MAX_NAME:
            raise RequestTooLargeError(f"{field} has {len(getattr(request, field))} characters; allowed: {MAX_NAME}")
    return LeaseSpec(
        lease_id=secrets.token_hex(12),
        pool=pool.name,
        owner=user_name(peer.credentials.uid),
        fraction_milli=request.fraction_milli,
        reserve_mib=_reserve_mib(arbiter, pool, request),
        priority=request.priority,
        gated=request.gated,
        label=printable(request.label or request.kernel_id),
    )


def _reserve_mib(arbiter: Arbiter, pool: PoolSpec, request: LeaseRequest) -> int:
    sizes = [device.leasable_mib for device in arbiter.devices() if device.device_id in pool.devices]
    if not sizes:
        raise NoRoomError(
            f"pool {pool.name!r} has no device now; `jupyter gpu status` shows the devices", reason="no-device"
        )
    if request.memory_mib is None:
        return max(1, min(sizes) * request.fraction_milli // 1000)
    if request.memory_mib < 1:
        raise BadRequestError(f"memory_mib is {request.memory_mib}; allowed: 1 or more", reason="bad-memory")
    if request.memory_mib > max(sizes):
        raise BadRequestError(
            f"memory of {format_memory(request.memory_mib)} was asked, but the largest device of pool {pool.name!r} "
            f"can give {format_memory(max(sizes))}; ask for that or less",
            reason="larger-than-device",
        )
    return request.memory_mib


async def verified_process(peer: Peer, kernel: Kernel, request: AttachRequest) -> ProcessIdentity:
    """Return the process that the request states, if it is what it is said to be. Raises BadRequestError or ForbiddenError."""
    try:
        identity = identify(request.pid)
        uid = owner_uid(request.pid)
        lease_id = await _environment_soon(request.pid, LEASE_VARIABLE, kernel.lease_id)
    except (ProcessLookupError, ValueError) as error:
        raise BadRequestError(
            f"pid {request.pid} is not a process that can hold a lease: {error}", reason="no-process"
        ) from None
    except PermissionError:
        raise ForbiddenError(f"the broker may not look at process {request.pid}", reason="no-permission") from None
    stated = ProcessIdentity(request.boot_id, request.pid, request.start_time)
    if identity != stated or request.boot_id != boot_id():
        raise BadRequestError(
            f"pid {request.pid} is another process than the one stated (start time differs)",
            reason="wrong-identity",
        )
    if uid != kernel.uid or (uid != peer.credentials.uid and not peer.admin):
        raise ForbiddenError(f"process {request.pid} belongs to another user", reason="wrong-uid")
    if lease_id != kernel.lease_id:
        raise ForbiddenError(f"process {request.pid} was not started for this lease", reason="wrong-lease")
    return identity


async def _environment_soon(pid: int, name: str, expected: str) -> str | None:
    """Return the variable once it is what is expected, or what it is after a moment.

    Whoever starts a process hears that it worked when the old program's descriptors are closed; only after that does Linux
    put the new environment in place, and until then an empty one is read. Raises as `environment_value`.
    """
    end_s = time.monotonic() + _EXEC_PATIENCE_S
    while (value := environment_value(pid, name)) != expected and time.monotonic() < end_s:  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.01)
    return value


def user_name(uid: int) -> str:
    """Return the user's name, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
