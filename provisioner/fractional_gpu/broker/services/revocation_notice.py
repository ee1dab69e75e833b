"""Watches a file or a cloud's metadata URL for a notice that this host will be reclaimed (`c.GPUBroker.revocation_notice`).

When there is a notice, all devices are drained before the deadline, and users are told to save to disk, because the host's memory will be
lost as well. If the notice disappears, the devices drained for it are undrained, even if the broker has restarted since. If the source
can't be read, nothing changes. If the source is a file, there is a notice if the file exists. If it is a URL, status 404 means that there
is no notice (AWS), and 200 means that there is one, unless the text is `FALSE` (Google) or JSON with no such event in `Events` (Azure). The
deadline is `time` (AWS), the earliest `NotBefore` (Azure), or otherwise `c.GPUBroker.revocation_deadline` from now.
"""

import asyncio
import http.client
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.services.lease_control import LONGEST_DEADLINE_MS, begin_drain, end_drain
from fractional_gpu.core.units import format_duration
from fractional_gpu.ledger.records import LedgerError

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_TIMEOUT_S = 1.5
_MOST_BYTES = 65_536
_KEPT = "revocation_notice"  # ledger key for the devices drained for a notice, and their earlier state
_MOVED_MS = 1_000  # smaller changes of a deadline are ignored
_LEAVES = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})  # Azure's events after which the memory is lost
_METADATA = {"Metadata-Flavor": "Google", "Metadata": "true"}
_AWS_PREFIX = "/latest/"


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice that this host will be reclaimed. `deadline_ms` is in wall-clock ms, or None if the notice gives no deadline."""

    deadline_ms: int | None = None


class UnreadableNoticeError(Exception):
    """Raised if the source doesn't show whether there is a notice. The message is a sentence."""


def read_notice(source: Path | str) -> Notice | None:
    text = _read_file(source) if isinstance(source, Path) else _read_url(urlsplit(source))
    return None if text is None else parse_notice(text)


def parse_notice(text: str) -> Notice | None:
    if text.strip().upper() == "FALSE":
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return Notice()
    if not isinstance(data, dict):
        return Notice()
    events = data.get("Events")
    if not isinstance(events, list):
        return Notice(_moment_ms(data.get("time")))
    leaving = [event for event in events if isinstance(event, dict) and event.get("EventType") in _LEAVES]
    times = [at_ms for event in leaving if (at_ms := _moment_ms(event.get("NotBefore"))) is not None]
    return Notice(min(times, default=None)) if leaving else None


def _moment_ms(text: object) -> int | None:
    """Parse an ISO 8601 time (AWS) or an HTTP date (Azure) as wall-clock ms. Return None for anything else."""
    if not isinstance(text, str):
        return None
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            at = parse(text)
        except (ValueError, OverflowError):  # OverflowError if a number is beyond any date's range
            continue
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    return None


def _read_file(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableNoticeError(f"{path} cannot be read: {error.strerror}") from error


def _read_url(url: SplitResult) -> str | None:
    headers = dict(_METADATA)
    try:
        if url.path.startswith(_AWS_PREFIX):  # AWS may require a token; a server without tokens needs none
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            status, token = _ask(url, "PUT", "/latest/api/token", asked)
            if status == http.HTTPStatus.OK and token.isascii() and token.isprintable():
                headers = {"X-aws-ec2-metadata-token": token}
        status, text = _ask(url, "GET", f"{url.path or '/'}{f'?{url.query}' if url.query else ''}", headers)
    except (OSError, http.client.HTTPException) as error:
        raise UnreadableNoticeError(f"{url.geturl()} is not responding: {error or type(error).__name__}") from error
    if status == http.HTTPStatus.NOT_FOUND:
        return None
    if status != http.HTTPStatus.OK:
        raise UnreadableNoticeError(f"{url.geturl()} responded with status {status}")
    return text


def _ask(url: SplitResult, method: str, target: str, headers: Mapping[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=_TIMEOUT_S)
    try:
        connection.request(method, target, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES).decode(errors="replace")
    finally:
        connection.close()


class RevocationNotice:
    """Tells users when there is a notice that this host will be reclaimed. With `drains`, also drains all devices.

    `default_ms` is the time left if the notice gives no deadline.
    """

    def __init__(self, broker: Broker, source: Path | str, default_ms: int, *, drains: bool) -> None:
        self._broker = broker
        self._source = source
        self._default_ms = default_ms
        self._drains = drains
        self._deadline_ms: int | None = None  # of the current notice, wall-clock ms
        self._must_drain = False  # whether devices still have to be drained
        self._drained: dict[str, bool | None] | None = None  # as in the ledger; None if not read yet
        self._problem = ""

    async def run(self) -> None:
        """Watch the source until cancelled. Retry if the ledger can't be written."""
        while True:
            try:
                await self.look()
            except LedgerError as error:
                self._complain(f"cannot act on the notice yet: {error}")
            await asyncio.sleep(_PERIOD_S)

    async def look(self) -> None:
        """Read the source once and act on it. Raises LedgerError. If this call is cancelled, the next call or broker finishes the work."""
        try:
            notice = await asyncio.to_thread(read_notice, self._source)
        except UnreadableNoticeError as error:
            self._complain(f"{error}; keeping the last known state")
            return
        if notice is None:
            await self._withdrawn()
        else:
            await self._there(notice)
        self._problem = ""

    async def _there(self, notice: Notice) -> None:
        deadline_ms = notice.deadline_ms
        if deadline_ms is None:
            deadline_ms = self._deadline_ms or wall_ms() + self._default_ms
        left_ms = max(1, min(LONGEST_DEADLINE_MS, deadline_ms - wall_ms()))
        if self._deadline_ms is None or abs(deadline_ms - self._deadline_ms) >= _MOVED_MS:
            log.warning("this host goes away in %s, according to %s", format_duration(left_ms), self._source)
            self._deadline_ms, self._must_drain = deadline_ms, self._drains
            self._broker.host_deadline_ms = now_ms() + left_ms
            self._broker.note_change()
            self._tell(
                "revocation.host",
                f"This kernel's host goes away in {format_duration(left_ms)} with all its memory, including what is saved there. Save "
                "your results, models and tables now, to a disk that outlives the host, and the notebook if it is on this host.",
            )
        if self._must_drain:
            await self._drain(await self._remembered(), left_ms)
            self._must_drain = False

    async def _withdrawn(self) -> None:
        before = await self._remembered()
        if before:
            await self._give_back(before)
        if before or self._deadline_ms is not None:
            self._tell(
                "revocation.host-stays", "This kernel's host will not go away after all: the notice was withdrawn."
            )
        self._deadline_ms, self._must_drain = None, False
        if self._broker.host_deadline_ms is not None:
            self._broker.host_deadline_ms = None
            self._broker.note_change()

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("revocation notice: %s", problem)
        self._problem = problem

    async def _remembered(self) -> dict[str, bool | None]:
        """Map each device drained for a notice to the `evict_busy` of its earlier drain, or to None if it was not drained before."""
        if self._drained is None:
            kept_as = self._broker.writer.ledger.kept_as
            self._drained = await self._broker.writer.read(lambda: kept_as(_KEPT, dict[str, bool | None], {}))
        return self._drained

    async def _remember(self, drained: dict[str, bool | None]) -> None:
        await self._broker.writer.run(partial(self._broker.writer.ledger.keep, _KEPT, json.dumps(drained)))
        self._drained = drained

    async def _drain(self, before: Mapping[str, bool | None], left_ms: int) -> None:
        broker = self._broker
        evicting = await broker.writer.read(broker.writer.ledger.drained)
        names = [view.device_id for view in broker.arbiter.devices() if view.device_id in broker.devices]
        # First record what to undo. If the broker dies in between, the next one then undrains too many devices rather than too few.
        await self._remember({name: before.get(name, evicting.get(name)) for name in names})
        for name in names:
            await begin_drain(broker, name, evict_busy=bool(evicting.get(name)), deadline_in_ms=left_ms)

    async def _give_back(self, drained: Mapping[str, bool | None]) -> None:
        log.warning("this host will not go away after all: the notice was withdrawn, and the devices are back in use")
        for name, evict_busy in drained.items():
            if name not in self._broker.devices:
                continue
            if evict_busy is None:
                await end_drain(self._broker, name)
            else:
                await begin_drain(self._broker, name, evict_busy=evict_busy, deadline_in_ms=None)
        await self._remember({})

    def _tell(self, reason: str, sentence: str) -> None:
        for lease_id, kernel in self._broker.kernels.items():
            self._broker.record_line(lease_id, reason, sentence)
            self._broker.announce_deadline(kernel, sentence)
