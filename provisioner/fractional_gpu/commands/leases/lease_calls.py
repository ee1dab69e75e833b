"""What `suspend` and `resume` share: naming leases, waiting with a word to the person who waits, and the answer.

What the commands about one lease share: finding it, calling the broker with a word to the person who waits, and the answer.
"""

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO, TypeVar

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.silence import SilenceWatch
from fractional_gpu.commands.terminal.completers import LEASES, completed
from fractional_gpu.commands.terminal.connection import add_socket_argument, running_broker
from fractional_gpu.commands.terminal.failure import CommandError, UsageError
from fractional_gpu.commands.terminal.render import lease_name
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.messages import LeaseStatus

__all__ = ["Move", "configure_lease", "configure_move", "find_lease", "parsed", "patience", "run_move", "steer"]

PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One of the two directions. `applies`: which leases `--all` means; `interrupted`: what Ctrl-C does while it waits."""

    verb: str
    doing: str
    interrupted: str
    call: Callable[[BrokerClient, str], LeaseStatus]
    applies: Callable[[LeaseStatus], bool]
    done: Callable[[LeaseStatus], str]


def configure_move(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the arguments that both directions have."""
    leases = parser.add_argument(
        "leases",
        nargs="*",
        metavar="LEASE",
        help="a lease id, the beginning of one, or a Jupyter kernel id (see `jupyter gpu status`)",
    )
    completed(leases, LEASES)
    parser.add_argument("--all", action="store_true", help=f"{verb} every kernel of yours that can be")
    parser.add_argument("--json", action="store_true", help='print {"leases": [...], "errors": [...]}')
    add_socket_argument(parser)


def find_lease(name: str, leases: Sequence[LeaseStatus]) -> LeaseStatus:
    """Return the lease with this id or kernel id, or the only one whose id begins so. Raises CommandError, listing what there is."""
    exact = [lease for lease in leases if name and name in (lease.lease_id, lease.kernel_id)]
    found = exact or [lease for lease in leases if name and lease.lease_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{name!r} is the beginning of {_listed(found)}; give more of the id")
    there_are = f"there are {_listed(leases)}" if leases else "there are none"
    raise CommandError(f"there is no lease {name!r}; {there_are}")


def _listed(leases: Sequence[LeaseStatus]) -> str:
    return ", ".join(lease_name(lease) for lease in leases)


@contextmanager
def patience(text: str, out: TextIO, after_s: float = PATIENCE_S, client: BrokerClient | None = None) -> Iterator[None]:
    """Write the text to `out` if the body takes longer than `after_s` seconds, and that the client's broker does not answer if so."""
    timer = threading.Timer(after_s, lambda: print(text, file=out, flush=True))
    timer.daemon = True
    timer.start()
    watch = _watch(client, out) if client is not None else None
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if watch is not None:
            watch.stop()


def _watch(client: BrokerClient, out: TextIO) -> SilenceWatch:
    """Say once when the broker falls silent, and once when it answers again."""
    silent = False

    def tell(error: BrokerUnavailableError | None) -> None:
        nonlocal silent
        if error is None:
            print("The broker answers again.", file=out, flush=True)
        elif not silent:
            print(f"{error}. This command goes on by itself when the broker answers.", file=out, flush=True)
        silent = error is not None

    def connect(timeout_s: float) -> BrokerClient:
        return BrokerClient(client.socket_path, token=client.token, timeout_s=timeout_s)

    watch = SilenceWatch(connect, tell)
    watch.start()
    return watch


def _chosen(options: argparse.Namespace, move: Move, leases: Sequence[LeaseStatus]) -> list[LeaseStatus]:
    """Return the leases that the command line means, each once. Raises CommandError."""
    if options.all:
        return [lease for lease in leases if move.applies(lease)]
    found = {lease.lease_id: lease for lease in (find_lease(name, leases) for name in options.leases)}
    return list(found.values())


def _move_each(
    client: BrokerClient, move: Move, leases: Sequence[LeaseStatus]
) -> tuple[list[LeaseStatus], list[tuple[LeaseStatus, str]]]:
    """Move one after another, and go on when one is refused. Raises BrokerUnavailableError: then the others cannot work either."""
    moved: list[LeaseStatus] = []
    refused: list[tuple[LeaseStatus, str]] = []
    for lease in leases:
        text = f"{move.doing} {lease_name(lease)} ... (Ctrl-C {move.interrupted})"
        try:
            with patience(text, sys.stderr, client=client):
                moved.append(move.call(client, lease.lease_id))
        except BrokerUnavailableError:
            raise
        except FractionalGPUError as error:
            refused.append((lease, str(error)))
    return moved, refused


def run_move(options: argparse.Namespace, move: Move) -> int:
    """Carry the command out. Exit code 1 if one of the leases could not be moved."""
    if bool(options.leases) == bool(options.all):
        raise UsageError(
            f"say which kernels to {move.verb}: the ids of leases, or --all (`jupyter gpu status` lists them)"
        )
    client = running_broker(options.socket)
    try:
        moved, refused = _move_each(client, move, _chosen(options, move, client.status().leases))
    finally:
        client.close()
    if options.json:
        errors = [{"lease_id": lease.lease_id, "message": message} for lease, message in refused]
        print(json.dumps({"leases": [asdict(lease) for lease in moved], "errors": errors}))
    else:
        for lease in moved:
            print(f"{lease_name(lease)}: {move.done(lease)}")
        if not moved and not refused:
            print(f"There is nothing to {move.verb}.")
    for lease, message in refused:
        print(f"jupyter gpu: {lease_name(lease)}: {message}", file=sys.stderr)
    return 1 if refused else 0


T = TypeVar("T")


def configure_lease(parser: argparse.ArgumentParser) -> None:
    """Add the lease, `--json` and `--socket`."""
    lease = parser.add_argument(
        "lease",
        metavar="LEASE",
        help="a lease id, the beginning of one, or a Jupyter kernel id (see `jupyter gpu status`)",
    )
    completed(lease, LEASES)
    parser.add_argument("--json", action="store_true", help="print what the broker answers as JSON")
    add_socket_argument(parser)


def parsed(parse: Callable[[str], T], text: str) -> T:
    """Read a value from the command line. Raises UsageError with what is allowed."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def steer(
    options: argparse.Namespace,
    doing: str,
    call: Callable[[BrokerClient, str], Any],
    say: Callable[[LeaseStatus, Any], str],
) -> int:
    """Find the lease, call the broker and print what came of it. Raises CommandError with the lease's name if it is refused."""
    with running_broker(options.socket) as client:
        lease = find_lease(options.lease, client.status().leases)
        try:
            with patience(f"{doing} {lease_name(lease)} ... (Ctrl-C gives up)", sys.stderr, client=client):
                answer = call(client, lease.lease_id)
        except BrokerUnavailableError:
            raise
        except FractionalGPUError as error:
            raise CommandError(f"{lease_name(lease)}: {error}") from error
    print(json.dumps(asdict(answer)) if options.json else say(lease, answer))
    return 0
