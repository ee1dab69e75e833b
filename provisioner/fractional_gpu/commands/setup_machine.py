"""`jupyter gpu setup-machine`: one broker, environment and set of kernels for all users of a workstation.

Everything is checked and planned, then recorded, then done. The record has the last content of each path that we did not write: after a
kill at any moment, the next run or `--undo` finishes. Content that neither we wrote nor the record has is someone's, and an error.
"""

import argparse
import difflib
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from fractional_gpu import __version__
from fractional_gpu.client.discovery import SYSTEM_SOCKET
from fractional_gpu.commands.kernels import ANY_OFFERS_MILLI
from fractional_gpu.commands.pool import parse_change
from fractional_gpu.commands.terminal.arguments import FRACTIONS, Parser
from fractional_gpu.commands.terminal.text import CommandError, UsageError, file_errors, say
from fractional_gpu.commands.uninstall import check_no_leases
from fractional_gpu.config import ConfigError, Settings, load
from fractional_gpu.config.service import (
    CONFIG,
    KERNELS,
    PROFILE,
    PROGRAM,
    RECORD,
    STATE,
    UNIT,
    requirement,
    service_file,
)
from fractional_gpu.core.units import plural
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.gpu.open import NVIDIA, open_monitor
from fractional_gpu.host.files import reach, replace_file
from fractional_gpu.jupyter.kernelspecs import install

_ROOT: Final = Path("/")
_ENVIRONMENT: Final = "/opt/jupyter-fractional-gpu"
_SMALLEST_MIB: Final = 4096  # few models fit into less
_PEOPLE: Final = range(1000, 60_000)  # uids
_CONFIG: Final = """\
# Written by `jupyter gpu setup-machine`. `jupyter gpu broker --generate-config` explains every key.
# `exclusive`: if the driver enforces memory limits, all programs of a user with kernels may use no more than these hold.
c.GPUBroker.admin_group = {admins!r}
c.GPUBroker.pools = {pools!r}
"""
EPILOG = """\
examples:
  sudo jupyter gpu setup-machine --dry-run
  sudo jupyter gpu setup-machine --share 1/4 --share 1/2
  sudo jupyter gpu setup-machine --pool 'big={"devices": [0]}' --pool 'default={"idle_after": "5m"}'
  sudo jupyter gpu setup-machine --undo

A second run changes nothing, or finishes one that was interrupted. Without --share, --pool and --admins, an existing configuration stays.
"""


def configure(parser: Parser) -> None:
    parser.describe("Set up a workstation that several people share: broker, environment, pools, kernels.", EPILOG)
    parser.flag("--dry-run", "print every file and command, and change nothing")
    parser.flag("--undo", "restore the files that were replaced, and remove the others; usage records stay")
    parser.flag("--remove-state", "with --undo: also remove usage records, and give up kernels that are suspended")
    parser.flag("--force", "replace files that others wrote; --undo restores them")
    text = "a share on offer (repeatable; default: by devices and users)"
    parser.argument("--share", "FRACTION", text, by=FRACTIONS, action="append", default=[])
    text = "a pool and its keys as JSON (repeatable; default: default={})"
    parser.argument("--pool", "NAME={...}", text, action="append", default=[])
    parser.argument("--admins", "GROUP", "the group of administrators, made if missing (default: gpu-admin)")
    parser.argument("--environment", "DIR", f"one with this version of the package (default: {_ENVIRONMENT}, made)")
    parser.argument("--wheel", "FILE", "install this, without the network, and dependencies from its folder", type=Path)
    parser.argument("--root", "DIR", "set up an image in this folder; runs no commands", type=Path, default=_ROOT)


def run(options: argparse.Namespace) -> int:
    os.umask(0o022)
    if os.geteuid() != 0 and options.root == _ROOT:
        raise CommandError("only root can set up a machine: use sudo")
    if options.remove_state and not options.undo:
        raise UsageError("--remove-state goes with --undo")
    return (_undo if options.undo else _set_up)(options, Changes(options.root.absolute(), force=options.force))


class Content(NamedTuple):
    data: bytes
    mode: int
    uid: int
    gid: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def give(self, file: int) -> None:
        os.fchown(file, self.uid, self.gid)
        os.fchmod(file, self.mode)


class Record(msgspec.Struct):
    before: dict[str, Content | None] = {}  # None: no file
    wrote: set[str] = set()  # digests
    folders: list[str] = []  # that we made, the outer ones first
    environment: str = ""
    made_environment: bool = False
    made_groups: set[str] = set()
    is_unfinished: bool = False


Planned = dict[str, tuple[Content | None, Content | None]]  # what each path has now, and will have


def own(text: str, mode: int = 0o644) -> Content:
    return Content(text.encode(), mode, os.geteuid(), os.getegid())


class Changes:
    """Changes of files below `root`; paths are without it."""

    def __init__(self, root: Path, *, force: bool) -> None:
        self.root, self._force = root, force
        check_place(self.real(str(RECORD)).parent, root)  # what it names is removed
        saved = self.read(str(RECORD))
        self.record = Record() if saved is None else msgspec.json.decode(saved.data, type=Record)

    def real(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str) -> Content | None:
        real = self.real(path)
        if not os.path.lexists(real):
            return None
        with file_errors("read", real, ": move it away, or make it a regular file"):
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                return Content(file.read(), stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)

    def plan(self, wanted: Mapping[str, Content]) -> Planned:
        """Return what differs. What we wrote and is not `wanted` any more is undone."""
        both = {path: (self.read(path), new) for path, new in {**self.record.before, **wanted}.items()}
        strange = [path for path, (now, new) in both.items() if now and not self._knows(path, now, new)]
        if strange and not self._force:
            named = ", ".join(str(self.real(path)) for path in strange)
            raise CommandError(f"others wrote {named}, so nothing was changed: move it away, or use --force")
        planned = {path: (now, new) for path, (now, new) in both.items() if now != new}
        for path in planned:
            check_place(self.real(path).parent, self.root)
        return planned

    def _knows(self, path: str, now: Content, new: Content | None) -> bool:
        return now.digest in {*self.record.wrote, *(one.digest for one in (new, self.record.before.get(path)) if one)}

    def note(self, planned: Planned) -> None:
        for path, (now, new) in planned.items():
            if path not in self.record.before or (now and now.digest not in self.record.wrote):
                self.record.before[path] = now
            if new and new != self.record.before[path]:
                self.record.wrote.add(new.digest)
            missing = [str(one) for one in reversed(Path(path).parents) if not self.real(str(one)).exists()]
            self.record.folders += [one for one in missing if one not in self.record.folders]
        self.save()

    def save(self) -> None:
        self.put(str(RECORD), own(msgspec.json.encode(self.record, order="deterministic").decode(), 0o600))

    def put(self, path: str, new: Content | None) -> None:
        real = self.real(path)
        with file_errors("written", real):
            if new is None:
                real.unlink(missing_ok=True)
            else:
                real.parent.mkdir(parents=True, exist_ok=True)
                replace_file(real, new.data, prepare=new.give)
            for left in real.parent.glob(f".{real.name}-????????"):  # of a run that was killed
                left.unlink()

    def forget(self) -> None:
        for folder in reversed(self.record.folders):
            with suppress(OSError):  # others put something there
                self.real(folder).rmdir()
        self.put(str(RECORD), None)


def check_place(folder: Path, root: Path = _ROOT) -> None:
    """Raise CommandError if users could put a file or link there."""
    real = Path(os.path.realpath(folder))
    if not real.is_relative_to(os.path.realpath(root)):
        raise CommandError(f"{folder} leads to {real}, outside of {root}: remove that link")
    for one in (real, *real.parents, folder, *folder.parents):
        with suppress(FileNotFoundError):
            status = one.stat()
            others = 0 if status.st_mode & stat.S_ISVTX else status.st_mode & (0o022 if status.st_gid else 0o002)
            if others or status.st_uid not in (0, os.geteuid()):
                raise CommandError(f"users can change what is below {one}: chown root {one}; chmod go-w {one}")


Step = tuple[str, Callable[[], object] | None]  # what it does, in words; None: cannot be done here


def _set_up(options: argparse.Namespace, changes: Changes) -> int:
    record, command = changes.record, partial(_command, options.root)
    environment = options.environment or record.environment or _ENVIRONMENT
    if not re.fullmatch(re.escape(record.environment) or r"/[\w./+-]+", environment):
        raise UsageError(f"--environment is {environment}; allowed: {record.environment or 'a path, without blanks'}")
    steps = [command(*words) for words in _installing(options, changes, environment)]
    settings, wanted = _configuration(options, changes)
    wanted[str(PROGRAM)] = own(service_file(PROGRAM, environment), 0o755)
    wanted |= {str(path): own(service_file(path, environment)) for path in (PROFILE, UNIT)}
    wanted |= _kernelspecs(settings, environment)
    planned = changes.plan(wanted)
    if (group := settings.admin_group) and group not in [one.gr_name for one in grp.getgrall()]:
        steps.append(command("groupadd", "--system", group))
        record.made_groups.add(group)
    steps += _files(changes, planned)
    if not record.is_unfinished and not any(act for _, act in steps):
        print("Nothing to change: the machine is set up.")
        return 0
    steps += [
        command("systemctl", *words) for words in (["daemon-reload"], ["enable", UNIT.name], ["restart", UNIT.name])
    ]
    record.environment, record.is_unfinished = environment, True
    if _do(options, changes, steps, planned):
        record.before = {path: content for path, content in record.before.items() if path in wanted}
        record.is_unfinished = False
        changes.save()
        if any(act is None for _, act in steps):
            print("The files are in place; what was not run here remains to be run.")
        else:
            print("The machine is set up; `jupyter-gpu doctor` checks it.")
    return 0


def _undo(options: argparse.Namespace, changes: Changes) -> int:
    record, command, is_here = changes.record, partial(_command, options.root), options.root == _ROOT
    if not record.environment:
        print("Nothing to undo.")
        return 0
    planned = changes.plan({})
    if is_here and not options.remove_state:
        check_no_leases([SYSTEM_SOCKET])
    had_unit, has_unit = record.before.get(str(UNIT)) is not None, changes.read(str(UNIT)) is not None
    steps = [command("systemctl", "disable", "--now", UNIT.name)] if has_unit and not had_unit else []
    steps += [*_files(changes, planned), command("systemctl", "daemon-reload")]
    steps += [command("systemctl", "try-restart", UNIT.name)] if had_unit else []
    steps += [command("groupdel", one.gr_name) for one in grp.getgrall() if one.gr_name in record.made_groups]
    # The environment is the last: this command may run from it.
    trees = [STATE] * options.remove_state + [Path(SYSTEM_SOCKET).parent] * (is_here and not had_unit)
    for tree in (changes.real(str(one)) for one in (*trees, *[Path(record.environment)] * record.made_environment)):
        if tree.exists():
            check_place(tree.parent, options.root)
            steps.append((f"remove {tree}", partial(shutil.rmtree, tree)))
    if _do(options, changes, steps, planned):
        changes.forget()
        kept = changes.real(str(STATE))
        print(f"The machine is as it was{f', and {kept} has the usage records' if kept.exists() else ''}.")
    return 0


def _do(options: argparse.Namespace, changes: Changes, steps: list[Step], planned: Planned) -> bool:
    if not options.dry_run:
        changes.note(planned)
    for text, act in steps:
        reach("setup-machine")
        if act is not None and not options.dry_run:
            with file_errors("changed", text):
                act()
        say(text if options.dry_run else text.partition("\n")[0])
    reach("setup-machine")
    return not options.dry_run


def _command(root: Path, *words: str) -> Step:
    text = " ".join(words)
    if root != _ROOT or (words[0] == "systemctl" and not Path("/run/systemd/system").is_dir()):
        return f"not run here: {text}", None

    def act() -> None:
        try:
            subprocess.run(
                words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "output", b"").decode(errors="replace")[-1000:] or error
            raise CommandError(f"`{text}` failed: {said}; fix that and run this again, or --undo") from None

    return f"run {text}", act


def _files(changes: Changes, planned: Planned) -> Iterator[Step]:
    """Yield a step for each file. The first line of its text names the file, and the others are the difference."""
    for path, (now, new) in planned.items():
        old, fresh = ([] if one is None else one.data.decode(errors="replace").splitlines() for one in (now, new))
        what = "remove" if new is None else "write" if now is None else "replace"
        lines = [f"{what} {changes.real(path)}", *list(difflib.unified_diff(old, fresh, lineterm=""))[2:]]
        yield "\n".join(lines), partial(changes.put, path, new)


def _installing(options: argparse.Namespace, changes: Changes, environment: str) -> Iterator[list[str]]:
    """Yield the commands that make the environment, or bring it to this version."""
    version, wanted = __version__, [requirement("lab,cuda")]
    if options.wheel is not None:
        wheel = options.wheel.absolute()
        wanted = ["--no-index", "--find-links", str(wheel.parent), f"{wheel}[lab,cuda]"]
        if (named := re.fullmatch(r"jupyter_fractional_gpu-([^-]+)-.+\.whl", wheel.name)) is None:
            raise UsageError(f"--wheel {wheel}: not the name of a wheel of jupyter-fractional-gpu")
        version = named[1]
    real, program = changes.real(environment), f"{environment}/bin/python"
    check_place(real / "bin")
    if any(real.glob(f"lib/python3*/site-packages/jupyter_fractional_gpu-{version}.dist-info/RECORD")):
        check_place(changes.real(program).resolve().parent)  # root runs it, too
        return
    if options.environment or (real.exists() and not changes.record.made_environment):
        raise CommandError(f"{environment} has no jupyter-fractional-gpu {version}: install it, or use --environment")
    # Every user can run the system's Python, and only root can change it.
    if (python := max(Path("/usr/bin").glob("python3.1[1-9]"), default=None)) is None:
        raise CommandError("/usr/bin has no Python 3.11 or newer: install it, or use --environment")
    changes.record.made_environment = True
    yield [str(python), "-I", "-m", "venv", environment]
    yield [program, "-I", "-m", "pip", "install", "--quiet", *wanted]


def _configuration(options: argparse.Namespace, changes: Changes) -> tuple[Settings, dict[str, Content]]:
    """Return the broker's settings, and their file if it is ours."""
    path, admins = str(CONFIG), options.admins or "gpu-admin"
    there = changes.read(path)
    try:
        if there is not None and not (options.share or options.pool or options.admins):
            return load(changes.real(path)), {path: there} if path in changes.record.before else {}
        pools = _pools(options)
        settings = Settings({"pools": (pools, "--share and --pool"), "admin_group": (admins, "--admins")})
    except ConfigError as error:
        raise CommandError(str(error)) from None
    return settings, {path: own(_CONFIG.format(admins=admins, pools=pools))}


def _pools(options: argparse.Namespace) -> dict[str, Any]:
    """Return the pools. What the options leave out is proposed from the devices and users, and said."""
    sizes: list[int] = []
    why_none = ""
    try:
        with closing(open_monitor(NVIDIA)) as monitor:
            sizes = [device.memory_mib for device in monitor.devices()]
            why_none = getattr(monitor, "why_none", "")
    except GPUError as error:
        why_none = str(error)
    if not sizes:
        guess = f"note: no GPU was found, so shares and limits are a guess: {why_none}"
        say(f"{guess}; when there is one, undo this and run it again", sys.stderr)
    users = sum(one.pw_uid in _PEOPLE and not one.pw_shell.endswith(("nologin", "false")) for one in pwd.getpwall())
    shares, most = options.share or propose_shares(sizes, users), max(1, len(sizes) // 2)
    found = f"{plural(len(sizes), 'GPU')} and {plural(users, 'user')}"
    say(f"{found}: shares {', '.join(shares)}; one user holds at most {plural(most, 'GPU')} at a time", sys.stderr)
    common = {"fractions": shares, "user_limits": {"resident": most}, "exclusive": True}
    named = dict(map(parse_change, options.pool)) or {"default": {}}
    return {name: {**common, **keys} if isinstance(keys, dict) else keys for name, keys in named.items()}


def propose_shares(sizes: list[int], users: int) -> list[str]:
    """Return the shares to offer of devices of these `sizes` (MiB): down to one for each user at once, if it is of use."""
    usable = [one for one in (16, 8, 4, 2) if not sizes or min(sizes) // one >= _SMALLEST_MIB]
    enough = next((one for one in reversed(usable) if one >= max(users / max(len(sizes), 1), 4)), 16)
    return [*(f"1/{one}" for one in usable if one <= enough), "1"]


def _kernelspecs(settings: Settings, environment: str) -> dict[str, Content]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="jupyter-gpu-") as scratch:
        for pool in settings.pools:
            for spec in install(pool.name, pool.fractions or ANY_OFFERS_MILLI, directory=scratch):
                content = json.loads((spec.folder / "kernel.json").read_text(encoding="utf-8"))
                content["argv"][0] = f"{environment}/bin/python"  # instead of this interpreter
                folder, logo = KERNELS / spec.name, (spec.folder / "logo-svg.svg").read_text(encoding="utf-8")
                found[f"{folder}/logo-svg.svg"] = own(logo)
                found[f"{folder}/kernel.json"] = own(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return found
