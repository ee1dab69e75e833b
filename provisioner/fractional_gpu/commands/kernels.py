"""`jupyter gpu kernels` installs, lists and removes kernelspecs such as "Python 3 · 1/4 GPU", one for each fraction in each pool."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_data_dir, jupyter_path
from msgspec import to_builtins

from fractional_gpu.commands.terminal.arguments import FRACTIONS, KERNELSPECS, POOLS, Parser, checked_simulate
from fractional_gpu.commands.terminal.connection import started_broker
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import (
    CommandError,
    UsageError,
    parse_argument,
    say,
    table,
    terminal_width,
    write,
)
from fractional_gpu.core.model import PoolSpec
from fractional_gpu.core.units import format_fraction, parse_fraction_milli
from fractional_gpu.jupyter.kernelspecs import InstalledSpec, install, list_installed, plan_of, remove
from fractional_gpu.protocol.status import HostStatus

ANY_OFFERS_MILLI: tuple[int, ...] = PoolSpec(name="", devices=()).fractions_milli
"""The fractions to install for a pool that allows any fraction."""

EPILOG = """\
examples:
  jupyter gpu kernels install                                everything the pools offer, for all users of this environment
  jupyter gpu kernels install --user --fraction 1/4 1/2      two fractions, for yourself, without a broker
  jupyter gpu kernels install --base ir --fraction 1/4       for R, in addition to those for Python
  jupyter gpu kernels list
  jupyter gpu kernels remove --all
"""
INSTALL_EPILOG = """\
examples:
  jupyter gpu kernels install
  jupyter gpu kernels install --pool teaching --fraction 1/8 1/4
  jupyter gpu kernels install --simulate 1x2GiB --user
  jupyter gpu kernels install --launcher --user              for VS Code and others that ignore kernel provisioners

Without --fraction, this asks the broker (starting one if necessary) what its pools offer, and removes installed kernels that no pool
offers any more. With --fraction it needs no broker, for instance in the build of a container image.
"""
REMOVE_EPILOG = """\
examples:
  jupyter gpu kernels remove fractional-gpu-default-250
  jupyter gpu kernels remove --all --user

Running kernels are not affected.
"""


def configure(parser: Parser) -> None:
    parser.describe("Install, list and remove kernels on fractions of a GPU.", EPILOG)
    actions = parser.add_subparsers(dest="action", metavar="install|list|remove", required=True)
    adding = actions.add_parser("install", help="add kernels to the launcher", epilog=INSTALL_EPILOG)
    adding.argument("--pool", None, "only this pool (default: every pool; with --fraction: default)", by=POOLS)
    adding.argument("--fraction", "F", "only these fractions, such as 1/4, 0.25 or 250m", by=FRACTIONS, nargs="+")
    adding.argument("--base", None, "the kernelspec to copy (default: python3)", default="python3")
    adding.argument("--name", None, "the kernelspec's name (only with a single fraction)")
    adding.argument("--display-name", "TEXT", "the name in the launcher (only with a single fraction)")
    adding.argument("--simulate", "COUNTxMEMORY", "start the kernels' broker with simulated GPUs")
    adding.flag(
        "--launcher",
        "make the kernel's command take the lease, for VS Code and other programs that ignore kernel provisioners",
    )
    _add_place(adding, default="this environment")
    listing = actions.add_parser("list", help="show the installed kernels")
    listing.flag("--json", 'print {"kernels": [...]}')
    _add_place(listing, default="wherever Jupyter looks")
    removing = actions.add_parser("remove", help="remove kernels from the launcher", epilog=REMOVE_EPILOG)
    seen = "a kernelspec's name (see `jupyter gpu kernels list`)"
    removing.argument("names", "NAME", seen, by=KERNELSPECS, nargs="*")
    removing.flag("--all", "every kernel that this package installed")
    _add_place(removing, default="wherever Jupyter looks")


def _add_place(parser: Parser, default: str) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help=f"your own kernels (default: {default})")
    place.add_argument("--sys-prefix", action="store_true", help="kernels of this Python environment")
    place.add_argument("--prefix", metavar="DIR", help="kernels in DIR/share/jupyter/kernels")


def _place(options: argparse.Namespace) -> str | None:
    if options.user:
        return str(Path(jupyter_data_dir(), "kernels"))
    prefix = sys.prefix if options.sys_prefix else options.prefix
    if prefix == "":
        raise UsageError("--prefix is empty; give a folder, such as /usr/local, or leave it out")
    return None if prefix is None else str(Path(prefix, "share", "jupyter", "kernels"))


def run(options: argparse.Namespace) -> int:
    return {"install": _install, "list": _list, "remove": _remove}[options.action](options)


def _install(options: argparse.Namespace) -> int:
    if options.simulate:
        checked_simulate(options.simulate)
        os.environ["JUPYTER_GPU_SIMULATE"] = options.simulate  # a broker that is started now reads it
    if options.fraction:
        fractions = [parse_argument(parse_fraction_milli, text, "--fraction") for text in options.fraction]
        offers: Mapping[str, Sequence[int]] = {options.pool or "default": fractions}
        simulate = os.environ.get("JUPYTER_GPU_SIMULATE") or None
        simulated = simulate is not None
    else:
        offers, status = _ask_broker(options.pool, must_simulate=bool(options.simulate))
        simulate, simulated = simulated_devices(status), status.simulated
    names = ("base", "launcher", "name", "display_name")
    how = {"simulated": simulated, "simulate": simulate, **{name: getattr(options, name) for name in names}}
    pool = "" if options.fraction else options.pool  # with --fraction, nothing is removed
    with Progress("installing kernels ...", silent=True):
        specs, removed = install_offers(offers, pool, directory=_place(options), **how)
    for sentence in (sentence for spec in specs for sentence in _said_of(spec)):
        say(sentence)
    for spec in removed:
        say(f"removed {spec.display_name}  {spec.folder}  (no longer offered)")
    if specs:
        say(_where_they_appear(specs[0].folder.parent))
    return 0


def _said_of(spec: InstalledSpec) -> Iterator[str]:
    without = "" if spec.gated else "  (without our extension, so it holds its share from the start)"
    yield f"{'replaced' if spec.replaced else 'installed'} {spec.display_name}  {spec.folder}{without}"
    if spec.obstacle:
        yield f"note: {spec.obstacle}"
    if spec.shadowed_by is not None:
        yield (
            f"note: Jupyter does not show it, because it finds {spec.shadowed_by} first, which has the same name; remove that one, or "
            f"choose another --name"
        )


def _where_they_appear(place: Path) -> str:
    if place not in map(Path, jupyter_path("kernels")):
        return (
            f"This environment's Jupyter ({sys.prefix}) does not look there: start its server with JUPYTER_PATH={place.parent}, or "
            "leave out --prefix."
        )
    where = (
        f"of the environment {sys.prefix}" if place.is_relative_to(sys.prefix) else "that has jupyter-fractional-gpu"
    )
    return f"They are in the launcher of every Jupyter server {where}. Reload the page if it is open."


def install_offers(
    offers: Mapping[str, Sequence[int]],
    pool: str | None = None,
    **how: Any,  # noqa: ANN401 - as `install` takes it
) -> tuple[list[InstalledSpec], list[InstalledSpec]]:
    """Install the offers, and remove kernelspecs of `pool` (of any pool if None) that are not offered. Return both lists."""
    installed = [spec for name, milli in offers.items() for spec in install(name, milli or ANY_OFFERS_MILLI, **how)]
    place = str(installed[0].folder.parent) if installed else None
    stale = [
        spec.name
        for spec in (list_installed(place) if installed else ())
        if pool in {None, spec.pool}
        and (spec.pool not in offers or (offers[spec.pool] and spec.fraction_milli not in offers[spec.pool]))
    ]
    return installed, remove(stale, directory=place)


def simulated_devices(status: HostStatus) -> str | None:
    if not status.simulated:
        return None
    sizes = [device.memory_mib for device in sorted(status.devices, key=lambda device: device.index)]
    return ",".join(f"{len(list(same))}x{mib}MiB" for mib, same in groupby(sizes)) or None


def _ask_broker(pool: str | None, *, must_simulate: bool) -> tuple[Mapping[str, Sequence[int]], HostStatus]:
    with started_broker() as broker:
        status = broker.status()
    if must_simulate and not status.simulated:
        raise CommandError(
            f"the running broker (process {status.pid} on {status.socket}) has real GPUs; leave out --simulate, or set "
            "JUPYTER_GPU_SOCKET to another socket"
        )
    if pool is None:
        return status.pools, status
    if pool not in status.pools:
        raise CommandError(f"there is no pool named {pool!r}; the broker has {', '.join(status.pools) or 'none'}")
    return {pool: status.pools[pool]}, status


def _remove(options: argparse.Namespace) -> int:
    if bool(options.names) == bool(options.all):
        raise UsageError("give the names of the kernels to remove, or --all (`jupyter gpu kernels list` shows them)")
    removed = remove(None if options.all else options.names, directory=_place(options))
    for spec in removed:
        say(f"removed {spec.display_name}  {spec.folder}")
    if not removed:
        print("There is nothing to remove.")
    return 0


def _list(options: argparse.Namespace) -> int:
    specs = list_installed(_place(options))
    if options.json:
        print(json.dumps({"kernels": to_builtins(specs, enc_hook=str)}))
        return 0
    if not specs:
        print("No kernels are installed; add some with `jupyter gpu kernels install`.")
        return 0
    rows = []
    for spec in specs:
        shadowed = f"  (shadowed by {spec.shadowed_by})" if spec.shadowed_by is not None else ""
        share = format_fraction(spec.fraction_milli)
        rows.append((spec.name, spec.display_name, spec.pool, share, f"{spec.folder}{shadowed}"))
    write(table(("NAME", "SHOWN AS", "POOL", "GPU", "FOLDER"), rows, indent="", width=terminal_width(sys.stdout)))
    for obstacle in dict.fromkeys(plan_of(spec).obstacle for spec in specs if not spec.gated):
        if obstacle:
            say(f"note: {obstacle}")
    return 0
