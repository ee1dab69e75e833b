"""What a broker's reply says, as messages: lenient about what is new, strict about the kind of what is known.

A field that this version does not know is ignored, so that a newer broker may say more. One that it knows and that is of another
kind is an error here: further inside it would end a thread of a kernel, far from the reason.
"""

import types
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from fractional_gpu.protocol.errors import InternalBrokerError
from fractional_gpu.protocol.messages import (
    DeviceStatus,
    History,
    HostStatus,
    LeaseStatus,
    LeftProcess,
    Neighbour,
    SeatStatus,
    SeatWait,
    Story,
    StoryLine,
    Stranger,
    UsagePoint,
)
from fractional_gpu.protocol.seats import (
    FractionOffer,
    Offers,
    PoolKeys,
    PoolList,
    PoolOffer,
    SeatList,
)

__all__ = ["decode_message"]

Message = TypeVar("Message")
_Check = Callable[[Any], bool]

_PLAIN: dict[Any, _Check] = {
    Any: lambda _: True,
    int: lambda value: type(value) is int,  # True is none
    float: lambda value: type(value) in (int, float),
}
_PARTS: dict[type[Any], dict[str, type[Any]]] = {  # fields that are lists of messages
    HostStatus: {"devices": DeviceStatus, "leases": LeaseStatus, "seats": SeatStatus, "seat_queue": SeatWait},
    LeaseStatus: {"neighbours": Neighbour, "left": LeftProcess},
    DeviceStatus: {"strangers": Stranger},
    Story: {"lines": StoryLine},
    History: {"points": UsagePoint},
    Offers: {"pools": PoolOffer},
    PoolOffer: {"fractions": FractionOffer},
    SeatList: {"seats": SeatStatus},
    PoolList: {"pools": PoolKeys},
}


def decode_message(message: type[Message], payload: object) -> Message:
    """Build a message from a reply. Raises InternalBrokerError for what is none."""
    if not isinstance(payload, dict):
        raise InternalBrokerError(f"the broker's answer is not a {message.__name__}")
    known: dict[str, Any] = {}
    parts = _PARTS.get(message, {})
    for name, required, check in _fields(message):  # type: ignore[arg-type]
        if name in payload:
            value = payload[name]
            if not check(value):
                raise InternalBrokerError(
                    f"the broker's answer has {str(value)[:80]!r} as {name!r} of {message.__name__}: is it of another version?"
                )
            known[name] = [decode_message(parts[name], each) for each in value] if name in parts else value
        elif required:
            raise InternalBrokerError(
                f"the broker's answer lacks {name!r} of {message.__name__}: is it of another version?"
            )
    return message(**known)


@cache
def _fields(message: type[Any]) -> tuple[tuple[str, bool, _Check], ...]:
    parts = _PARTS.get(message, {})
    return tuple(
        (
            field.name,
            field.default is MISSING and field.default_factory is MISSING,
            _is_list if field.name in parts else _check(field.type),
        )
        for field in fields(message)
    )


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _check(kind: Any) -> _Check:  # noqa: ANN401 - an annotation
    """Return what tells whether a value of JSON is of a field's kind."""
    origin, inner = get_origin(kind), tuple(_check(one) for one in get_args(kind))
    if origin is types.UnionType:
        return lambda value: any(check(value) for check in inner)
    if origin is list:
        return lambda value: isinstance(value, list) and all(map(inner[0], value))
    if origin is dict:
        return lambda value: isinstance(value, dict) and all(map(inner[1], value.values()))
    return _PLAIN.get(kind) or (lambda value: isinstance(value, kind))
