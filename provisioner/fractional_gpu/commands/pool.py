"""`jupyter gpu pool` shows the settings of pools, and can change them while the broker is running."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.commands.terminal.arguments import POOLS, Parser
from fractional_gpu.commands.terminal.connection import RUN_ONE, running_broker
from fractional_gpu.commands.terminal.text import Style, UsageError, answer, line, table
from fractional_gpu.core.units import plural
from fractional_gpu.protocol.seats import PoolKeys

if TYPE_CHECKING:
    from rich.text import Text

NO_POOLS = (
    f"and only a running broker can show or change its pools; {RUN_ONE}. jupyter_gpu_config.py sets the initial values"
)

EPILOG = """\
examples:
  jupyter gpu pool                                     every pool and its keys
  jupyter gpu pool default idle_after=2m               suspend idle kernels after two minutes, from now on
  jupyter gpu pool default 'user_limits={"leases": 2}' 'hours=Mon-Fri 08:00-18:00'
  jupyter gpu pool default price=null                  values are JSON; anything else is text

A change applies at once, even to running kernels, and lasts until the broker restarts. To keep it, add it to the broker's configuration
(`jupyter gpu broker --generate-config` explains every key). Existing leases and seats keep their size. For administrators.
"""


def configure(parser: Parser) -> None:
    parser.describe("Show the keys of pools, or change them while the broker runs.", EPILOG)
    parser.argument("pool", "POOL", "a pool's name (default: all pools)", by=POOLS, nargs="?")
    parser.argument("changes", "KEY=VALUE", "a key and its new value", nargs="*")
    parser.flag("--json", "print the keys as JSON")
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    keys = dict(parse_change(text) for text in options.changes)
    with running_broker(options.socket, without=NO_POOLS) as running, SeatClient(running.socket_path) as client:
        pools = [one for one in client.pools().pools if options.pool in {None, one.pool}]
        if pools and keys:
            pools = [client.change_pool(options.pool, keys)]
    if not pools:
        raise UsageError(f"there is no pool named {options.pool!r}; `jupyter gpu pool` lists the pools")
    answer(options, {"pools": pools}, lambda width: _said(pools, width))
    return 0


def parse_change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{text!r} is not in the form KEY=VALUE, such as idle_after=2m")
    try:
        return key, json.loads(value)
    except ValueError:
        if value[:1] in {"[", "{"}:
            raise UsageError(
                f"{text!r}: the value is not valid JSON; use double quotes in lists and objects, and single quotes around them, such as "
                """'fractions=["1/4", "1/2"]'"""
            ) from None
        return key, value


def _said(pools: Sequence[PoolKeys], width: int | None) -> "list[Text]":
    lines: list[Text] = []
    for pool in pools:
        rows = [
            (key, _value(value, ("  (changed since the broker started)" if key in pool.changed else "")))
            for key, value in pool.keys.items()
        ]
        lines += [line()] if lines else []
        lines += [line(f"pool {pool.pool}, {plural(len(pool.devices), 'device')}"), *table((), rows, width=width)]
        lines += [line(f"  note: {pool.note}")] if pool.note else []
    return lines


def _value(value: object, mark: str) -> "Text":
    return line(json.dumps(value, ensure_ascii=False), (mark, Style.ATTENTION))
