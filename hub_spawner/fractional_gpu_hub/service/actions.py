"""The actions of the page, and who may do them.

- Each action is checked here against the user and the scopes that the hub gave for the request. For the broker this process is an
  administrator; it names the user (`acting_for`), and the broker records that.
- A kernel of another user is answered as unknown, whether it exists or not.
- An action can take long (a resume waits in the queue): each has a thread and a connection of its own, a user has `MOST_AT_ONCE` at most,
  and when the page goes away, the broker takes back what it had not begun.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from msgspec import to_builtins

from fractional_gpu.client.following import AsyncClient
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import BadRequestError, ConflictError, ForbiddenError, NotFoundError
from fractional_gpu.protocol.messages import DrainRequest, EvictRequest, MoveRequest, PinRequest
from fractional_gpu.protocol.status import LeaseStatus
from fractional_gpu_hub.service.usage import Chosen, Figures, all_figures, own_figures
from fractional_gpu_hub.service.views import Viewer, is_own

MOST_AT_ONCE = 8  # actions of one user
_MOST_OF_ALL = 128
_LONGEST_PIN_MIN = 60 * 24 * 7
_ADMIN_ONLY = frozenset({"move", "evict"})
T = TypeVar("T")
Body = Mapping[str, Any]


class Actions:
    """Carries out the actions of pages. One per service; everything runs on its loop, the calls in threads."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._running: Counter[str] = Counter()

    async def lease(self, viewer: Viewer, lease_id: str, action: str, body: Body) -> Any:  # noqa: ANN401 - JSON
        """Carry out an action on a kernel, and return the broker's answer. Raises FractionalGPUError.

        Cancelled: the connection is closed, which withdraws what only waits.
        """
        call = _LEASE_ACTIONS.get(action)
        if call is None:
            raise NotFoundError(
                f"there is no action {action[:40]!r}; allowed: {', '.join(_LEASE_ACTIONS)}", reason="unknown-route"
            )
        work = partial(call, body=_checked(body, _LEASE_KEYS.get(action, {})))

        def on_own(client: SeatClient) -> Any:  # noqa: ANN401
            if not viewer.admin:
                _find_own(client, viewer, lease_id)
                if action in _ADMIN_ONLY:
                    raise _not_admin()
            return work(client, lease_id)

        return await self._do(viewer, on_own)

    async def device(self, viewer: Viewer, device_id: str, action: str, body: Body) -> Any:  # noqa: ANN401
        if not viewer.admin:
            raise _not_admin()
        if action == "drain":
            busy = bool(_checked(body, {"evict_busy": bool}).get("evict_busy", False))
            return await self._do(
                viewer, lambda client: to_builtins(client.drain(device_id, DrainRequest(evict_busy=busy)))
            )
        _checked(body, {})
        return await self._do(viewer, lambda client: to_builtins(client.undrain(device_id)))

    async def pool(self, viewer: Viewer, pool: str, body: Body) -> Any:  # noqa: ANN401
        if not viewer.admin:
            raise _not_admin()
        keys = _checked(body, {"keys": dict}).get("keys")
        if not keys:
            raise BadRequestError(
                'nothing to change was sent; allowed: {"keys": {"idle_after": "2m"}} or more keys of the pool'
            )
        return await self._do(viewer, lambda client: to_builtins(client.change_pool(pool, keys)))

    async def release_seat(self, viewer: Viewer, seat_id: str, body: Body) -> Any:  # noqa: ANN401
        if not viewer.admin:
            raise _not_admin()
        if not _checked(body, {"confirm": bool}).get("confirm"):
            raise BadRequestError(
                "releasing a seat takes the GPU from its server's kernels, which keep their variables; send confirm = true if that is "
                "intended",
                reason="not-confirmed",
            )

        def release(client: SeatClient) -> Any:  # noqa: ANN401
            client.release_seat(seat_id)
            return {"ok": True}

        return await self._do(viewer, release)

    async def own_usage(self, viewer: Viewer, asked: Chosen) -> Figures:
        """Return what the viewer used, and what the viewer may see of others. Raises FractionalGPUError."""
        return await self._do(viewer, lambda client: own_figures(client, viewer, asked))

    async def all_usage(self, viewer: Viewer, asked: Chosen) -> Figures:
        if not viewer.admin:
            raise _not_admin()
        return await self._do(viewer, lambda client: all_figures(client, asked))

    async def _do(self, viewer: Viewer, work: Callable[[SeatClient], T]) -> T:
        if self._running[viewer.name] >= MOST_AT_ONCE or self._running.total() >= _MOST_OF_ALL:
            raise ConflictError(
                f"{self._running[viewer.name]} of your actions are under way, and {self._running.total()} of all users; allowed: "
                f"{MOST_AT_ONCE} and {_MOST_OF_ALL}; wait until one has ended",
                reason="too-many",
            )
        self._running[viewer.name] += 1
        try:
            return await AsyncClient(lambda: SeatClient(self._socket, acting_for=viewer.name)).call(work)
        finally:
            self._running[viewer.name] -= 1
            if not self._running[viewer.name]:
                del self._running[viewer.name]


def _find_own(client: SeatClient, viewer: Viewer, lease_id: str) -> None:
    """Raise NotFoundError unless the lease is the viewer's."""
    try:
        own = is_own(client.lease(lease_id), viewer)
    except NotFoundError:
        own = False
    if not own:
        raise NotFoundError(f"there is no kernel {lease_id[:40]!r} of yours", reason="unknown-lease")


def _not_admin() -> ForbiddenError:
    return ForbiddenError(
        "this is for administrators of the GPUs: ask the administrator of the hub for the scope custom:fractional-gpu:admin",
        reason="not-admin",
    )


def _checked(body: Body, allowed: Mapping[str, type]) -> Body:
    for key, value in body.items():
        if key not in allowed:
            names = ", ".join(allowed) or "none"
            raise BadRequestError(f"{key[:40]!r} was sent; allowed here: {names}", reason="unknown-field")
        if value is not None and (
            not isinstance(value, allowed[key]) or isinstance(value, bool) is not (allowed[key] is bool)
        ):
            raise BadRequestError(f"{key} is {str(value)[:40]!r}; allowed: {_KINDS[allowed[key]]}", reason="bad-field")
    return body


_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", str: "a text", dict: "an object"}


def _summary(lease: LeaseStatus) -> dict[str, Any]:
    """The answer after an action on a kernel, without anything about its neighbours."""
    return {
        "lease_id": lease.lease_id,
        "state": lease.state,
        "device_id": lease.lease.device_id,
        "sentence": lease.sentence,
    }


def _pin(client: SeatClient, lease_id: str, body: Body) -> Any:  # noqa: ANN401
    minutes = body.get("minutes")
    if minutes is None or not 1 <= minutes <= _LONGEST_PIN_MIN:
        raise BadRequestError(f"minutes is {minutes}; allowed: 1 to {_LONGEST_PIN_MIN}", reason="bad-field")
    return _summary(client.pin(lease_id, PinRequest(duration_ms=minutes * 60_000)))


def _move(client: SeatClient, lease_id: str, body: Body) -> Any:  # noqa: ANN401
    return _summary(client.move(lease_id, MoveRequest(device=body.get("device"))))


def _evict(client: SeatClient, lease_id: str, body: Body) -> Any:  # noqa: ANN401
    client.evict(lease_id, EvictRequest(confirm=bool(body.get("confirm")), why=str(body.get("why", ""))))
    return {"ok": True}


_LEASE_ACTIONS: dict[str, Callable[..., Any]] = {
    "suspend": lambda client, lease_id, body: _summary(client.suspend(lease_id)),  # noqa: ARG005
    "resume": lambda client, lease_id, body: _summary(client.resume(lease_id)),  # noqa: ARG005
    "pin": _pin,
    "unpin": lambda client, lease_id, body: _summary(client.unpin(lease_id)),  # noqa: ARG005
    "move": _move,
    "evict": _evict,
    "story": lambda client, lease_id, body: to_builtins(client.story(lease_id)),  # noqa: ARG005
}
_LEASE_KEYS: dict[str, dict[str, type]] = {
    "pin": {"minutes": int},
    "move": {"device": str},
    "evict": {"confirm": bool, "why": str},
}
