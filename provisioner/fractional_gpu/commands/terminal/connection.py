"""Connects commands to a running broker. A broker is started only if an earlier one crashed, or exited while kernels still had leases."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fractional_gpu.client.client import BrokerClient, SilenceWatch
from fractional_gpu.client.discovery import ensure_broker, has_restart_file, socket_path
from fractional_gpu.client.http import ANSWER_S, claim_holder
from fractional_gpu.client.seat import own_seat
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.protocol.errors import BrokerUnavailableError

NO_KERNELS = "so no kernels are on a GPU; the first kernel that needs one starts a broker"
LONGEST_SOCKET = 100  # bytes of its path; UNIX sockets allow a little more
RUN_ONE = "start one with `jupyter gpu broker`, or choose another broker's socket with --socket"


def broker_if_running(socket: str | None = None) -> BrokerClient | None:
    path = socket or socket_path()
    seat = own_seat()
    client = BrokerClient(path, token=seat.token if seat is not None else None)
    try:
        client.ping(ANSWER_S)
    except BrokerUnavailableError as error:
        if not isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            raise
        # A broker that ends without leases removes its restart file. So a file, a claim or a kernel that is left means that a broker is
        # needed.
        needed = has_restart_file(path) or claim_holder(path) is not None or kernels_of(path)
        return started_broker(path, client.token) if needed else None
    return client


def started_broker(socket: str | None = None, token: str | None = None) -> BrokerClient:
    with Progress("starting the broker ...", silent=True):
        return ensure_broker(socket, token=token)


def kernels_of(socket: str) -> list[int]:
    """Return the pids of this user's kernels with leases from the broker at this socket. For root, include all users' kernels."""
    from fractional_gpu.broker.recovery.lost_leases import carriers, command_of  # noqa: PLC0415 - heavy, and needed only if no broker answers

    try:
        found = carriers(None if os.getuid() == 0 else os.getuid(), socket)
        return [one.identity.pid for one in found if command_of(one).is_kernel]
    except OSError:
        return []


def running_broker(socket: str | None = None, *, without: str = NO_KERNELS) -> BrokerClient:
    client = broker_if_running(socket)
    if client is None:
        raise CommandError(f"no broker is running on {socket or socket_path()}, {without}")
    return client


@contextmanager
def say_if_slow(text: str, client: BrokerClient | None = None) -> Iterator[Progress]:
    """Show the text on standard error if the `with` block lasts more than two seconds.

    If a client is given, the user is also notified when its broker stops responding.
    """
    with Progress(text) as progress, ExitStack() as stack:
        if client is not None:
            stack.callback(watch_silence(client, progress.say).stop)
        yield progress


def watch_silence(client: BrokerClient, say: Callable[[str], None]) -> SilenceWatch:
    """Start a watch that reports when the broker stops responding and when it responds again. The caller must stop the watch."""
    silent = False

    def tell(error: BrokerUnavailableError | None) -> None:
        nonlocal silent
        if error is None:
            say("The broker is responding again.")
        elif not silent:
            say(f"{error}. This command will continue when the broker responds.")
        silent = error is not None

    def connect(timeout_s: float) -> BrokerClient:
        return BrokerClient(client.socket_path, token=client.token, timeout_s=timeout_s)

    watch = SilenceWatch(connect, tell)
    watch.start()
    return watch
