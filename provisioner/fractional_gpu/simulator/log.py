"""The event log: every event, and a digest of the arbiter's effects, so that a replay can prove the same decisions.

One JSON object a line. The first names the format and the arbiter's settings; every other one is an event with its type and the
SHA-256 of its effects as canonical JSON (their first 16 hexadecimal digits).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args, get_origin, get_type_hints

from fractional_gpu.core import events
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Event
from fractional_gpu.simulator import SimulationError, TraceError

__all__ = ["EventLog", "digest", "replay"]

_FORMAT = "jupyter-gpu-events"
_VERSION = 1
_EVENTS: dict[str, type[Event]] = {
    name: kind
    for name in events.__all__
    if isinstance(kind := getattr(events, name), type) and issubclass(kind, Event) and kind is not Event
}


def digest(effects: Sequence[Effect]) -> str:
    """Return a digest of the effects, equal on every machine."""
    plain = [[type(effect).__name__, asdict(effect)] for effect in effects]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


class EventLog:
    """Writes a log; a context manager. Raises SimulationError for a file that cannot be written."""

    def __init__(self, path: Path, *, parallel_swaps: int) -> None:
        try:
            self._file = path.open("w", encoding="ascii", newline="\n")
        except OSError as error:
            raise SimulationError(f"the log {path} cannot be written: {error.strerror}") from error
        self._write({"format": _FORMAT, "version": _VERSION, "parallel_swaps": parallel_swaps})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def watch(self, event: Event, effects: Sequence[Effect]) -> None:
        """Record an event and its effects."""
        self._write({"event": type(event).__name__, "fields": asdict(event), "effects": digest(effects)})

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def replay(path: Path) -> tuple[int, int]:
    """Replay the recorded events with a new arbiter. Returns the numbers of events and of effects.

    Raises TraceError for a log that cannot be read, and SimulationError at the first event whose effects differ.
    """
    events_seen = effects_seen = 0
    try:
        with path.open(encoding="ascii") as file:
            arbiter = _arbiter(path, file.readline())
            for number, line in enumerate(file, 2):
                event, expected = _parse(path, number, line)
                effects = arbiter.handle(event)
                if digest(effects) != expected:
                    raise SimulationError(
                        f"{path}, line {number}: the arbiter now answers {type(event).__name__} with other effects than recorded "
                        f"({digest(effects)} instead of {expected}); the log is of another version, or a decision is not reproducible"
                    )
                events_seen, effects_seen = events_seen + 1, effects_seen + len(effects)
    except OSError as error:
        raise TraceError(f"the log {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not an event log: {error.reason} at byte {error.start}") from error
    return events_seen, effects_seen


def _arbiter(path: Path, line: str) -> Arbiter:
    head = _object(path, 1, line)
    swaps = head.get("parallel_swaps")
    if head.get("format") != _FORMAT or head.get("version") != _VERSION or not isinstance(swaps, int) or swaps < 1:
        raise TraceError(f"{path} is not an event log of version {_VERSION}; record one with --record")
    return Arbiter(parallel_swaps=swaps)


def _parse(path: Path, number: int, line: str) -> tuple[Event, str]:
    entry = _object(path, number, line)
    kind = _EVENTS.get(str(entry.get("event")))
    if kind is None:
        raise TraceError(f"{path}, line {number}: there is no event {str(entry.get('event'))[:40]!r}")
    try:
        event = _decode(kind, entry["fields"])
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}, line {number}: the fields of {kind.__name__} cannot be read: {error}") from error
    if not isinstance(event, Event):
        raise TraceError(f"{path}, line {number}: the fields of {kind.__name__} are not an object")
    return event, str(entry.get("effects"))


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise TraceError(f"{path}, line {number}: expected an object")
    return entry


def _decode(kind: Any, value: Any) -> object:  # noqa: ANN401 - types and JSON values of any shape
    """Return the value as the annotated type; the log holds what `asdict` made of it."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"expected an object for {kind.__name__}")
        hints = get_type_hints(kind)
        known = {field.name for field in fields(kind)}
        if unknown := sorted(set(value) - known):
            raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
        return kind(**{name: _decode(hints[name], item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_decode(get_args(kind)[0], item) for item in value)
    if get_origin(kind) is not None and get_origin(kind) is not tuple and value is not None:
        chosen = [one for one in get_args(kind) if one is not type(None)]
        return _decode(chosen[0], value) if len(chosen) == 1 else value
    return value
