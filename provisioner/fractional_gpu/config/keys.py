"""What a key of a pool is: its name stands in a table, here is the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a pool. `field` is the dataclass's; with `also`, `parse` returns a value for `field` and for each of these."""

    field: str
    parse: Callable[[object], Any]
    default: object
    example: object
    help: str
    also: tuple[str, ...] = ()
