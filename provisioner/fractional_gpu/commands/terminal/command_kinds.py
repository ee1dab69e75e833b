"""The kinds of commands about leases and devices: about one lease, about several or `--all` leases, and about one device.

Each is a row of `commands.lease_commands`: it describes itself to argparse, calls the broker, and prints what came of it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.terminal.completers import DEVICES, LEASES, Completer, set_completer
from fractional_gpu.commands.terminal.connection import RUN_ONE, add_socket_argument, running_broker, say_if_slow
from fractional_gpu.commands.terminal.errors import CommandError, UsageError
from fractional_gpu.commands.terminal.output import say, write
from fractional_gpu.commands.terminal.words import lease_name
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.messages import Done
from fractional_gpu.protocol.status import DeviceStatus, LeaseStatus

if TYPE_CHECKING:
    from rich.text import Text

_LEASE_HELP: Final = "a lease id, the beginning of one, or a Jupyter kernel id (see `jupyter gpu status`)"
_DEVICE_HELP: Final = "a GPU by its number, its id, or the beginning of one (see `jupyter gpu status`)"
_NO_DEVICES: Final = f"and without one no GPU takes kernels or is drained; {RUN_ONE}"

Argument = Callable[[argparse.ArgumentParser], None]
"""Adds one argument to a parser."""


def argument(name: str, *, by: Completer | Sequence[str] | None = None, **given: Any) -> Argument:  # noqa: ANN401 - argparse's own
    """Return what adds an argument; `given` is argparse's, and a shell completes the value `by` a completer or these words."""

    def add(parser: argparse.ArgumentParser) -> None:
        action = parser.add_argument(name, **given)
        if by is not None:
            set_completer(action, by)

    return add


def find_lease(name: str, leases: Sequence[LeaseStatus]) -> LeaseStatus:
    """Return the lease with this id or kernel id, or the only one whose id begins so. Raises CommandError with the leases there are."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCommand:
    """A command about one lease.

    `request` builds the request from the command line before the broker is contacted; it raises UsageError. `call` sends it and returns
    the answer, which `--json` prints (None: an empty object). `success` gets the lease as it was before, and the answer; it returns a
    sentence or lines. `doing` is shown with the lease's name when the call takes long.
    """

    description: str
    epilog: str
    doing: str
    call: Callable[[BrokerClient, str, Any], Any]
    success: "Callable[[LeaseStatus, Any], str | list[Text]]"
    request: Callable[[argparse.Namespace], Any] = lambda _: None
    arguments: tuple[Argument, ...] = ()
    find: Callable[[str, Sequence[LeaseStatus]], LeaseStatus] = find_lease

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Describe the command and add its arguments."""
        parser.description, parser.epilog = self.description, self.epilog
        argument("lease", metavar="LEASE", by=LEASES, help=_LEASE_HELP)(parser)
        parser.add_argument("--json", action="store_true", help="print what the broker answers as JSON")
        add_socket_argument(parser)
        for add in self.arguments:
            add(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Find the lease, call the broker and print what came of it. Raises CommandError with the lease's name if it is refused."""
        request = self.request(options)
        with running_broker(options.socket) as client:
            lease = self.find(options.lease, client.status().leases)
            try:
                with say_if_slow(f"{self.doing} {lease_name(lease)} ... (Ctrl-C gives up)", client):
                    answer = self.call(client, lease.lease_id, request)
            except BrokerUnavailableError:
                raise
            except FractionalGPUError as error:
                raise CommandError(f"{lease_name(lease)}: {error}") from error
        if options.json:
            print(json.dumps(to_builtins(answer if answer is not None else Done())))
        elif isinstance(said := self.success(lease, answer), str):
            say(said)
        else:
            write(said)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkCommand:
    """A command about the leases that the command line names, or about all of the user's to which it `applies`.

    `interrupted` says what Ctrl-C does while the command waits.
    """

    description: str
    epilog: str
    verb: str
    doing: str
    interrupted: str
    call: Callable[[BrokerClient, str], LeaseStatus]
    applies: Callable[[LeaseStatus], bool]
    success: Callable[[LeaseStatus], str]

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Describe the command and add its arguments."""
        parser.description, parser.epilog = self.description, self.epilog
        argument("leases", nargs="*", metavar="LEASE", by=LEASES, help=_LEASE_HELP)(parser)
        parser.add_argument("--all", action="store_true", help=f"{self.verb} every kernel of yours that can be")
        parser.add_argument("--json", action="store_true", help='print {"leases": [...], "errors": [...]}')
        add_socket_argument(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Carry the command out for one lease after another. Exit code 1 if the broker refused one of them."""
        if bool(options.leases) == bool(options.all):
            raise UsageError(
                f"say which kernels to {self.verb}: the ids of leases, or --all (`jupyter gpu status` lists them)"
            )
        with running_broker(options.socket) as client:
            client.because_of(f"`jupyter gpu {self.verb}`")
            done, refused = self._call_each(client, self._chosen(options, client.status().leases))
        if options.json:
            errors = [{"lease_id": lease.lease_id, "message": message} for lease, message in refused]
            print(json.dumps({"leases": [to_builtins(lease) for lease in done], "errors": errors}))
        else:
            for lease in done:
                say(f"{lease_name(lease)}: {self.success(lease)}")
            if not done and not refused:
                print(f"There is nothing to {self.verb}.")
        for lease, message in refused:
            say(f"jupyter gpu: {lease_name(lease)}: {message}", sys.stderr)
        return 1 if refused else 0

    def _chosen(self, options: argparse.Namespace, leases: Sequence[LeaseStatus]) -> list[LeaseStatus]:
        """Return the leases that the command line means, each once. Raises CommandError."""
        if options.all:
            return [lease for lease in leases if self.applies(lease)]
        found = {lease.lease_id: lease for lease in (find_lease(name, leases) for name in options.leases)}
        return list(found.values())

    def _call_each(
        self, client: BrokerClient, leases: Sequence[LeaseStatus]
    ) -> tuple[list[LeaseStatus], list[tuple[LeaseStatus, str]]]:
        """Return what was done and what was refused. Raises BrokerUnavailableError: without a broker the rest fails as well."""
        done: list[LeaseStatus] = []
        refused: list[tuple[LeaseStatus, str]] = []
        with say_if_slow("", client) as progress:
            count = progress.counter("kernels")
            for number, lease in enumerate(leases):
                progress.what = f"{self.doing} {lease_name(lease)} ... (Ctrl-C {self.interrupted})"
                count(number, len(leases))
                try:
                    done.append(self.call(client, lease.lease_id))
                except BrokerUnavailableError:
                    raise
                except FractionalGPUError as error:
                    refused.append((lease, str(error)))
        return done, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCommand:
    """A command about one device, or all of them. `request` is as in `LeaseCommand`; `check` raises CommandError after the output."""

    description: str
    epilog: str
    call: Callable[[BrokerClient, str, Any], DeviceStatus]
    success: Callable[[DeviceStatus], str]
    request: Callable[[argparse.Namespace], Any] = lambda _: None
    check: Callable[[DeviceStatus, Any], None] = lambda _device, _request: None
    arguments: tuple[Argument, ...] = ()

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Describe the command and add its arguments."""
        parser.description, parser.epilog = self.description, self.epilog
        # Not required for argparse, so that its absence gets a sentence with an example.
        argument("device", metavar="DEVICE", nargs="?", by=DEVICES, help=_DEVICE_HELP)(parser)
        parser.add_argument("--all", action="store_true", help="all GPUs of this broker")
        parser.add_argument("--json", action="store_true", help="print the device as JSON; with --all, a list")
        add_socket_argument(parser)
        for add in self.arguments:
            add(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Call the broker and print the device. Raises what `request` and `check` raise."""
        request = self.request(options)
        if (options.device is None) != options.all or options.device == "":
            given = f"{options.device!r} and --all" if options.all else "no GPU"
            raise UsageError(f"{given} was given; name one GPU, for example 0, or say --all")
        with running_broker(options.socket, without=_NO_DEVICES) as client:
            names = [one.device_id for one in client.status().devices] if options.all else [options.device]
            devices = [self.call(client, name, request) for name in names]
        if options.json:
            print(json.dumps(to_builtins(devices if options.all else devices[0])))
        else:
            for device in devices:
                say(self.success(device))
        for device in devices:
            self.check(device, request)
        return 0
