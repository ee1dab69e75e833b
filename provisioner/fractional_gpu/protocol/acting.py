"""On whose behalf an administrator's program asks: the header `X-Acting-For`, such as a hub's service sends for each of its administrators.

It gives no rights; it is who the audit log names. The broker believes it from administrators and refuses it from everybody else. In
the header the name is percent-encoded UTF-8, so that any name that a hub allows survives HTTP; plain ASCII without `%` is as it is.
"""

from collections.abc import Sequence
from urllib.parse import quote, unquote

from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.protocol.names import unprintable

__all__ = ["ACTING_FOR", "MAX_ACTING_FOR", "checked_name", "from_header", "to_header"]

ACTING_FOR = "X-Acting-For"
MAX_ACTING_FOR = 255


def checked_name(name: str) -> str:
    """Return the name. Raises BadRequestError unless it is 1 to 255 printable characters that are not all spaces."""
    if not 0 < len(name) <= MAX_ACTING_FOR or not name.isprintable() or name.isspace():
        has = f", with {found}" if (found := unprintable(name)) else ""
        raise BadRequestError(
            f"{ACTING_FOR} is {name[:80]!a} ({len(name)} characters{has}); allowed: a name of 1 to {MAX_ACTING_FOR} printable "
            "characters; a user with another name has to be renamed at the hub",
            reason="bad-acting-for",
        )
    return name


def to_header(name: str) -> str:
    """Return the header's value for a name. Raises BadRequestError."""
    return quote(checked_name(name), safe="")


def from_header(values: Sequence[str]) -> str | None:
    """Return the name that the header's values say, None without one. Raises BadRequestError."""
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
    return checked_name(name)
