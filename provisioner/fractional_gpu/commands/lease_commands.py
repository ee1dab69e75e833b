"""The commands for leases and devices: suspend, resume, pin, unpin, resize, explain, move, evict, end, drain and undrain.

They are declared in one table. Their one-line summaries are in `commands.main`, so that the overview of all commands does not import this
module.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec.structs import replace

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.terminal.arguments import DEVICES, DURATIONS, FRACTIONS, LEASES, Parser
from fractional_gpu.commands.terminal.connection import RUN_ONE, running_broker, say_if_slow
from fractional_gpu.commands.terminal.render import describe_state, expected_wait, lease_name
from fractional_gpu.commands.terminal.text import (
    CommandError,
    UsageError,
    answer,
    fitted,
    line,
    parse_argument,
    say,
    table,
    terminal_width,
)
from fractional_gpu.core.units import (
    format_duration,
    format_fraction,
    format_memory,
    parse_duration_ms,
    parse_fraction_milli,
    parse_memory_mib,
    plural,
)
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.messages import (
    CLAIM,
    Done,
    DrainRequest,
    EvictRequest,
    MoveRequest,
    PinRequest,
    ResizeRequest,
)
from fractional_gpu.protocol.names import device_deadline
from fractional_gpu.protocol.status import DeviceStatus, LeaseStatus, Story

if TYPE_CHECKING:
    from rich.text import Text

Request = TypeVar("Request")
Answer = TypeVar("Answer")
_LEASE_HELP: Final = "a lease id, the beginning of one, or a Jupyter kernel id (see `jupyter gpu status`)"
_DEVICE_HELP: Final = "a GPU's number, its id, or the beginning of its id (see `jupyter gpu status`)"
_NO_DEVICES: Final = f"and without one, no GPU can be drained or put back into use; {RUN_ONE}"


def find_lease(name: str, leases: Sequence[LeaseStatus]) -> LeaseStatus:
    """Return the lease with the given lease id, kernel id or unique prefix of a lease id. Raises CommandError."""
    exact = [lease for lease in leases if name and name in (lease.lease_id, lease.kernel_id)]
    found = exact or [lease for lease in leases if name and lease.lease_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{name!r} matches {_listed(found)}; give a longer part of the id")
    there_are = f"the leases are {_listed(leases)}" if leases else "there are no leases"
    raise CommandError(f"no lease matches {name!r}; {there_are}")


def _listed(leases: Sequence[LeaseStatus]) -> str:
    return ", ".join(lease_name(lease) for lease in leases)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCommand(Generic[Request, Answer]):
    """A command for one lease.

    `request` builds the request from the command line before the broker is contacted, or raises UsageError. `call` returns the answer that
    `--json` prints, or None for an empty object. `success` builds the output from the lease as it was before the call and from the answer.
    `doing` is shown if the call takes a long time.
    """

    description: str
    epilog: str
    doing: str
    call: Callable[[BrokerClient, str, Request], Answer]
    success: "Callable[[LeaseStatus, Answer], str | list[Text]]"
    request: Callable[[argparse.Namespace], Request] = lambda _: None  # type: ignore[assignment,return-value]
    arguments: Callable[[Parser], None] = lambda _: None
    find: Callable[[str, Sequence[LeaseStatus]], LeaseStatus] = find_lease

    def configure(self, parser: Parser) -> None:
        parser.describe(self.description, self.epilog)
        parser.argument("lease", "LEASE", _LEASE_HELP, by=LEASES)
        parser.flag("--json", "print the broker's answer as JSON")
        parser.add_socket()
        self.arguments(parser)

    def run(self, options: argparse.Namespace) -> int:
        request = self.request(options)
        with running_broker(options.socket) as client:
            lease = self.find(options.lease, client.status().leases)
            try:
                with say_if_slow(f"{self.doing} {lease_name(lease)} ... (Ctrl-C cancels)", client):
                    reply = self.call(client, lease.lease_id, request)
            except BrokerUnavailableError:
                raise
            except FractionalGPUError as error:
                raise CommandError(f"{lease_name(lease)}: {error}") from error

        def lines(_: int | None) -> "list[str] | list[Text]":
            said = self.success(lease, reply)
            return [said] if isinstance(said, str) else said

        answer(options, reply if reply is not None else Done(), lines)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkCommand:
    """A command for the named leases, or for all leases for which `applies` returns True. `interrupted` says what Ctrl-C does."""

    description: str
    epilog: str
    verb: str
    doing: str
    interrupted: str
    call: Callable[[BrokerClient, str], LeaseStatus]
    applies: Callable[[LeaseStatus], bool]
    success: Callable[[LeaseStatus], str]

    def configure(self, parser: Parser) -> None:
        parser.describe(self.description, self.epilog)
        parser.argument("leases", "LEASE", _LEASE_HELP, by=LEASES, nargs="*")
        parser.flag("--all", f"{self.verb} all of your kernels, if possible")
        parser.flag("--json", 'print {"leases": [...], "errors": [...]}')
        parser.add_socket()

    def run(self, options: argparse.Namespace) -> int:
        if bool(options.leases) == bool(options.all):
            raise UsageError(f"name the leases to {self.verb}, or use --all (`jupyter gpu status` lists them)")
        done: list[LeaseStatus] = []
        refused: list[tuple[LeaseStatus, str]] = []
        with running_broker(options.socket) as client:
            client.because_of(f"`jupyter gpu {self.verb}`")
            leases = client.status().leases
            if options.all:
                chosen = [lease for lease in leases if self.applies(lease)]
            else:
                named = [find_lease(name, leases) for name in options.leases]
                chosen = list({lease.lease_id: lease for lease in named}.values())
            with say_if_slow("", client) as progress:
                count = progress.counter("kernels")
                for number, lease in enumerate(chosen):
                    progress.what = f"{self.doing} {lease_name(lease)} ... (Ctrl-C {self.interrupted})"
                    count(number, len(chosen))
                    try:
                        done.append(self.call(client, lease.lease_id))
                    except BrokerUnavailableError:  # the remaining calls would fail, too
                        raise
                    except FractionalGPUError as error:
                        refused.append((lease, str(error)))
        errors = [{"lease_id": lease.lease_id, "message": message} for lease, message in refused]
        said = [f"{lease_name(lease)}: {self.success(lease)}" for lease in done]
        if not done and not refused:
            said.append(f"There is nothing to {self.verb}.")
        answer(options, {"leases": done, "errors": errors}, lambda _: said)
        for lease, message in refused:
            say(f"jupyter gpu: {lease_name(lease)}: {message}", sys.stderr)
        return 1 if refused else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCommand(Generic[Request]):
    """A command for one or all devices.

    `request` works as in `LeaseCommand`. `check` is called after the output and may raise CommandError.
    """

    description: str
    epilog: str
    call: Callable[[BrokerClient, str, Request], DeviceStatus]
    success: Callable[[DeviceStatus], str]
    request: Callable[[argparse.Namespace], Request] = lambda _: None  # type: ignore[assignment,return-value]
    check: Callable[[DeviceStatus, Request], None] = lambda _device, _request: None
    arguments: Callable[[Parser], None] = lambda _: None

    def configure(self, parser: Parser) -> None:
        parser.describe(self.description, self.epilog)
        # argparse treats it as optional, so that we can report a missing device in a sentence with an example.
        parser.argument("device", "DEVICE", _DEVICE_HELP, by=DEVICES, nargs="?")
        parser.flag("--all", "all GPUs of this broker")
        parser.flag("--json", "print the device as JSON; with --all, a list")
        parser.add_socket()
        self.arguments(parser)

    def run(self, options: argparse.Namespace) -> int:
        request = self.request(options)
        if (options.device is None) != options.all or options.device == "":
            given = f"{options.device!r} and --all were" if options.all else "no GPU was"
            raise UsageError(f"{given} given; name one GPU, for example 0, or use --all")
        with running_broker(options.socket, without=_NO_DEVICES) as client:
            names = [one.device_id for one in client.status().devices] if options.all else [options.device]
            devices = [self.call(client, name, request) for name in names]
        document = devices if options.all else devices[0]
        answer(options, document, lambda _: [self.success(device) for device in devices])
        for device in devices:
            self.check(device, request)
        return 0


_POLL_S: Final = 0.5


def _find_claim(name: str, leases: Sequence[LeaseStatus]) -> LeaseStatus:
    lease = find_lease(name, leases)
    if lease.kind != CLAIM:
        raise CommandError(f"{lease_name(lease)} is a {lease.kind}, not a claim made with `jupyter gpu lease`")
    return lease


def _add_pin_arguments(parser: Parser) -> None:
    # argparse treats it as optional, so that we can report a missing duration in a sentence with an example.
    parser.argument("duration", "DURATION", "how long, for example 30m or 2h", by=DURATIONS, nargs="?")


def _pin_request(options: argparse.Namespace) -> PinRequest:
    text: str | None = options.duration
    if text is None:
        raise UsageError(
            f"only {options.lease[:80]!r} was given; add a duration, as in `jupyter gpu pin LEASE 30m` (see `jupyter gpu status`)"
        )
    try:
        duration_ms = parse_duration_ms(text)
    except ValueError:
        duration_ms = 0
    if duration_ms:
        return PinRequest(duration_ms=duration_ms)
    raise UsageError(
        f"{text[:80]!r} is not a valid duration for a pin; use one such as 30m or 2h. `jupyter gpu unpin` ends a pin, and `%gpu pin "
        f"always` in the notebook keeps renewing one"
    )


def _say_pinned(_: LeaseStatus, after: LeaseStatus) -> str:
    stays = "stays on the GPU" if after.state == "resident" else "will stay on the GPU once it is there,"
    return f"{lease_name(after)}: {stays} for the next {format_duration(after.pinned_ms)}"


def _add_resize_arguments(parser: Parser) -> None:
    parser.argument("fraction", "FRACTION", "the share, for example 1/2, 0.25 or 250m", by=FRACTIONS, nargs="?")
    parser.argument("--memory", "SIZE", "device memory, for example 20GiB (default: the fraction's share)")
    parser.argument("--wait", "DURATION", "how long to wait for room (default: 10m)", default="10m")


def _resize_request(options: argparse.Namespace) -> ResizeRequest:
    if options.fraction is None and options.memory is None:
        raise UsageError("give the new size: a FRACTION such as 1/2, a --memory such as 20GiB, or both")
    return ResizeRequest(
        fraction_milli=None if options.fraction is None else parse_argument(parse_fraction_milli, options.fraction),
        memory_mib=None if options.memory is None else parse_argument(parse_memory_mib, options.memory),
        wait_ms=parse_argument(parse_duration_ms, options.wait),
    )


def _say_resized(before: LeaseStatus, after: LeaseStatus) -> str:
    was, is_now = (
        f"{format_fraction(lease.spec.fraction_milli)} of a GPU with {format_memory(lease.spec.reserve_mib)}"
        for lease in (before, after)
    )
    return f"{lease_name(after)}: was {was}, is now {is_now}"


def render_story(lease: LeaseStatus, story: Story, now_ms: int, width: int | None = None) -> "list[Text]":
    lines = [line(f"... {plural(story.omitted, 'older line')}")] if story.omitted else []
    happened = [(_moment(one.at_ms, now_ms), f"{one.sentence}  ({one.reason})") for one in story.lines]
    lines += table((), happened, indent="", width=width)
    now = f"{lease_name(lease)}: {describe_state(lease)}"
    if lease.position is not None:
        now += f"; waiting at place {lease.position} in the queue: {lease.sentence}{expected_wait(lease)}"
    slowed = [f"slowed down: {story.slowdown.sentence}"] if story.slowdown.sentence else []
    return [*lines, *fitted([now, *slowed], width)]


def _moment(at_ms: int, now_ms: int) -> str:
    at, now = (datetime.fromtimestamp(ms / 1000).astimezone() for ms in (at_ms, now_ms))
    return f"{at:%H:%M:%S}" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}"


def _add_evict_arguments(parser: Parser) -> None:
    parser.flag("--confirm", "confirm that the kernel's state will be lost")
    parser.argument("--why", "TEXT", "the reason, shown to the kernel's user", default="")


def _evict_request(options: argparse.Namespace) -> EvictRequest:
    if not options.confirm:
        raise UsageError(
            "evicting ends the kernel, and all its variables are lost: add --confirm to do it anyway "
            "(`jupyter gpu suspend` frees the GPU and keeps them)"
        )
    return EvictRequest(confirm=True, why=options.why)


def _find_left(word: str, leases: Sequence[LeaseStatus]) -> LeaseStatus:
    for lease in leases:
        if any(str(process.pid) == word for process in lease.left):
            return lease
    # Digits alone may also be the beginning of an id. If no id begins with them, they name a process.
    if word.isdecimal() and not any(
        lease.lease_id.startswith(word) or lease.kernel_id.startswith(word) for lease in leases
    ):
        left = ", ".join(str(process.pid) for lease in leases for process in lease.left) or "none"
        raise CommandError(
            f"none of your kernels left process {word} behind; processes left behind: {left} (see `jupyter gpu status`)"
        )
    return find_lease(word, leases)


def _say_ended(before: LeaseStatus, _: None) -> str:
    if not before.left:
        return f"{lease_name(before)}: ended"
    processes = ", ".join(f"process {one.pid}" for one in before.left)
    return f"{lease_name(replace(before, left=[]))}: {processes} ended; the memory is free"


_Drain = tuple[DrainRequest, int | None]
"""The request, and how long to wait (in ms) for the device to become empty. None means no wait."""


def _add_drain_arguments(parser: Parser) -> None:
    parser.flag("--evict-busy", "do not wait for running cells")
    parser.argument("--deadline", "DURATION", "the time until the GPU goes away, for example 2m", by=DURATIONS)
    parser.argument("--wait", "DURATION", "wait up to this long for the GPU to become empty")


def _drain_request(options: argparse.Namespace) -> _Drain:
    wait_ms = None if options.wait is None else parse_argument(parse_duration_ms, options.wait)
    deadline_ms = None if options.deadline is None else parse_argument(parse_duration_ms, options.deadline)
    return DrainRequest(evict_busy=options.evict_busy, deadline_in_ms=deadline_ms), wait_ms


def _drain(client: BrokerClient, name: str, drain: _Drain) -> DeviceStatus:
    request, wait_ms = drain
    device = client.drain(name, request)
    if wait_ms is not None:
        with say_if_slow(f"waiting until GPU {device.index} is empty ... (Ctrl-C stops waiting)") as progress:
            device = await_empty(client, device, wait_ms, freed=progress.counter("MiB freed"))
    return device


def await_empty(
    client: BrokerClient,
    device: DeviceStatus,
    wait_ms: int,
    *,
    freed: Callable[[int, int], None] = lambda _done, _of: None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> DeviceStatus:
    """Wait up to `wait_ms` until the device is empty, then return it. Call `freed` with the MiB freed so far and the total MiB to free."""
    end_s, most_mib = clock() + wait_ms / 1000, device.reserved_mib
    while device.reserved_mib and clock() < end_s:
        pause(min(_POLL_S, max(0.0, end_s - clock())))
        device = next((one for one in client.status().devices if one.device_id == device.device_id), device)
        freed(max(0, most_mib - device.reserved_mib), most_mib)
    return device


def _say_drained(device: DeviceStatus) -> str:
    left = (
        f"kernels still hold {format_memory(device.reserved_mib)} there"
        if device.reserved_mib
        else "no kernel holds memory there"
    )
    if deadline := device_deadline(device):
        left += f"; it {deadline}"
    return f"GPU {device.index} ({device.name}): draining, {left}"


def _check_empty(device: DeviceStatus, drain: _Drain) -> None:
    _, wait_ms = drain
    if wait_ms is not None and device.reserved_mib:
        raise CommandError(
            f"GPU {device.index} was not empty after {format_duration(wait_ms)}: kernels still hold "
            f"{format_memory(device.reserved_mib)}; wait longer, or add --evict-busy"
        )


COMMANDS: Final[Mapping[str, LeaseCommand[Any, Any] | BulkCommand | DeviceCommand[Any]]] = {
    "suspend": BulkCommand(
        description="Save idle kernels' GPU memory to host memory, and free the GPU for others.",
        epilog="""\
examples:
  jupyter gpu suspend 3f2a              the beginning of the id is enough
  jupyter gpu suspend --all             free the GPUs, for instance before a driver update

A suspended kernel keeps every variable; its next cell brings it back. Busy kernels are not suspended.
""",
        verb="suspend",
        doing="suspending",
        interrupted="stops waiting; a suspend that has started continues",
        call=BrokerClient.suspend,
        applies=lambda lease: lease.state == "resident",
        success=lambda lease: (
            f"suspended, {format_memory(lease.lease.saved_mib)} saved in host memory"
            if lease.lease.saved_mib
            else "holds no GPU memory, so there was nothing to save"
        ),
    ),
    "resume": BulkCommand(
        description="Bring suspended kernels back onto a GPU, waiting for room if necessary.",
        epilog="""\
examples:
  jupyter gpu resume 3f2a               the beginning of the id is enough
  jupyter gpu resume --all              bring everything back, for instance before removing this package

You rarely need this: a kernel's next cell brings it back. If there is no room, it waits for its turn.
""",
        verb="resume",
        doing="resuming",
        interrupted="gives up its place in the queue",
        call=BrokerClient.resume,
        applies=lambda lease: lease.state == "suspended",
        success=lambda lease: f"on the GPU ({lease.device_name})" if lease.device_name else "on the GPU",
    ),
    "pin": LeaseCommand(
        description="Keep a kernel on its GPU for a while, so that it is not suspended when idle or for other kernels.",
        epilog="""\
examples:
  jupyter gpu pin 3f2a 30m              keep it on its GPU for half an hour
  jupyter gpu pin 3f2a 2h               a new pin replaces the old one, and moves the end of a claim
  jupyter gpu unpin 3f2a                the rest of the pin goes back to your budget

A pool limits how long a pin may last, and each user's pinned time per day. `jupyter gpu suspend` still works, and ends the pin.
""",
        arguments=_add_pin_arguments,
        request=_pin_request,
        doing="pinning",
        call=BrokerClient.pin,
        success=_say_pinned,
    ),
    "release": LeaseCommand(
        description="End a claim made with `jupyter gpu lease`. Programs that use its memory keep running.",
        epilog="""\
examples:
  jupyter gpu release 3f2a              the rest of its time goes back to your budget
""",
        find=_find_claim,
        doing="releasing",
        call=lambda client, lease_id, _: client.release(lease_id),
        success=lambda before, _: f"{lease_name(before)}: released",
    ),
    "unpin": LeaseCommand(
        description="End a kernel's pin.",
        epilog="""\
examples:
  jupyter gpu unpin 3f2a                the kernel can be suspended again when idle

The rest of the pin goes back to your budget. It is not an error if the kernel is not pinned.
""",
        doing="unpinning",
        call=lambda client, lease_id, _: client.because_of("`jupyter gpu unpin`").unpin(lease_id),
        success=lambda before, _: (
            f"{lease_name(before)}: {'no longer pinned' if before.pinned_ms else 'was not pinned'}"
        ),
    ),
    "resize": LeaseCommand(
        description="Change a running kernel's share of a GPU without a restart.",
        epilog="""\
examples:
  jupyter gpu resize 3f2a 1/2           half a GPU, and half of its memory
  jupyter gpu resize 3f2a --memory 30GiB
  jupyter gpu resize 3f2a 1/8 --wait 0  now or not at all

The kernel keeps running. To get a larger share, it waits for room on its GPU: idle neighbours are suspended, and an idle kernel may
move to another GPU if the pool allows that. A smaller share must still hold what the kernel uses.
""",
        arguments=_add_resize_arguments,
        request=_resize_request,
        doing="resizing",
        call=BrokerClient.resize,
        success=_say_resized,
    ),
    "explain": LeaseCommand(
        description="Say why a kernel waited, was suspended, moved or refused.",
        epilog="""\
examples:
  jupyter gpu explain 3f2a              the kernel's history, oldest first
  jupyter gpu explain 3f2a --json       the same as JSON, with reason codes and times since 1970
""",
        doing="reading the history of",
        call=lambda client, lease_id, _: client.story(lease_id),
        success=lambda lease, story: render_story(lease, story, int(time.time() * 1000), terminal_width(sys.stdout)),
    ),
    "drain": DeviceCommand(
        description="Empty a GPU: it accepts no new kernels, and those on it are suspended.",
        epilog="""\
examples:
  jupyter gpu drain 0                   GPU 0 accepts no new kernels; idle ones leave now, busy ones after their cell
  jupyter gpu drain 0 --evict-busy      busy ones leave at once, in the middle of a cell, which continues elsewhere or later
  jupyter gpu drain 0 --wait 10m        wait until no kernel is left; exit code 1 if one is after ten minutes
  jupyter gpu drain 0 --deadline 2m     the GPU goes away in two minutes: the most valuable kernels are saved first, and the
                                        users of the others are told at once
  jupyter gpu drain --all --deadline 2m all GPUs of this host go away
  jupyter gpu undrain 0                 the GPU is in use again; any deadline is cancelled

Without a deadline nothing is lost: kernels that leave are saved in host memory, which is lost with its host (docs/revocation.md).
The GPU stays drained even if the broker restarts. For administrators.
""",
        arguments=_add_drain_arguments,
        request=_drain_request,
        call=_drain,
        success=_say_drained,
        check=_check_empty,
    ),
    "undrain": DeviceCommand(
        description="Put a drained GPU back into use.",
        epilog="""\
examples:
  jupyter gpu undrain 0                 GPU 0 accepts kernels again
  jupyter gpu undrain --all             all GPUs do

It is not an error if the GPU is not drained. For administrators.
""",
        call=lambda client, device, _: client.undrain(device),
        success=lambda device: f"GPU {device.index} ({device.name}): in use again",
    ),
    "move": LeaseCommand(
        description="Move an idle kernel to another GPU of its pool. For administrators.",
        epilog="""\
examples:
  jupyter gpu move 3f2a                 to any other GPU of its pool that has room
  jupyter gpu move 3f2a --to 1          to GPU 1 (a number, an id or the beginning of one)

The kernel keeps every variable: its state goes through host memory. A kernel that is running a cell is not moved. Moving it ends its pin.
""",
        arguments=lambda parser: parser.argument(
            "--to", "DEVICE", "the GPU (default: chosen from the pool as for a new kernel)"
        ),
        request=lambda options: MoveRequest(device=options.to),
        doing="moving",
        call=BrokerClient.move,
        success=lambda before, after: f"{lease_name(before)}: now on {after.lease.device_id}",
    ),
    "evict": LeaseCommand(
        description="End a kernel and its lease. All its variables are lost. For administrators.",
        epilog="""\
examples:
  jupyter gpu suspend 3f2a              also frees the GPU and loses nothing: try this first
  jupyter gpu evict 3f2a --confirm      ends the kernel's processes; all its variables are lost

Its notebook shows that the kernel died. A Jupyter server may start a new one, which says who ended the last one and why.
""",
        arguments=_add_evict_arguments,
        request=_evict_request,
        doing="evicting",
        call=BrokerClient.evict,
        success=lambda before, _: f"{lease_name(before)}: ended",
    ),
    "end": LeaseCommand(
        description=(
            "End processes that still hold GPU memory after their kernel ended, or a kernel that outlived its hub server. "
            "Administrators can do this for any user."
        ),
        epilog="""\
examples:
  jupyter gpu status                    lists them: "its kernel has ended, but GPU memory is still held by process 4242 ..."
  jupyter gpu end 3f2a                  end everything that this lease's kernel left behind
  jupyter gpu end 4242                  the same, naming one of the processes

  jupyter gpu end 3f2a                  on a hub: end one of your kernels whose server has ended

Processes get SIGTERM, and SIGKILL 5 seconds later. Other kernels' processes are left alone.
""",
        find=_find_left,
        doing="ending the processes left behind by",
        call=lambda client, lease_id, _: client.end_left(lease_id),
        success=_say_ended,
    ),
}
