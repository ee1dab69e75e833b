"""The audit log of administrators' actions, which records who requested what, and the outcome.

- A JSON line is written when an action is requested, and another with its outcome before the reply is sent. Each line is on disk (fsync)
  before the broker continues. If the first line cannot be written, the action is refused (reason `audit-log`), unless `audit_required` is
  off. If the second cannot be written, the reply is an error.
- Refused attempts by users who are not administrators go to the broker's log, so these users cannot fill the audit log.
- Each line is ASCII and limited in length, and JSON escapes control characters. Tokens are never among the parameters.
- The file is private (0600). It is reopened for each line, so external rotation works. Files that are full or old are renamed and later
  removed. A line cut short by a full disk is removed.
"""

import asyncio
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tornado.iostream import StreamClosedError

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.config.settings import Settings
from fractional_gpu.core.model import LeaseView
from fractional_gpu.host.accounts import user_name
from fractional_gpu.host.files import open_own, sync_folder, write_all
from fractional_gpu.host.threads import StartedThreads
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.errors import FractionalGPUError, InternalBrokerError

log = logging.getLogger(__name__)

FILE_NAME = "audit.jsonl"
_FINISHED = re.compile(r"\.\d{8}T\d{6}\.\d{6}Z")  # follows the name of the log
_LONGEST_LINE = 16 * 1024
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT


@dataclass(slots=True, kw_only=True)
class AuditedAction:
    what: str
    target: str
    peer: Peer
    parameters: Mapping[str, Any]
    act_id: str = field(default_factory=lambda: secrets.token_hex(8))
    outcome: str = "done"
    reason: str = ""
    sentence: str = ""

    def refused(self, reason: str, sentence: str) -> None:
        self.outcome, self.reason, self.sentence = "refused", reason, sentence

    def line(self, outcome: str) -> bytes:
        who = self.peer.credentials
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.act_id,
            "act": self.what,
            "object": self.target,
            "uid": who.uid,
            "user": user_name(who.uid),
            "acting_for": self.peer.acting_for,
            "pid": who.pid,
            "parameters": self.parameters,
            "outcome": outcome,
            "reason": "" if outcome == "asked" else self.reason,
            "sentence": "" if outcome == "asked" else self.sentence[: _LONGEST_LINE // 8],
        }
        line = json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"
        if len(line) > _LONGEST_LINE:
            size = len(json.dumps(self.parameters))
            line = json.dumps({**entry, "parameters": {"omitted_bytes": size}}, separators=(",", ":")).encode() + b"\n"
        return line


def is_of_another_user(peer: Peer, kernel: Kernel, view: LeaseView) -> bool:
    """Return whether an administrator is acting on another user's lease. Without a token, any seat's lease counts as another user's."""
    if peer.acting_for is not None or peer.credentials.uid != kernel.uid:
        return peer.admin
    return peer.admin and peer.token is None and bool(view.spec.seat)


class AuditLog:
    def __init__(self, settings: Settings, folder: Path) -> None:
        self.path = settings.audit_file or folder / FILE_NAME
        self._most_bytes = settings.audit_max_size * 2**20
        self._files = settings.audit_files
        self._keep_s = None if settings.audit_keep is None else settings.audit_keep / 1000
        self._required = settings.audit_required
        self._closed = False
        self._thread = StartedThreads(1, "audit")

    @asynccontextmanager
    async def act(
        self, what: str, target: str, peer: Peer, parameters: Mapping[str, Any]
    ) -> AsyncIterator[AuditedAction]:
        """Log an action before the `with` block, and its outcome after the block.

        The outcome is `withdrawn` if the action is cancelled or the client disconnects. Raises InternalBrokerError if the log cannot be
        written. If this happens before the block, the block does not run.
        """
        act = AuditedAction(what=what, target=target, peer=peer, parameters=parameters)
        try:
            await self._write_outcome(act, "asked", f"the action {what!r} was not carried out")
        except asyncio.CancelledError:  # the line is still written, but the action is not done
            await self._write_failed(act, "withdrawn")
            raise
        try:
            yield act
        except BaseException as error:
            outcome = "refused"
            if isinstance(error, FractionalGPUError | LedgerError):
                act.refused(error.reason if isinstance(error, FractionalGPUError) else "ledger", str(error))
            elif isinstance(error, asyncio.CancelledError | StreamClosedError):
                outcome = "withdrawn"
            else:
                outcome = "failed"
                act.refused("failed", type(error).__name__)
            await self._write_failed(act, outcome)
            raise
        await self._write_outcome(act, act.outcome, f"the outcome of {what!r} ({act.outcome}) is not recorded")

    async def check(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, b"")
        except OSError as error:
            refused = (
                "administrators' actions are refused" if self._required else "administrators' actions are not recorded"
            )
            log.warning("cannot write to the audit log %s (%s); %s until it is writable", self.path, error, refused)

    async def prune(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._prune)
        except OSError as error:
            log.warning("cannot remove old files of the audit log %s: %s", self.path, error)

    def close(self) -> None:
        """Wait for the lines that are being written. Later outcomes are still written, but directly on the event loop."""
        self._closed = True
        self._thread.shutdown()

    async def _write_failed(self, act: AuditedAction, outcome: str) -> None:
        """Write the outcome of a failed action. If that fails as well, just log it, because the action's own error matters more."""
        try:
            await self._write_outcome(act, outcome, f"the outcome of {act.what!r} ({outcome}) is not recorded")
        except InternalBrokerError as error:
            log.error("%s", error)  # noqa: TRY400 - a full disk is no defect of ours

    async def _write_outcome(self, act: AuditedAction, outcome: str, what_is: str) -> None:
        try:
            if self._closed:  # the broker is ending, and its thread has ended
                self._write(act.line(outcome))
            else:
                loop = asyncio.get_running_loop()
                await asyncio.shield(loop.run_in_executor(self._thread, self._write, act.line(outcome)))
        except OSError as error:
            line = act.line(outcome).decode().strip()
            if not self._required:
                log.warning("cannot write to the audit log %s (%s); missing line: %s", self.path, error, line)
                return
            log.error("cannot write to the audit log %s (%s): %s", self.path, error, line)  # noqa: TRY400
            raise InternalBrokerError(
                f"cannot write to the audit log {self.path} ({error.strerror or error}), so {what_is}; free some space, or set "
                "c.GPUBroker.audit_required = False",
                reason="audit-log",
            ) from error

    # In the thread

    def _write(self, line: bytes) -> None:
        """Append a line and sync it to disk. Pass an empty line to test whether writing is possible. Raises OSError."""
        self._rotate(len(line))
        new = not self.path.exists()
        descriptor = open_own(self.path, _FLAGS)
        try:
            status = os.fstat(descriptor)
            if stat.S_IMODE(status.st_mode) != 0o600:
                os.fchmod(descriptor, 0o600)
            cut = status.st_size > 0 and os.pread(descriptor, 1, status.st_size - 1) != b"\n"
            try:
                write_all(descriptor, (b"\n" if cut and line else b"") + line)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, status.st_size)  # remove the half-written line
                raise
        finally:
            os.close(descriptor)
        if new:
            sync_folder(self.path.parent)

    def _rotate(self, more_bytes: int) -> None:
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return
        size = status.st_size
        if not stat.S_ISREG(status.st_mode) or size == 0:
            return
        old = self._keep_s is not None and time.time() - _begun_s(self.path) > self._keep_s / 4
        if size + more_bytes > self._most_bytes or old:
            name = f"{self.path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
            self.path.rename(self.path.with_name(name))
            self._prune()

    def _prune(self) -> None:
        finished = finished_files(self.path)
        now_s = time.time()
        for number, file in enumerate(reversed(finished)):  # newest first
            if number >= self._files or (self._keep_s is not None and now_s - file.stat().st_mtime > self._keep_s):
                file.unlink()


def finished_files(path: Path) -> list[Path]:
    try:
        files = list(path.parent.iterdir())
    except FileNotFoundError:
        return []
    named = (one for one in files if one.name.startswith(path.name) and _FINISHED.fullmatch(one.name[len(path.name) :]))
    return sorted(named)


def _begun_s(path: Path) -> float:
    """Return the time in the file's first line, in seconds since 1970. If that line is unreadable, use the modification time."""
    with path.open("rb") as file:
        first = file.readline(_LONGEST_LINE)
    try:
        return datetime.fromisoformat(json.loads(first)["time"]).timestamp()
    except (ValueError, TypeError, KeyError):
        return path.stat().st_mtime
