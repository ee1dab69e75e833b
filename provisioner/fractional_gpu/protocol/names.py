"""Names that people gave, such as those of a hub's users and servers, and the header `X-Acting-For` that carries one.

An administrator's program, such as a hub's service, names in this header the administrator on whose behalf it sends a request. The header
gives no rights: its name goes into the audit log. The broker accepts it from administrators and refuses it from all others.
"""

from collections.abc import Sequence
from urllib.parse import quote, unquote

from fractional_gpu.protocol.errors import BadRequestError

__all__ = ["ACTING_FOR", "MAX_ACTING_FOR", "decode_acting_for", "describe_unprintable", "encode_acting_for"]

ACTING_FOR = "X-Acting-For"
MAX_ACTING_FOR = 255  # characters


def describe_unprintable(name: str) -> str:
    """Describe the first character that could control what shows the name (control and direction marks); empty: there is none.

    The description is printable itself: `U+202E (right-to-left override)`.
    """
    import unicodedata  # noqa: PLC0415 - kernels import this module, and check no names

    for character in name:
        if not character.isprintable():
            known = unicodedata.name(character, "control character").lower()
            return f"U+{ord(character):04X} ({known})"
    return ""


def encode_acting_for(name: str) -> str:
    """Return the header's value for a name: percent-encoded UTF-8, since HTTP carries ASCII only. Raises BadRequestError."""
    return quote(_check(name), safe="")


def decode_acting_for(values: Sequence[str]) -> str | None:
    """Return the name in the header's values, None without the header. Raises BadRequestError."""
    if not values:
        return None
    if len(values) > 1:
        raise BadRequestError(
            f"the header {ACTING_FOR} is there {len(values)} times; send one", reason="bad-acting-for"
        )
    try:
        name = unquote(values[0], errors="strict")
    except UnicodeDecodeError:
        raise BadRequestError(
            f"the header {ACTING_FOR} is not percent-encoded UTF-8; send the name as `urllib.parse.quote` writes it",
            reason="bad-acting-for",
        ) from None
    return _check(name)


def _check(name: str) -> str:
    """Return the name. Raises BadRequestError unless it is 1 to 255 printable characters that are not all spaces."""
    if not 0 < len(name) <= MAX_ACTING_FOR or not name.isprintable() or name.isspace():
        has = f", with {found}" if (found := describe_unprintable(name)) else ""
        raise BadRequestError(
            f"{ACTING_FOR} is {name[:80]!a} ({len(name)} characters{has}); allowed: a name of 1 to {MAX_ACTING_FOR} printable "
            "characters; a user with another name has to be renamed at the hub",
            reason="bad-acting-for",
        )
    return name
