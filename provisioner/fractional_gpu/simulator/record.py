"""The record of a run, and its replay.

One JSON object a line, in ASCII, in the order in which things happened; gzip where the name ends in `.gz`.
The same run gives the same bytes.

- The first line names the format and its version, and has the simulated machine as `hosts` (`Host`, field by field): devices, pools, host
  memory, swap speeds, swaps at a time, the model of contention. `name` is that of the way of sharing, `fractional` or a baseline's. A
  baseline that runs without the arbiter also has `baseline`, which is null otherwise: `fill_percent` (of a device that a cell fills
  while it uses it), `clients` (the most sessions of a device) and `cull_after_ms`, each null where it does not matter.
  All others have `door`, the rule by which sessions are given their hosts (`hosts`).
- One line for each session, `{"session": ID, ...}`: when it is open, what it would reserve, what it asks for, its group and its pool
  where it names them (without a pool it runs in the first one of its host), and its cells as
  `[start_ms, duration_ms, gpus, gpu_mib, util_percent]`.
- `{"event": TYPE, "host": N, "fields": {...}, "digest": ..., "effects": [[TYPE, {...}], ...]}`: an event and what the arbiter of a host
  answered; hosts are counted from 0. The digest is the first 16 hexadecimal digits of the SHA-256 of the effects as canonical JSON; a
  replay compares it.
- `{"world": KIND, "host": N, "at_ms": ..., "session": ID, ...}`: what no event carries. `placed`: the session opens, and this is its
  host. `asked`, `begins`, `continues` (after a preemption), `preempted`, `short` (of memory: it waits for more), `failed` (out of memory,
  or its process was lost with its device) and `ends` name the `cell`, counted from 0; those that run one name `device_ids` and
  `util_percent`. `memory` is `mib` more used on each of `device_ids` (negative: given back). `saved` and `restored` are `mib` moved to host
  memory and back, `dropped` is `mib` of it given up. `swap-fails` says that the `swap` that begins (`suspend`, `resume`) will change
  nothing.
- Baselines without the arbiter have no events. `comes`: the session is at the door (host 0 for want of a better one). `takes`: it has
  `device_ids` of a host with `mib` on each. `culled`: it is shut down for having been idle. `gives`: it has no devices any more. `closes`.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, fields, is_dataclass
from enum import Enum
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, get_args, get_origin, get_type_hints

from fractional_gpu.core import events
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Event
from fractional_gpu.simulator import SimulationError, TraceError
from fractional_gpu.simulator.hosts import DoorRule, Machine, hosts_of
from fractional_gpu.simulator.traces import Session

_FORMAT = "jupyter-gpu-events"
_VERSION = 1
_IF_SAID = ("group", "pool")  # left out where they are empty
_ABOUT_SESSIONS = ("user", "open_ms", "close_ms", "gpus", "gpu_mib", "priority", "asked_mib")
_EVENTS: dict[str, type[Event]] = {
    name: kind
    for name, kind in vars(events).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}


def digest(effects: Sequence[Effect]) -> str:
    """Return a digest of the effects, equal on every machine."""
    return _digest(_plain(effects))


def _plain(effects: Sequence[Effect]) -> list[list[object]]:
    return [[type(effect).__name__, asdict(effect)] for effect in effects]


def _digest(plain: list[list[object]]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


class EventLog:
    """Writes a record; a context manager. Raises SimulationError for a file that cannot be written."""

    def __init__(
        self,
        path: Path,
        machine: Machine,
        trace: Sequence[Session],
        *,
        door: DoorRule = DoorRule.FIT,
        name: str = "fractional",
        baseline: Mapping[str, object] | None = None,
    ) -> None:
        with ExitStack() as opened:
            try:
                raw = opened.enter_context(path.open("wb"))
            except OSError as error:
                raise SimulationError(f"the log {path} cannot be written: {error.strerror}") from error
            file: IO[bytes] | gzip.GzipFile = raw
            if path.suffix == ".gz":  # neither name nor time in its header: equal runs give equal bytes
                file = opened.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
            self._file = opened.enter_context(TextIOWrapper(file, encoding="ascii", newline="\n"))
            self._opened = opened.pop_all()
        hosts = [asdict(host) for host in hosts_of(machine)]
        about = {"name": name, "baseline": baseline, "door": None if baseline is not None else door}
        self._write({"format": _FORMAT, "version": _VERSION, **about, "hosts": hosts})
        for session in trace:
            facts = {name: getattr(session, name) for name in _ABOUT_SESSIONS}
            facts |= {name: said for name in _IF_SAID if (said := getattr(session, name))}
            self._write({"session": session.session_id, **facts, "cells": [astuple(cell) for cell in session.cells]})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def event(self, host: int, event: Event, effects: Sequence[Effect]) -> None:
        """Record an event and its effects."""
        plain, name = _plain(effects), type(event).__name__
        line = {"event": name, "host": host, "fields": asdict(event), "digest": _digest(plain), "effects": plain}
        self._write(line)

    def moment(self, host: int, kind: str, at_ms: int, session_id: str, **about: object) -> None:
        """Record a moment that no event carries."""
        self._write({"world": kind, "host": host, "at_ms": at_ms, "session": session_id, **about})

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def replay(path: Path) -> tuple[int, int]:
    """Replay the recorded events with a new arbiter. Returns the numbers of events and of effects.

    Raises TraceError for a log that cannot be read, and SimulationError at the first event whose effects differ.
    """
    events_seen = effects_seen = 0
    try:
        with _reading(path) as file:
            arbiters = _begin(path, file.readline())
            for number, line in enumerate(file, 2):
                entry = _object(path, number, line)
                if "world" in entry or "session" in entry:
                    continue
                event = _event(path, number, entry)
                expected = str(entry.get("digest"))
                effects = _arbiter(path, number, entry, arbiters).handle(event)
                if digest(effects) != expected:
                    raise SimulationError(
                        f"{path}, line {number}: the arbiter now answers {type(event).__name__} with other effects than recorded "
                        f"({digest(effects)} instead of {expected}); the log is of another release, or a decision is not reproducible"
                    )
                events_seen, effects_seen = events_seen + 1, effects_seen + len(effects)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"the log {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not an event log: {error.reason} at byte {error.start}") from error
    return events_seen, effects_seen


def _reading(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii")


def _begin(path: Path, line: str) -> list[Arbiter]:
    """Return a new arbiter for each host of a record."""
    head = _object(path, 1, line)
    hosts = head.get("hosts")
    swaps = [host.get("parallel_swaps") for host in hosts if isinstance(host, dict)] if isinstance(hosts, list) else []
    sound = [one for one in swaps if isinstance(one, int) and one > 0]
    if (head.get("format"), head.get("version")) != (_FORMAT, _VERSION) or not sound or len(sound) != len(swaps):
        raise TraceError(f"{path} is not an event log of version {_VERSION}; record one with --set record=FILE")
    if head.get("baseline") is not None:
        raise TraceError(
            f"{path} is of the baseline {head.get('name')}, in which no arbiter decides; there is nothing to replay"
        )
    return [Arbiter(parallel_swaps=one) for one in sound]


def _arbiter(path: Path, number: int, entry: dict[str, Any], arbiters: Sequence[Arbiter]) -> Arbiter:
    host = entry.get("host", 0)
    if not isinstance(host, int) or not 0 <= host < len(arbiters):
        raise TraceError(f"{path}, line {number}: there is no host {str(host)[:40]}; the record has {len(arbiters)}")
    return arbiters[host]


def _event(path: Path, number: int, entry: dict[str, Any]) -> Event:
    kind = _EVENTS.get(str(entry.get("event")))
    if kind is None:
        raise TraceError(f"{path}, line {number}: there is no event {str(entry.get('event'))[:40]!r}")
    try:
        event = _decode(kind, entry["fields"])
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}, line {number}: the fields of {kind.__name__} cannot be read: {error}") from error
    if not isinstance(event, Event):
        raise TraceError(f"{path}, line {number}: the fields of {kind.__name__} are not an object")
    return event


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
        if unknown := sorted(set(value) - {field.name for field in fields(kind)}):
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
