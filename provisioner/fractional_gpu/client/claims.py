"""Waits for the GPU outside Jupyter, and claims room for programs that the broker does not know about."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.client.seat import own_seat
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError, NoRoomError
from fractional_gpu.protocol.messages import CLAIM, AcquireRequest, LeaseRequest, Progress, ProgressKind

if TYPE_CHECKING:
    from fractional_gpu.protocol.status import DeviceStatus, LeaseStatus

_LEAST_WAIT_MS: Final = 1000  # leaves time to write the ledger
_ATTEMPTS: Final = 3  # number of attempts to reach a broker, which may end during the wait
_Waiting = Callable[[Progress], None]


def take_claim(
    request: LeaseRequest, wait_ms: int | None = None, waiting: _Waiting = lambda _: None
) -> "tuple[LeaseStatus, DeviceStatus, Mapping[str, str]]":
    """Claim room on a device for this user's programs, until `request.ttl_ms` has passed or the process `request.holder_pid` exits.

    Start a broker if none is running. Wait up to `wait_ms` for room (None for no limit), and call `waiting` with each progress report.
    Return the claim, its device, and the variables that bind a program to this device. Use `BrokerClient.pin` to change when the claim
    ends, and `BrokerClient.release` to end it early.

    Raises the protocol's errors, such as NoRoomError (reason `timeout`) if no room becomes free in time. After an error or an interrupt, no
    claim remains.
    """
    seat = own_seat()
    request = replace(request, kind=CLAIM, seat="" if seat is None else seat.seat_id)
    with ensure_broker(token=None if seat is None else seat.token) as client:
        reply = client.create_lease(request)
    client.token = reply.token
    try:
        last = await_grant(client, reply.lease_id, wait_ms, waiting)
        device = next(one for one in client.status().devices if one.device_id == last.device_id)
        return client.lease(reply.lease_id), device, last.environment
    except BaseException:
        with suppress(FractionalGPUError):
            client.release(reply.lease_id)
        raise


def await_grant(client: BrokerClient, lease_id: str, wait_ms: int | None, waiting: _Waiting) -> Progress:
    """Wait until the lease has the GPU. If the broker exits in the meantime, restart it.

    Raises NoRoomError, or BrokerUnavailableError if no broker can be reached.
    """
    request = AcquireRequest(wait_ms=max(wait_ms or 0, _LEAST_WAIT_MS))
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            waiter = ensure_broker(client.socket_path, token=client.token, timeout_s=client.timeout_s)
            with closing((waiter.hold if wait_ms is None else waiter.acquire)(lease_id, request)) as lines:
                for line in lines:
                    if line.kind == ProgressKind.GRANTED:
                        return line
                    if line.kind == ProgressKind.REFUSED:
                        raise NoRoomError(line.sentence, reason=line.reason)
                    waiting(line)
        except BrokerUnavailableError:
            if attempt == _ATTEMPTS:
                raise
    raise NoRoomError("the broker ended the wait without an answer; try again")
