"""Restores the files of a running broker after they were deleted: socket, lock, ledger, `broker.json` and log.

Cleaners empty runtime folders, and users delete files that look like leftovers. Once a second the broker compares the files under these
names with the ones it holds open, and creates missing ones again with the same owner, mode and content. It checks the folder first as at
its start: another user may have created a folder of that name. The deleted files stay open in this process, so nothing is lost:
connections stay, and the ledger is written again in full.

If the whole folder of the socket was deleted, a broker without leases and seats ends: no kernel's state depends on it, and a test suite
or a container's user deletes a runtime folder at the end. A broker with leases restores the folder, and ends with its last lease. A
broker with `idle_exit: "never"` (a service's, a hub's) always restores it.

No other broker can take its place in the meantime: a broker also claims its socket's name in the abstract namespace, which has no files.
A broker that starts while the files are missing finds the claim, and waits until this one serves under its name again.
"""

import asyncio
import fcntl
import logging
import os
import socket as socket_module
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from fractional_gpu.broker.api.server import Server
from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.process.logs import reopen_logs
from fractional_gpu.broker.process.restarting import RestartFiles, make_socket_folder
from fractional_gpu.client.http import listener_pid
from fractional_gpu.client.state_folder import make_state_folder, own_base, state_folder
from fractional_gpu.host.files import open_own
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.errors import BrokerUnavailableError

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_LONGEST_PAUSE_S = 30.0
_FRESH_S = 3600.0  # cleaners of /var/tmp take what was not touched for days


class BrokerLock:
    """The lock beside the socket: its holder is the socket's broker, or about to be."""

    def __init__(self, socket: str) -> None:
        """Open the file, or create it; nothing is locked yet. Raises OSError."""
        self._path = Path(f"{socket}.lock")
        self._descriptor = self._open()

    def take(self, *, wait: bool = False) -> bool:
        """Lock the file that has the name now, and return whether that succeeded. With `wait`, block until it does."""
        if not self._has_name():
            os.close(self._descriptor)
            self._descriptor = self._open()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def give_up(self) -> None:
        """Release the lock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def put_back(self) -> bool:
        """Lock the file that has the name now; return whether it is a new one. Raises OSError if it cannot be locked."""
        if self._has_name():
            return False
        descriptor = self._open()
        try:
            fcntl.flock(
                descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # a broker that is just being started has it for a moment
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        """Close the file, which releases the lock."""
        os.close(self._descriptor)

    def _open(self) -> int:
        return open_own(self._path, os.O_RDWR | os.O_CREAT)

    def _has_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except OSError:
            return False


class OwnFiles:
    """Restores the files of one broker while it serves."""

    def __init__(
        self,
        *,
        socket: str,
        lock: BrokerLock,
        restart: RestartFiles,
        broker: Broker,
        server: Server,
        bind: Callable[[], socket_module.socket],
        is_needed: Callable[[], bool],
        stop: Callable[[], None],
    ) -> None:
        """`is_needed` returns whether the broker serves on although its folder was deleted; if not, `stop` is called."""
        self._socket = socket
        self._lock = lock
        self._restart = restart
        self._broker = broker
        self._server = server
        self._bind = bind
        self._is_needed = is_needed
        self._stop = stop
        self._folder_was_deleted = False
        self._listener: socket_module.socket | None = None
        self._identity: tuple[int, int] | None = None
        self._said: dict[str, str] = {}
        self._touched_s = time.monotonic()
        self._pause_s = _LOOK_S
        self._guard = -1

    def serve(self) -> None:
        """Listen on the socket. Raises BrokerUnavailableError or OSError."""
        listener = self._bind()
        if self._listener is None:
            self._server.add_socket(listener)
        else:
            self._server.replace_listener(self._listener, listener)
        self._listener, self._identity = listener, _identity(Path(self._socket))

    def leads_here(self) -> bool:
        """Whether the socket's name refers to this broker's listener."""
        return self._identity is not None and _identity(Path(self._socket)) == self._identity

    def remove_socket(self) -> None:
        """Remove the socket, if it is still this broker's."""
        if self.leads_here():
            with suppress(OSError):
                Path(self._socket).unlink()

    async def run(self) -> None:
        """Check the files until cancelled. Raises LedgerError if the ledger was written again and cannot be opened."""
        self._guard_folder()
        try:
            while True:
                await asyncio.sleep(self._pause_s)
                await self.look()
        finally:
            if self._guard >= 0:
                os.close(self._guard)

    async def look(self) -> None:
        """Restore missing files, or stop the broker. The next call retries what cannot be restored; the reason is logged once."""
        if not self._has_folder():
            self._folder_was_deleted = True
        if self._folder_was_deleted and not self._is_needed():
            log.info("the folder of the socket %s was deleted and no lease is left: the broker stops", self._socket)
            self._stop()
            return
        back = self._look_beside_socket()
        failed = not await self._look_at_ledger()
        # Do not retry every second to write a whole ledger to a full disk.
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if failed else _LOOK_S
        if back:
            now_s = time.monotonic()
            for kernel in self._broker.kernels.values():
                if kernel.link is not None:
                    kernel.link.look(
                        now_s, 0.0
                    )  # its extension looks after its token's file when it hears from the broker
        if time.monotonic() - self._touched_s > _FRESH_S:
            self._touched_s = time.monotonic()
            self._touch()

    def _has_folder(self) -> bool:
        try:
            Path(self._socket).parent.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # it cannot be examined now
            return True
        return True

    def _look_beside_socket(self) -> bool:
        """Return whether anything was restored. Restore nothing in a folder that another user could have prepared."""
        try:
            make_socket_folder(self._socket)
        except (OSError, BrokerUnavailableError) as error:
            self._say("the socket's folder", error)
            return False
        self._said.pop("the socket's folder", None)
        acts = (
            ("the lock", self._lock.put_back),
            ("the socket", self._put_socket_back),
            ("broker.json", self._restart.put_back),
            ("the log", reopen_logs),
        )
        back = [self._try(what, act) for what, act in acts]  # all of them, even if one fails
        return any(back)

    def _put_socket_back(self) -> bool:
        if self.leads_here():
            return False
        holder = _listener_of(self._socket)
        if holder is not None:
            raise BrokerUnavailableError(f"process {holder} listens on {self._socket} now")
        self.serve()
        return True

    async def _look_at_ledger(self) -> bool:
        """Restore the ledger if its files are missing. Return whether it is in place."""
        ledger = self._broker.writer.ledger
        if ledger.is_in_place():
            self._said.pop("the ledger", None)
            return True
        try:
            folder = ledger.path.parent
            if folder == state_folder(self._socket):
                make_state_folder(self._socket)
            else:
                make_state_folder(self._socket, folder)
            await self._broker.writer.put_back()
        except (LedgerError, BrokerUnavailableError) as error:
            self._say("the ledger", error)
            if not ledger.is_open:
                raise
            return False
        log.warning("the ledger %s was deleted; its whole content was written again", ledger.path)
        self._guard_folder()
        return True

    def _try(self, what: str, put_back: Callable[[], bool]) -> bool:
        """Return whether something was restored."""
        try:
            done = put_back()
        except (OSError, BrokerUnavailableError) as error:
            self._say(what, error)
            return False
        if self._said.pop(what, None) is not None or done:
            log.warning("%s was deleted or replaced, and was restored", what)
        return done

    def _say(self, what: str, error: Exception) -> None:
        if self._said.get(what) != str(error):
            self._said[what] = str(error)
            log.error("%s was deleted or replaced and cannot be restored: %s; retrying", what, error)

    def _guard_folder(self) -> None:
        """Hold a lock on the folder above the state: systemd-tmpfiles skips everything below a locked folder."""
        base = own_base(self._broker.writer.ledger.path.parent)
        if base is None:
            return
        with ExitStack() as undone:
            try:
                descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undone.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                log.info("cannot lock the folder %s against cleaners: %s", base, error)
                return
            undone.pop_all()
        if self._guard >= 0:
            os.close(self._guard)
        self._guard = descriptor

    def _touch(self) -> None:
        """Update the times of the state's files, for cleaners that go by the time only."""
        folder = self._broker.writer.ledger.path.parent
        if own_base(folder) is None:
            return
        with suppress(OSError):
            for path in (*folder.iterdir(), folder, folder.parent, folder.parent.parent):
                os.utime(path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _listener_of(socket: str) -> int | None:
    """Return the process that listens on the socket, None if there is none."""
    with socket_module.socket(socket_module.AF_UNIX, socket_module.SOCK_STREAM | socket_module.SOCK_NONBLOCK) as asker:
        try:
            asker.connect(socket)
        except OSError:
            return None
        return listener_pid(asker) or 0
