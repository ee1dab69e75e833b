"""Encodes messages as JSON and decodes them. The broker is strict about requests; clients are lenient about replies.

A request may contain only the fields of its message, and each value must be of exactly the right type. String lengths, nesting depth and
the number of values are limited. For any bytes whatsoever, decoding either returns a message or raises BadRequestError or
RequestTooLargeError. If a known field of a reply has the wrong type, InternalBrokerError is raised here in the client, because otherwise
the value would crash one of the kernel's threads later, far from the cause.

Versions with the same protocol number work together: a client only sends fields that differ from their defaults, and ignores unknown
fields.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from fractional_gpu.protocol.errors import (
    BadRequestError,
    FractionalGPUError,
    InternalBrokerError,
    RequestTooLargeError,
)
from fractional_gpu.protocol.limits import MAX_DEPTH, MAX_STRING, MAX_VALUES

Message = TypeVar("Message", bound=msgspec.Struct)
_LARGEST = 2**63 - 1  # the largest integer that the ledger can store
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode  # values are skipped, not built


def decode_request(body: bytes, kind: type[Message]) -> Message:
    """Decode one request. Raises BadRequestError, which names the invalid field, or RequestTooLargeError."""
    # Each value but the first follows a comma, a bracket or a brace. Such characters inside strings are counted, too.
    values = body.count(b",") + body.count(b"[") + body.count(b"{")
    if values > MAX_VALUES:
        raise RequestTooLargeError(f"the body has too many values ({values}); the maximum is {MAX_VALUES}")
    try:
        names = _decode_names(body or b"{}")
    except msgspec.ValidationError as error:
        allowed = ", ".join(sorted(kind.__struct_fields__)) or "none"
        raise BadRequestError(f"the body must be a JSON object ({error}); allowed fields: {allowed}") from None
    except _NOT_JSON as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    _check_names(names, kind)
    try:
        message: Message = _decoder(kind).decode(body or b"{}")
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None
    except _NOT_JSON as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    return _within_limits(message)


def decode_query(values: Mapping[str, str], kind: type[Message]) -> Message:
    """Decode a GET request's query, in which booleans are 1 and 0. Raises the same errors as `decode_request`."""
    _check_names(values, kind)
    try:
        return _within_limits(msgspec.convert(values, kind, strict=False))
    except msgspec.ValidationError as error:
        raise BadRequestError(f"in the query: {error}", reason="bad-query") from None


def _check_names(names: Mapping[str, object], kind: type[msgspec.Struct]) -> None:
    fields = kind.__struct_fields__
    if unknown := sorted(names.keys() - set(fields)):
        expected = f"one of: {', '.join(sorted(fields))}" if fields else "no fields"
        raise BadRequestError(f"unknown field {unknown[0][:80]!r}; expected {expected}")


def _within_limits(message: Message) -> Message:
    _check(message, "$", 0)
    return message


def _check(value: object, where: str, depth: int) -> None:
    """Raise BadRequestError or RequestTooLargeError if any part of the value exceeds a limit."""
    if isinstance(value, str):
        if len(value) > MAX_STRING:
            raise RequestTooLargeError(f"{where} is too long ({len(value)} characters); the maximum is {MAX_STRING}")
        if "\0" in value:
            raise BadRequestError(f"{where} contains a NUL character, which is not allowed")
    elif isinstance(value, int):
        if not -_LARGEST <= value <= _LARGEST:
            raise BadRequestError(f"{where} does not fit in 63 bits; expected -{_LARGEST} to {_LARGEST}")
    elif isinstance(value, dict | list | msgspec.Struct):
        if depth > MAX_DEPTH:
            raise RequestTooLargeError(f"{where} is nested deeper than {MAX_DEPTH} levels")
        for key, item in _items(value):
            inside = f"{where}.{str(key)[:80]}"
            _check(key, inside, depth)
            _check(item, inside, depth + 1)


def _items(value: dict[str, object] | list[object] | msgspec.Struct) -> Iterable[tuple[object, object]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list):
        return enumerate(value)
    return ((field, getattr(value, field)) for field in value.__struct_fields__)


def decode_json(text: bytes) -> object:
    """Decode a reply's JSON. Raises InternalBrokerError if the text is not JSON."""
    try:
        decoded: object = msgspec.json.decode(text)
    except _NOT_JSON:
        raise InternalBrokerError("the broker's answer is not JSON; see the broker's log") from None
    return decoded


def decode_reply(payload: object, kind: type[Message]) -> Message:
    """Convert a reply's decoded JSON to a message. Raises InternalBrokerError, which names the invalid field."""
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise InternalBrokerError(
            f"the broker's answer is not a {kind.__name__} that this version understands: {error}; is the broker a different version?"
        ) from None


def encode_request(request: msgspec.Struct) -> bytes:
    """Encode a request as JSON. Raises BadRequestError for text that cannot be encoded as UTF-8."""
    try:
        return msgspec.json.encode(changed_fields(request))
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"the request contains {error.object[:80]!a}, which is not valid text: {error.reason}"
        ) from None


def changed_fields(request: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a request that differ from their defaults."""
    return {name: value for name, default in _defaults(type(request)) if (value := getattr(request, name)) != default}


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """Return each field's name and default. NODEFAULT stands for a missing default, and never equals a value."""
    return tuple(
        (field.name, field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory())
        for field in msgspec.structs.fields(kind)
    )


def error_body(error: FractionalGPUError) -> dict[str, dict[str, str]]:
    """Return the body of an error reply."""
    return {"error": {"code": error.code, "reason": error.reason, "message": printable(str(error))}}


def printable(text: str) -> str:
    """Return untrusted text with `?` instead of each character that could control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


@cache
def _decoder(kind: type[Message]) -> msgspec.json.Decoder[Message]:
    return msgspec.json.Decoder(kind)
