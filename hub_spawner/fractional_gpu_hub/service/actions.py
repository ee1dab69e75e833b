"""The actions of the page, and who may do them.

- Each action is checked here against the user and the scopes that the hub gave for the request. For the broker this process is an
  administrator; it names the user (`acting_for`), and the broker records that.
- A kernel of another user is answered as unknown, whether it exists or not.
- An action can take long (a resume waits in the queue): each has a thread and a connection of its own, a user has `MOST_AT_ONCE` at most,
  and when the page goes away, the broker takes back what it had not begun.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

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
T = TypeVar("T")
Body = Mapping[str, Any]


class Actions:
    """Carries out the actions of pages. One per service; everything runs on its loop, the calls in threads."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._running: Counter[str] = Counter()

    async def act(self, viewer: Viewer, kind: str, name: str, action: str, body: Body) -> Any:  # noqa: ANN401 - JSON
        """Carry out an action on a kernel or the like, and return the broker's answer. Raises FractionalGPUError.

        Cancelled: the connection is closed, which withdraws what only waits.
        """
        known = _ACTIONS[kind].get(action)
        if known is None:
            allowed = ", ".join(_ACTIONS[kind])
            raise NotFoundError(f"there is no action {action[:40]!r}; allowed: {allowed}", reason="unknown-route")
        is_refused = known.admin and not viewer.admin
        if is_refused and kind != "leases":
            raise _not_admin()
        checked = _checked(body, known.keys)

        def work(client: SeatClient) -> Any:  # noqa: ANN401
            if kind == "leases" and not viewer.admin:
                _find_own(client, viewer, name)
            if is_refused:
                raise _not_admin()
            return known.call(client, name, checked)

        return await self._do(viewer, work)

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


def _evict(client: SeatClient, lease_id: str, body: Body) -> Any:  # noqa: ANN401
    client.evict(lease_id, EvictRequest(confirm=bool(body.get("confirm")), why=str(body.get("why", ""))))
    return {"ok": True}


def _drain(client: SeatClient, device_id: str, body: Body) -> Any:  # noqa: ANN401
    return to_builtins(client.drain(device_id, DrainRequest(evict_busy=bool(body.get("evict_busy")))))


def _release(client: SeatClient, seat_id: str, body: Body) -> Any:  # noqa: ANN401
    if not body.get("confirm"):
        raise BadRequestError(
            "releasing a seat takes the GPU from its server's kernels, which keep their variables; send confirm = true if that is intended",
            reason="not-confirmed",
        )
    client.release_seat(seat_id)
    return {"ok": True}


def _change(client: SeatClient, pool: str, body: Body) -> Any:  # noqa: ANN401
    if not body.get("keys"):
        raise BadRequestError(
            'nothing to change was sent; allowed: {"keys": {"idle_after": "2m"}} or more keys of the pool'
        )
    return to_builtins(client.change_pool(pool, body["keys"]))


class _Action(NamedTuple):
    """What carries an action out, the keys that may be sent, and whether it is for administrators only."""

    call: Callable[[SeatClient, str, Body], Any]
    keys: Mapping[str, type] = {}
    admin: bool = True


_ACTIONS: dict[str, dict[str, _Action]] = {
    "leases": {
        "suspend": _Action(lambda client, name, _: _summary(client.suspend(name)), admin=False),
        "resume": _Action(lambda client, name, _: _summary(client.resume(name)), admin=False),
        "pin": _Action(_pin, {"minutes": int}, admin=False),
        "unpin": _Action(lambda client, name, _: _summary(client.unpin(name)), admin=False),
        "move": _Action(
            lambda client, name, body: _summary(client.move(name, MoveRequest(device=body.get("device")))),
            {"device": str},
        ),
        "evict": _Action(_evict, {"confirm": bool, "why": str}),
        "story": _Action(lambda client, name, _: to_builtins(client.story(name)), admin=False),
    },
    "devices": {
        "drain": _Action(_drain, {"evict_busy": bool}),
        "undrain": _Action(lambda client, name, _: to_builtins(client.undrain(name))),
    },
    "seats": {"release": _Action(_release, {"confirm": bool})},
    "pools": {"change": _Action(_change, {"keys": dict})},
}
