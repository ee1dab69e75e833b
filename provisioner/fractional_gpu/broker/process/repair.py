"""Repairs a running broker: if one of its files is gone, the broker writes out its ledger and restarts in the same process.

System services clean out runtime folders, and users delete files that look like leftovers. Once a second, the broker checks that its files'
names still refer to the files it created. If not, it finishes any suspend or resume in progress, writes the deleted ledger, which is still
open, to another file (`Ledger.write_out`), and restarts itself with exec. It keeps its claim on the socket's name, so that no second broker
starts. All of this happens only while the broker's folders are private to this user. If the socket's whole folder is gone, a broker without
leases or seats exits instead, unless `idle_exit` is "never".
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.process.restarting import make_socket_folder
from fractional_gpu.client.discovery import restart_file, spare_restart_file
from fractional_gpu.client.state_folder import make_state_folder, state_folder
from fractional_gpu.host.files import file_identity, open_own
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.errors import BrokerUnavailableError

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_LONGEST_PAUSE_S = 30.0


class BrokerLock:
    """The lock file next to the socket, held by the socket's broker or by a process that is about to become the broker."""

    def __init__(self, socket: str) -> None:
        self._path = Path(f"{socket}.lock")
        self._descriptor = self._open()

    def take(self, *, wait: bool = False) -> bool:
        # A lock on a file that lost its name excludes no broker, because the next broker locks the file that has the name by then.
        if file_identity(self._path) != file_identity(self._descriptor):
            os.close(self._descriptor)
            self._descriptor = self._open()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def give_up(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return open_own(self._path, os.O_RDWR | os.O_CREAT)


class Repair:
    def __init__(self, socket: str, writer: LedgerWriter, is_needed: Callable[[], bool]) -> None:
        self.is_due = False  # whether the broker should restart itself
        self.lost_folder = False  # whether the socket's whole folder was deleted
        self._socket = Path(socket)
        self._writer = writer
        self._is_needed = is_needed
        self._made: dict[Path, tuple[int, int] | None] = {}
        self._said = ""

    def begin(self) -> None:
        socket = str(self._socket)
        paths = (self._socket, Path(f"{socket}.lock"), restart_file(socket), spare_restart_file(socket))
        self._made = {path: made for path in paths if (made := file_identity(path))}
        self._log = self._socket.with_name("broker.log")
        self._has_log = file_identity(self._log) is not None  # the log rotates, so only its name counts

    async def run(self) -> None:
        pause_s = _LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            gone = self._gone()
            if not gone:
                pause_s = _LOOK_S
                continue
            self.lost_folder = file_identity(self._socket.parent) is None
            if self.lost_folder and not self._is_needed():
                log.info("the folder of the socket %s was deleted and no leases are left: stopping", self._socket)
                return
            try:
                await self._prepare()
            except (OSError, LedgerError, BrokerUnavailableError) as error:
                if str(error) != self._said:
                    self._said = str(error)
                    log.error("%s was deleted or replaced and cannot be restored: %s; retrying", gone, error)  # noqa: TRY400 - no defect of ours
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)  # do not write a whole ledger to a full disk every second
                continue
            log.warning("%s was deleted or replaced: restarting the broker to recreate its files", gone)
            self.is_due = True
            return

    def remove_socket(self) -> None:
        if file_identity(self._socket) == self._made.get(self._socket, ()):
            with suppress(OSError):
                self._socket.unlink()

    def _gone(self) -> str:
        for path, made in self._made.items():
            if file_identity(path) != made:
                return str(path)
        if self._has_log and file_identity(self._log) is None:
            return str(self._log)
        ledger = self._writer.ledger
        return "" if ledger.is_in_place() else f"the ledger {ledger.path}"

    async def _prepare(self) -> None:
        """Make sure that the restarted broker can create the missing files. Raises OSError, LedgerError or BrokerUnavailableError."""
        make_socket_folder(str(self._socket))
        ledger = self._writer.ledger
        if not ledger.is_in_place():
            folder = ledger.path.parent
            make_state_folder(str(self._socket), None if folder == state_folder(str(self._socket)) else folder)
            await self._writer.write_out()
