"""`jupyter gpu seats` lists the seats held by a hub's servers, and ends any that the hub failed to release."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.connection import running_broker, say_if_slow
from fractional_gpu.commands.terminal.render import server_name
from fractional_gpu.commands.terminal.text import CommandError, Piece, Style, UsageError, answer, line, table
from fractional_gpu.core.units import format_duration, format_fraction, format_gpus, format_memory, plural
from fractional_gpu.protocol.messages import KUBERNETES, SLURM
from fractional_gpu.protocol.status import SeatStatus

if TYPE_CHECKING:
    from rich.text import Text

_WORKLOADS = {SLURM: "Slurm job", KUBERNETES: "pod"}
_FEWEST = 4  # characters required of a seat's id
EPILOG = """\
examples:
  jupyter gpu seats                     every seat: its owner, its share, and how much its kernels use
  jupyter gpu seats release ada         end the seat of ada's default server
  jupyter gpu seats release ada/big     end the seat of her server `big`; a seat's id, or its first characters, work too

Release a seat if its server is not running and its hub is gone; a running hub releases such seats itself. If the server is running, it
gets no more GPU kernels until it restarts. Running kernels are suspended and keep their variables. For administrators.
"""


def configure(parser: Parser) -> None:
    parser.describe("Show the seats of hub servers, or end one.", EPILOG)
    parser.argument(
        "action", None, "what to do (default: list)", nargs="?", choices=("list", "release"), default="list"
    )
    parser.argument("seat", "SEAT", "for release: USER, USER/SERVER or a seat's id", nargs="?")
    parser.flag("--json", "print the seats, or the released seat, as JSON")
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    if (options.action == "release") is not (options.seat is not None):
        raise UsageError(
            "say which seat to release: `jupyter gpu seats release SEAT`, where SEAT is USER, USER/SERVER or a seat's id"
        )
    with running_broker(options.socket) as running, SeatClient(running.socket_path) as client:
        listing = client.seats()
        if options.seat is None:
            answer(options, listing, lambda width: _listed(listing.seats, listing.waiting, width))
            return 0
        seat = find_seat(options.seat, listing.seats)
        with say_if_slow(f"ending the seat of {_name(seat)} ..."):
            client.release_seat(seat.seat_id)
    kept = f"; {plural(seat.kernels, 'kernel')} suspended; all variables are kept" if seat.kernels else ""
    answer(options, {"released": seat}, lambda _: [f"the seat of {_name(seat)} ({_share(seat)}) has ended{kept}"])
    return 0


def find_seat(word: str, seats: Sequence[SeatStatus]) -> SeatStatus:
    named = [seat for seat in seats if _name(seat) == word]
    found = named or [seat for seat in seats if len(word) >= _FEWEST and seat.seat_id.startswith(word)]
    if len(found) == 1:
        return found[0]
    if not found:
        there = ", ".join(_name(seat) for seat in seats) or "none"
        raise CommandError(f"there is no seat {word!r}; existing seats: {there} (`jupyter gpu seats` lists them)")
    ids = ", ".join(seat.seat_id for seat in found)
    raise CommandError(f"{word!r} matches {len(found)} seats; give the id of one: {ids}")


def _name(seat: SeatStatus) -> str:
    return server_name(seat.owner, seat.server)


def _share(seat: SeatStatus) -> str:
    return f"{format_fraction(seat.fraction_milli)} GPU, {format_memory(seat.memory_mib)}, of pool {seat.pool}"


def _listed(seats: Sequence[SeatStatus], waiting: dict[str, int], width: int | None) -> "list[Text]":
    rows: list[tuple[str, Piece]] = []
    for seat in seats:
        rows.append((seat.seat_id[:8], _said(seat)))
        if seat.warning:
            rows.append(("", (seat.warning, Style.ATTENTION)))
    lines = table((), rows, indent="", width=width)
    for pool, count in waiting.items():
        lines.append(line(f"pool {pool}: {count} server{'s are' if count > 1 else ' is'} waiting for a seat"))
    return lines or [line("no server has a seat")]


def _said(seat: SeatStatus) -> str:
    return (
        f"{_name(seat)}: {_share(seat)}; {plural(seat.kernels, 'kernel')} with "
        f"{format_gpus(seat.used_milli)}; for {format_duration(seat.age_ms // 1000 * 1000)}"
        + ("" if seat.workload is None else f"; of {_WORKLOADS.get(seat.workload.engine, '')} {seat.workload.id}")
        + ("" if seat.confirmed else "; not yet confirmed by its hub")
    )
