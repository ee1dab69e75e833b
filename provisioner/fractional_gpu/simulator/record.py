"""Records a run as a file with one JSON object per line (docs/simulator-files.md), and replays it. Identical runs give identical files."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Annotated, TypeVar

import msgspec

from fractional_gpu.core import events
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Event, LeaseEvent
from fractional_gpu.simulator import SimulationError, TraceError
from fractional_gpu.simulator.hosts import DoorRule, Machine, hosts_of
from fractional_gpu.simulator.traces import Session

_T = TypeVar("_T")
_FORMAT = "jupyter-gpu-events"
_VERSION = 1
_OPTIONAL = ("group", "pool")  # left out if empty
_ABOUT_SESSIONS = ("user", "open_ms", "close_ms", "gpus", "gpu_mib", "priority", "asked_mib")
_EVENTS: dict[str, type[Event]] = {
    name: kind
    for name, kind in vars(events).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, LeaseEvent)
}


def digest(effects: Sequence[Effect]) -> str:
    """Return a digest of the effects, which is the same on every machine."""
    return _digest(_plain(effects))


def _plain(effects: Sequence[Effect]) -> list[list[object]]:
    return [[type(effect).__name__, asdict(effect)] for effect in effects]


def _digest(plain: list[list[object]]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


@contextmanager
def recording(
    path: Path | None,
    machine: Machine,
    trace: Sequence[Session],
    *,
    door: DoorRule = DoorRule.FIT,
) -> Iterator["EventLog | None"]:
    if path is None:
        yield None
        return
    with ExitStack() as opened:
        try:
            file: IO[bytes] | gzip.GzipFile = opened.enter_context(path.open("wb"))
        except OSError as error:
            raise SimulationError(f"the log {path} cannot be written: {error.strerror}") from error
        if path.suffix == ".gz":  # its header has no name or time, so that equal runs give equal bytes
            file = opened.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        log = EventLog(opened.enter_context(TextIOWrapper(file, encoding="ascii", newline="\n")))
        hosts = [asdict(host) for host in hosts_of(machine)]
        log.write({"format": _FORMAT, "version": _VERSION, "door": door, "hosts": hosts})
        for session in trace:
            facts = {name: getattr(session, name) for name in _ABOUT_SESSIONS}
            facts |= {name: said for name in _OPTIONAL if (said := getattr(session, name))}
            log.write({"session": session.session_id, **facts, "cells": [astuple(cell) for cell in session.cells]})
        yield log


@dataclass(frozen=True, slots=True)
class EventLog:
    file: IO[str]

    def event(self, host: int, event: Event, effects: Sequence[Effect]) -> None:
        plain, name = _plain(effects), type(event).__name__
        line = {"event": name, "host": host, "fields": asdict(event), "digest": _digest(plain), "effects": plain}
        self.write(line)

    def write(self, line: dict[str, object]) -> None:
        self.file.write(json.dumps(line, separators=(",", ":")) + "\n")


class _SimulatorSettings(msgspec.Struct):
    parallel_swaps: Annotated[int, msgspec.Meta(ge=1)]


class _Head(msgspec.Struct):
    format: str
    version: int
    hosts: Annotated[list[_SimulatorSettings], msgspec.Meta(min_length=1)]


class _Line(msgspec.Struct):
    event: str = ""
    host: int = 0
    fields: msgspec.Raw = msgspec.Raw(b"{}")
    digest: str = ""


def replay(path: Path) -> tuple[int, int]:
    """Replay the events with a new arbiter for each host. Return the number of events and the number of effects.

    Raises TraceError if the log is unreadable, and SimulationError at the first event whose effects differ from the log.
    """
    events_seen = effects_seen = 0
    try:
        with _reading(path) as file:
            arbiters = _begin(path, file.readline())
            for number, text in enumerate(file, 2):
                where = f"{path}, line {number}"
                line = _decoded(where, text, _Line)
                if not line.event:
                    continue
                if not 0 <= line.host < len(arbiters):
                    raise TraceError(f"{where}: there is no host {line.host}; the log has {len(arbiters)} hosts")
                if line.event not in _EVENTS:
                    raise TraceError(f"{where}: this release has no event {line.event[:40]!r}")
                event = _decoded(f"{where}, {line.event}", line.fields, _EVENTS[line.event])
                effects = arbiters[line.host].handle(event)
                if digest(effects) != line.digest:
                    raise SimulationError(
                        f"{where}: the arbiter now answers {line.event} with different effects than recorded ({digest(effects)} instead of "
                        f"{line.digest}); the log is from another release, or a decision is not reproducible"
                    )
                events_seen, effects_seen = events_seen + 1, effects_seen + len(effects)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is not a complete gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"the log {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not an event log: {error.reason} at byte {error.start}") from error
    return events_seen, effects_seen


def _reading(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii")


def _begin(path: Path, line: str) -> list[Arbiter]:
    try:
        head = msgspec.json.decode(line, type=_Head)
    except msgspec.DecodeError:
        head = None
    if head is None or (head.format, head.version) != (_FORMAT, _VERSION):
        raise TraceError(f"{path} is not an event log from this release; write one with `simulate --set record=FILE`")
    return [Arbiter(parallel_swaps=host.parallel_swaps) for host in head.hosts]


def _decoded(where: str, text: str | msgspec.Raw, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: this line is damaged, or not from an event log: {error}") from error
