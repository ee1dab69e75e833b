"""JSON of the messages: the broker decodes requests strictly, a client decodes replies leniently.

- A request has exactly the fields of its message, with values of exactly their types, and bounded strings, lists and depth. Any bytes
  give a message, BadRequestError or RequestTooLargeError.
- A reply may have fields that this version does not know: a newer broker may say more. A known field with a value of another type is
  an InternalBrokerError here; further inside it would end a thread of a kernel, far from the reason.
- A client sends only the fields of a request that differ from their defaults: an older broker need not know the others.
"""

from functools import cache
from typing import Any, TypeVar

import msgspec

from fractional_gpu.protocol.errors import (
    BadRequestError,
    FractionalGPUError,
    InternalBrokerError,
    RequestTooLargeError,
)
from fractional_gpu.protocol.limits import MAX_DEPTH, MAX_LIST, MAX_STRING

Message = TypeVar("Message", bound=msgspec.Struct)
_LARGEST = 2**63 - 1  # the largest integer that the ledger can store
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_request(body: bytes, kind: type[Message]) -> Message:
    """Decode one request. Raises BadRequestError that names the field, or RequestTooLargeError."""
    try:
        raw = msgspec.json.decode(body or b"{}")
    except _NOT_JSON as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    fields = _fields(kind)
    allowed = ", ".join(sorted(fields)) or "no fields"
    if not isinstance(raw, dict):
        raise BadRequestError(f"the body is {type(raw).__name__}; allowed: an object with {allowed}")
    if unknown := sorted(raw.keys() - fields):
        raise BadRequestError(f"unknown field {unknown[0][:80]!r}; allowed: {allowed}")
    _check_bounds(raw, "$", 0)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None


def decode_json(text: bytes) -> object:
    """Return what a reply's JSON says. Raises InternalBrokerError for anything else."""
    try:
        decoded: object = msgspec.json.decode(text)
    except _NOT_JSON:
        raise InternalBrokerError("the broker's answer is not JSON; look into the broker's log") from None
    return decoded


def decode_reply(payload: object, kind: type[Message]) -> Message:
    """Return the message that a reply's decoded JSON says. Raises InternalBrokerError that names the field."""
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise InternalBrokerError(
            f"the broker's answer is not a {kind.__name__} that this version understands: {error}; is the broker of another version?"
        ) from None


def encode_request(request: msgspec.Struct) -> bytes:
    """Return the JSON of a request. Raises BadRequestError for text that UTF-8 has no bytes for."""
    try:
        return msgspec.json.encode(changed_fields(request))
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"the request has {error.object[:80]!a}, which is not valid text: {error.reason}"
        ) from None


def changed_fields(request: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a request that differ from their defaults."""
    return {name: value for name, default in _defaults(type(request)) if (value := getattr(request, name)) != default}


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """Return the name and the default of each field; NODEFAULT, which equals nothing else, where it has none."""
    return tuple(
        (field.name, field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory())
        for field in msgspec.structs.fields(kind)
    )


def error_body(error: FractionalGPUError) -> dict[str, dict[str, str]]:
    """Return the body of a reply that reports an error."""
    return {"error": {"code": error.code, "reason": error.reason, "message": printable(str(error))}}


def printable(text: str) -> str:
    """Return untrusted text with `?` for each character that could control a terminal which shows it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _check_bounds(value: object, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RequestTooLargeError(f"{path} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise BadRequestError(f"{path} is a number of more than 63 bits; allowed: -{_LARGEST} to {_LARGEST}")
    elif isinstance(value, dict | list):
        if len(value) > MAX_LIST:
            raise RequestTooLargeError(f"{path} has {len(value)} entries; allowed: {MAX_LIST}")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            below = f"{path}.{str(key)[:80]}"
            _check_text(str(key), f"the name {below}")
            _check_bounds(item, below, depth + 1)


def _check_text(text: str, path: str) -> None:
    if len(text) > MAX_STRING:
        raise RequestTooLargeError(f"{path} has {len(text)} characters; allowed: {MAX_STRING}")
    if "\0" in text:
        raise BadRequestError(f"{path!r} contains a NUL character; allowed: text without it")
