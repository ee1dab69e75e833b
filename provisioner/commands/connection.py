"""How commands reach the broker that runs. None of this starts one."""

import argparse

from provisioner.client import BrokerClient
from provisioner.commands.failure import CommandError
from provisioner.discovery import socket_path
from provisioner.protocol.errors import BrokerUnavailableError

__all__ = ["add_socket_argument", "broker_if_running", "running_broker"]


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--socket` to a command that talks to a broker."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="the broker's socket (default: $JUPYTER_GPU_SOCKET, else the machine's broker, else your own)",
    )


def broker_if_running(socket: str | None = None) -> BrokerClient | None:
    """Return a client of the broker that runs, or None. Raises BrokerUnavailableError if there may be one that cannot be reached."""
    client = BrokerClient(socket or socket_path())
    try:
        client.ping()
    except BrokerUnavailableError as error:
        if isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            return None
        raise
    return client


def running_broker(socket: str | None = None) -> BrokerClient:
    """Return a client of the broker that runs. Raises CommandError if there is none."""
    client = broker_if_running(socket)
    if client is None:
        raise CommandError(
            f"no broker is running on {socket or socket_path()}, so there are no kernels on a GPU; "
            "it starts with the first kernel that wants one"
        )
    return client
