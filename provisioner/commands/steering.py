"""What the commands about one lease share: finding it, calling the broker with a word to the person who waits, and the answer."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from provisioner.client import BrokerClient
from provisioner.commands.completers import LEASES, completed
from provisioner.commands.connection import add_socket_argument, running_broker
from provisioner.commands.failure import CommandError, UsageError
from provisioner.commands.moves import find_lease, patience
from provisioner.commands.words import lease_name
from provisioner.protocol.errors import BrokerUnavailableError, FractionalGPUError
from provisioner.protocol.messages import LeaseStatus

__all__ = ["configure_lease", "parsed", "steer"]

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
