"""The page's actions, and who may perform them.

- The broker treats this process as an administrator, so this module checks each action against the user's scopes. The broker records which
  user the action is for (`acting_for`).
- Another user's kernel is reported as unknown, whether or not it exists.
- An action can take a long time, because a resume may have to wait in the queue. Each action has its own thread and connection, and each
  user may have at most `MOST_AT_ONCE` actions running. When the page is closed, the broker withdraws actions that have not started yet.
"""

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, Struct, to_builtins

from fractional_gpu.client.following import AsyncClient
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.codec import decode_request
from fractional_gpu.protocol.errors import BadRequestError, ConflictError, ForbiddenError, NotFoundError
from fractional_gpu.protocol.messages import DrainRequest, EvictRequest, MoveRequest, PinRequest
from fractional_gpu.protocol.seats import PoolChange
from fractional_gpu.protocol.status import LeaseStatus
from fractional_gpu_hub.service.usage import PageQuery, UsagePage, all_figures, own_figures
from fractional_gpu_hub.service.views import Viewer, is_own

MOST_AT_ONCE = 8  # for each user
_MOST_OF_ALL = 128
T = TypeVar("T")


class Actions:
    """Carries out the actions users request on their pages, in threads. The service creates a single instance."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._running: Counter[str] = Counter()

    async def act(self, viewer: Viewer, kind: str, name: str, action: str, body: bytes) -> Any:  # noqa: ANN401 - JSON
        """Carry out an action and return the broker's answer. Raises FractionalGPUError. Cancelling this withdraws a waiting action."""
        known = _ACTIONS[kind].get(action)
        if known is None:
            allowed = ", ".join(_ACTIONS[kind])
            raise NotFoundError(f"unknown action {action[:40]!r}; choose one of: {allowed}", reason="unknown-route")
        is_refused = known.admin and not viewer.admin
        if is_refused and kind != "leases":
            raise _not_admin()
        asked = decode_request(body, known.body)

        def work(client: SeatClient) -> Any:  # noqa: ANN401
            if kind == "leases" and not viewer.admin:
                _find_own(client, viewer, name)
            if is_refused:
                raise _not_admin()
            return known.call(client, name, asked)

        return await self._do(viewer, work)

    async def own_usage(self, viewer: Viewer, asked: PageQuery) -> UsagePage:
        return await self._do(viewer, lambda client: own_figures(client, viewer, asked))

    async def all_usage(self, viewer: Viewer, asked: PageQuery) -> UsagePage:
        if not viewer.admin:
            raise _not_admin()
        return await self._do(viewer, lambda client: all_figures(client, asked))

    async def _do(self, viewer: Viewer, work: Callable[[SeatClient], T]) -> T:
        if self._running[viewer.name] >= MOST_AT_ONCE or self._running.total() >= _MOST_OF_ALL:
            raise ConflictError(
                f"too many actions are running: {self._running[viewer.name]} of yours (at most {MOST_AT_ONCE} allowed) and "
                f"{self._running.total()} across all users (at most {_MOST_OF_ALL} allowed); wait for one to finish",
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
    try:
        own = is_own(client.lease(lease_id), viewer)
    except NotFoundError:
        own = False
    if not own:
        raise NotFoundError(f"you have no kernel {lease_id[:40]!r}", reason="unknown-lease")


def _not_admin() -> ForbiddenError:
    return ForbiddenError(
        "only GPU administrators can do this: ask the hub's administrator for the scope custom:fractional-gpu:admin",
        reason="not-admin",
    )


class _EmptyRequest(Struct):
    """A request without fields."""


class _Pin(Struct):
    minutes: Annotated[int, Meta(ge=1, le=60 * 24 * 7)]


class _Release(Struct):
    confirm: bool = False


def _summary(lease: LeaseStatus) -> dict[str, Any]:
    """Return the answer to an action on a kernel, without any information about the kernel's neighbours."""
    return {
        "lease_id": lease.lease_id,
        "state": lease.state,
        "device_id": lease.lease.device_id,
        "sentence": lease.sentence,
    }


def _pin(client: SeatClient, lease_id: str, asked: _Pin) -> Any:  # noqa: ANN401
    return _summary(client.pin(lease_id, PinRequest(duration_ms=asked.minutes * 60_000)))


def _evict(client: SeatClient, lease_id: str, asked: EvictRequest) -> Any:  # noqa: ANN401
    client.evict(lease_id, asked)
    return {"ok": True}


def _release(client: SeatClient, seat_id: str, asked: _Release) -> Any:  # noqa: ANN401
    if not asked.confirm:
        raise BadRequestError(
            "releasing a seat takes the GPU away from its server's kernels, which keep their variables; send confirm = true to go ahead",
            reason="not-confirmed",
        )
    client.release_seat(seat_id)
    return {"ok": True}


def _change(client: SeatClient, pool: str, asked: PoolChange) -> Any:  # noqa: ANN401
    if not asked.keys:
        raise BadRequestError(
            'the request changes nothing; send {"keys": {"idle_after": "2m"}} or other keys of the pool'
        )
    return to_builtins(client.change_pool(pool, asked.keys))


class _Action(NamedTuple):
    """An action on the page: the broker call it makes, the type of its request body, and whether it is only for administrators."""

    call: Callable[[SeatClient, str, Any], Any]
    body: type[Struct] = _EmptyRequest
    admin: bool = True


_ACTIONS: dict[str, dict[str, _Action]] = {
    "leases": {
        "suspend": _Action(lambda client, name, _: _summary(client.suspend(name)), admin=False),
        "resume": _Action(lambda client, name, _: _summary(client.resume(name)), admin=False),
        "pin": _Action(_pin, _Pin, admin=False),
        "unpin": _Action(lambda client, name, _: _summary(client.unpin(name)), admin=False),
        "move": _Action(lambda client, name, asked: _summary(client.move(name, asked)), MoveRequest),
        "evict": _Action(_evict, EvictRequest),
        "story": _Action(lambda client, name, _: to_builtins(client.story(name)), admin=False),
    },
    "devices": {
        "drain": _Action(lambda client, name, asked: to_builtins(client.drain(name, asked)), DrainRequest),
        "undrain": _Action(lambda client, name, _: to_builtins(client.undrain(name))),
    },
    "seats": {"release": _Action(_release, _Release)},
    "pools": {"change": _Action(_change, PoolChange)},
}
