"""`jupyter gpu status` shows the broker's devices, kernels and seats. It starts a broker only if one exited while kernels had leases."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import Never, TextIO

from msgspec import to_builtins

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.http import is_service_socket
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.connection import broker_if_running
from fractional_gpu.commands.terminal.render import render_status
from fractional_gpu.commands.terminal.text import shown, terminal_width
from fractional_gpu.core.units import plural
from fractional_gpu.protocol.status import HostStatus

INTERVAL_S = 2.0
_ENTER, _LEAVE = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen, which leaves the main screen unchanged
_CLEAR = "\x1b[H\x1b[2J"  # moves the cursor home and erases the screen

EPILOG = """\
examples:
  jupyter gpu status
  jupyter gpu status --watch            update every 2 seconds
  jupyter gpu status --json             one object; {"running": false} if no broker is running
  jupyter gpu status --watch --json     one such object per line, every 2 seconds

You see your own kernels and your server's seat. Administrators see everyone's, and the servers waiting for a seat. A device's totals
include all users.
"""


def configure(parser: Parser) -> None:
    parser.describe("Show the GPUs, and which kernels hold or wait for them. Does not start a broker.", EPILOG)
    parser.flag("--json", "print JSON, with `running` and the fields of GET /v1/status")
    parser.flag("--watch", "update every 2 seconds until Ctrl-C")
    parser.add_socket()


def show(status: HostStatus | None, *, as_json: bool, socket: str, out: TextIO) -> str:
    if as_json:
        return json.dumps({"running": False} if status is None else {"running": True, **to_builtins(status)}) + "\n"
    if status is None:
        starts = (
            "an administrator must start it"
            if is_service_socket(socket)
            else "the first kernel that needs a GPU starts one"
        )
        return f"No broker is running on {socket}; {starts}.\n"
    return shown(render_status(status, terminal_width(out)), out)


def watch(
    read: Callable[[], HostStatus | None],
    out: TextIO,
    *,
    as_json: bool,
    socket: str,
    pause: Callable[[float], None] = time.sleep,
) -> Never:
    redraw = out.isatty() and not as_json
    out.write(_ENTER * redraw)
    try:
        while True:
            text = show(read(), as_json=as_json, socket=socket, out=out)
            out.write(_CLEAR + _beginning(text) if redraw else text + "\n" * (not as_json))
            out.flush()
            pause(INTERVAL_S)
    finally:
        out.write(_LEAVE * redraw)
        out.flush()


def _beginning(text: str) -> str:
    lines, most = text.splitlines(keepends=True), max(1, shutil.get_terminal_size().lines - 2)
    more = f"... {plural(len(lines) - most, 'more line')}; " if len(lines) > most else "\n"
    return f"{''.join(lines[:most])}{more}Ctrl-C stops this.\n"


def run(options: argparse.Namespace) -> int:
    as_json: bool = options.json
    socket: str = options.socket or socket_path()

    def read() -> HostStatus | None:
        client = broker_if_running(socket)
        if client is None:
            return None
        try:
            return client.status(fresh=True)
        finally:
            client.close()

    if not options.watch:
        sys.stdout.write(show(read(), as_json=as_json, socket=socket, out=sys.stdout))
        return 0
    try:
        watch(read, sys.stdout, as_json=as_json, socket=socket)
    except KeyboardInterrupt:
        return 0  # the usual way to end the command
