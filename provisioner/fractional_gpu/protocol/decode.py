"""Strict decoding of what strangers send: exact fields, exact types, bounded strings. Any bytes give a message or BadRequestError."""

import dataclasses
from typing import Any, TypeVar

import msgspec

from fractional_gpu.protocol.errors import BadRequestError, FractionalGPUError, RequestTooLargeError
from fractional_gpu.protocol.limits import MAX_DEPTH, MAX_LIST, MAX_STRING

__all__ = ["as_json", "decode", "printable"]

T = TypeVar("T")
_LARGEST = 2**63 - 1  # what a ledger can keep


def decode(body: bytes, kind: type[T]) -> T:
    """Decode one request. Raises BadRequestError that names the field, or RequestTooLargeError."""
    try:
        raw = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadRequestError(f"the body is {type(raw).__name__}; allowed: an object with {_fields_text(kind)}")
    unknown = sorted(set(raw) - _fields(kind))
    if unknown:
        raise BadRequestError(f"unknown field {unknown[0][:80]!r}; allowed: {_fields_text(kind)}")
    _bound(raw, "$", 0)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None


def printable(text: str) -> str:
    """Return the text without what could steer a terminal that shows it: strangers wrote it, and others read it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def as_json(error: FractionalGPUError) -> dict[str, dict[str, str]]:
    """Return the one shape of an error."""
    return {"error": {"code": error.code, "reason": error.reason, "message": printable(str(error))}}


def _fields(kind: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def _fields_text(kind: type[Any]) -> str:
    return ", ".join(sorted(_fields(kind))) or "no fields"


def _bound(value: object, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RequestTooLargeError(f"{path} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        _bound_text(value, path)
    elif isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise BadRequestError(f"{path} is a number of more than 63 bits; allowed: -{_LARGEST} to {_LARGEST}")
    elif isinstance(value, dict | list):
        if len(value) > MAX_LIST:
            raise RequestTooLargeError(f"{path} has {len(value)} entries; allowed: {MAX_LIST}")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            below = f"{path}.{str(key)[:80]}"
            _bound_text(str(key), f"the name {below}")
            _bound(item, below, depth + 1)


def _bound_text(text: str, path: str) -> None:
    if len(text) > MAX_STRING:
        raise RequestTooLargeError(f"{path} has {len(text)} characters; allowed: {MAX_STRING}")
    if "\0" in text:
        raise BadRequestError(f"{path!r} contains a NUL character; allowed: text without it")
