"""Reads CSV files. Errors say which file, which line, what was there and what is allowed."""

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from fractional_gpu.simulator import TraceError

__all__ = ["number", "read_table", "whole"]

_LARGEST = 10**15
_Row = TypeVar("_Row")


def read_table(path: Path, columns: Sequence[str], read: Callable[[dict[str, str]], _Row]) -> Iterator[_Row]:
    """Yield what `read` makes of each row.

    Raises TraceError for a file that cannot be read, lacks a column, has a row of another length, or one that `read` refuses.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from _rows(csv.DictReader(file, strict=True), columns, read)
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise TraceError(f"{path} is not a CSV file: {error}") from error


def _rows(
    rows: "csv.DictReader[str]", columns: Sequence[str], read: Callable[[dict[str, str]], _Row]
) -> Iterator[_Row]:
    missing = [column for column in columns if column not in (rows.fieldnames or ())]
    if missing:
        raise TraceError(f"the header has no column {missing[0]!r}; expected {','.join(columns)}")
    for row in rows:
        if None in row or None in row.values():
            raise TraceError(f"line {rows.line_num}: expected {len(rows.fieldnames or ())} values, as in the header")
        try:
            yield read(row)
        except TraceError as error:
            raise TraceError(f"line {rows.line_num}: {error}") from None


def whole(row: dict[str, str], column: str, *, most: int = _LARGEST) -> int:
    """Return a whole number from 0 to `most`. Raises TraceError."""
    text = row[column].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(_LARGEST)) or int(text) > most:
        raise TraceError(f"{column} is {text[:40]!r}; allowed: a whole number from 0 to {most}")
    return int(text)


def number(row: dict[str, str], column: str, *, most: float = float(_LARGEST)) -> float:
    """Return a number from 0 to `most`. Raises TraceError."""
    text = row[column].strip()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise TraceError(f"{column} is {text[:40]!r}; allowed: a number from 0 to {most:g}")
    return value
