"""`jupyter gpu uninstall` removes what this package put on the machine for this user, and explains how to remove the package itself.

It removes nothing while any kernel has a lease, because that kernel's state may exist only in host memory. Configuration files are listed
but kept.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from jupyter_core.paths import jupyter_config_dir, jupyter_config_path

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import SYSTEM_SOCKET, restart_command, runtime_place
from fractional_gpu.client.http import claim_holder
from fractional_gpu.client.state_folder import own_host_folders
from fractional_gpu.commands.broker import check_owner, end_process
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.connection import kernels_of, say_if_slow
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, say
from fractional_gpu.config.service import PACKAGE
from fractional_gpu.config.settings import CONFIG_NAME
from fractional_gpu.host.files import temporary_folder
from fractional_gpu.jupyter.kernelspecs import delete_folder, list_installed
from fractional_gpu.protocol.errors import BrokerUnavailableError

_TEMPORARY = ("/tmp",)  # noqa: S108 - only searched, and we check that what is found is ours
_SOCKET_NAME = "broker.sock"

EPILOG = """\
examples:
  jupyter gpu uninstall --dry-run       show what would be removed
  jupyter gpu uninstall                 ask for confirmation, then remove it
  jupyter gpu uninstall --yes --json    for scripts

Shut down GPU kernels first: nothing is removed while one has a lease. Usage records (the ledger) are removed too; save them with
`jupyter gpu report --json`. The package itself stays; the last line says how to remove it.
"""


@dataclass(frozen=True, slots=True)
class Item:
    path: Path
    what: str


@dataclass(slots=True)
class Findings:
    items: list[Item] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)
    kept: list[Item] = field(default_factory=list)


def configure(parser: Parser) -> None:
    parser.describe("Remove this user's kernelspecs, settings, state and logs. The package itself stays.", EPILOG)
    parser.flag("--dry-run", "show what would be removed without removing anything")
    parser.flag("--yes", "do not ask")
    parser.flag(
        "--json",
        "with --yes or --dry-run: print one JSON object with what was removed, what failed and why, and what stays",
    )


def run(options: argparse.Namespace) -> int:
    with Progress("looking for files ...", silent=True):
        found = _find()
    if options.dry_run:
        _report(found, as_json=options.json, removed=[], failed={}, dry=True)
        return 0
    check_no_leases(found.sockets)
    if not options.yes:
        if options.json or not sys.stdin.isatty():
            raise CommandError(
                "cannot ask for confirmation without a terminal: use --yes to remove everything, or --dry-run to see what would be removed"
            )
        for item in found.items:
            say(f"  {item.path}  ({item.what})")
        if not found.items or input("Remove all of this? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 0
    for socket in {*found.sockets} - {SYSTEM_SOCKET}:
        end_broker(socket)
    check_no_leases(found.sockets)  # of kernels that have started meanwhile
    removed, failed = _remove(found.items)
    _report(found, as_json=options.json, removed=removed, failed=failed, dry=False)
    return 1 if failed else 0


def _find() -> Findings:
    from fractional_gpu.broker.process.driver_start import simulated_folder  # noqa: PLC0415 - heavy

    found = Findings()
    for spec in list_installed():
        found.items.append(Item(spec.folder, f"kernel {spec.display_name!r}"))
    # If the usual path is too long for a socket (see `fractional_gpu.client.discovery`), the socket is in a folder with a short path.
    short = (
        one
        for parent in {temporary_folder(), *map(Path, _TEMPORARY)}
        for one in parent.glob(f"jupyter-gpu-{os.geteuid()}-*")
    )
    places = [runtime_place(), *(folder for folder in short if _is_own_folder(folder))]
    states = own_host_folders()
    found.sockets = sorted({*_sockets_below(places), *_recorded_sockets(states)})
    found.items += [Item(place, "sockets and logs") for place in places if _is_own_folder(place)]
    found.items += [Item(state, "this host's usage records and forecasts") for state in states]
    simulated = map(simulated_folder, found.sockets)
    found.items += [Item(folder, "simulated GPUs") for folder in simulated if _is_own_folder(folder)]
    settings = Path(jupyter_config_dir()) / "lab" / "user-settings" / PACKAGE
    if _is_own_folder(settings):
        found.items.append(Item(settings, "settings in JupyterLab"))
    configs = (Path(folder) / CONFIG_NAME for folder in jupyter_config_path())
    found.kept = [Item(path, "your configuration") for path in configs if os.path.exists(path)]  # noqa: PTH110 - False without access
    return found


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and not path.is_symlink() and status.st_uid == os.geteuid()


def _sockets_below(places: list[Path]) -> Iterator[str]:
    """Yield the sockets of all brokers with files in these folders, such as brokers started by `jupyter gpu lab --simulate`."""
    for place in places:
        for folder in (place, *(sub for sub in _entries(place) if _is_own_folder(sub))):
            if any(entry.name.startswith("broker.") for entry in _entries(folder)):
                yield str(folder / _SOCKET_NAME)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _recorded_sockets(states: list[Path]) -> Iterator[str]:
    """Yield the sockets that running or crashed brokers recorded for a restart, wherever those sockets are."""
    for state in states:
        for folder in _entries(state):
            with suppress(BrokerUnavailableError):
                command = restart_command(str(folder / _SOCKET_NAME))
                if command is not None:
                    with suppress(ValueError, TypeError, KeyError):
                        yield str(json.loads(command[0][-1])["socket"])


def check_no_leases(sockets: list[str]) -> None:
    for socket in sockets:
        named: list[str] = []
        try:
            with BrokerClient(socket) as client:
                named = [lease.spec.label or lease.lease_id for lease in client.status().leases]
        except BrokerUnavailableError as error:
            if claim_holder(socket) is not None:
                raise CommandError(f"cannot ask the running broker whether any kernels have leases: {error}") from None
            named = [f"process {pid}" for pid in kernels_of(socket)]  # they start the broker again when needed
        if named:
            raise CommandError(
                f"kernels hold a share of a GPU and would lose their state: {', '.join(sorted(named))} (broker {socket}); "
                "shut them down, then try again"
            )


def end_broker(socket: str) -> None:
    if (pid := claim_holder(socket)) is not None:
        check_owner(socket, pid)
        with say_if_slow(f"waiting for the broker on {socket} (process {pid}) to end ..."):
            end_process(pid)


def _remove(items: list[Item]) -> tuple[list[Item], dict[Path, str]]:
    removed: list[Item] = []
    failed: dict[Path, str] = {}
    with Progress("removing ...", silent=True) as progress:
        count = progress.counter("folders")
        for number, item in enumerate(items):
            count(number, len(items))
            try:
                delete_folder(item.path)
            except FileNotFoundError:
                continue  # the broker removed the file as it ended
            except OSError as error:
                failed[item.path] = error.strerror or str(error)
            else:
                removed.append(item)
                above = item.path.parent
                if above.name == "jupyter-gpu" or above.name.startswith("jupyter-gpu-"):
                    with suppress(OSError):  # the folder contains folders of other hosts
                        above.rmdir()
    return removed, failed


def package_command() -> str:
    try:
        installer = (distribution(PACKAGE).read_text("INSTALLER") or "").strip()
    except PackageNotFoundError:
        installer = ""
    parts = Path(sys.prefix).parts
    if "pipx" in parts:
        return f"pipx uninstall {PACKAGE}"
    if installer == "uv":
        in_tool = "tools" in parts and "uv" in parts
        return f"uv tool uninstall {PACKAGE}" if in_tool else f"uv pip uninstall --python {sys.executable} {PACKAGE}"
    if installer == "conda":
        return f"conda remove --prefix {sys.prefix} {PACKAGE}"
    return f"{sys.executable} -m pip uninstall {PACKAGE}"


def _report(found: Findings, *, as_json: bool, removed: list[Item], failed: dict[Path, str], dry: bool) -> None:
    command = package_command()
    if as_json:
        listed = found.items if dry else removed
        document = {
            "would_remove" if dry else "removed": [{"path": str(one.path), "what": one.what} for one in listed],
            "failed": [{"path": str(path), "why": why} for path, why in failed.items()],
            "kept": [{"path": str(one.path), "what": one.what} for one in found.kept],
            "package": command,
        }
        print(json.dumps(document))
        return
    for item in found.items if dry else removed:
        say(f"{'would remove' if dry else 'removed'} {item.path}  ({item.what})")
    for path, why in failed.items():
        say(f"could not remove {path}: {why}")
    for item in found.kept:
        say(f"kept {item.path}  ({item.what})")
    if not found.items:
        print("There is nothing to remove for this user.")
    print(f"To remove the package itself: {command}")
