"""`jupyter gpu setup-machine` sets up one broker, one environment and one set of kernels for all users of a workstation.

It checks and plans everything before changing anything, and records each file's digest before writing the file. If the command is killed at
any point, the next run or `--undo` can therefore finish the job. A file with different content is assumed to be someone else's, and is
neither replaced nor removed.
"""

import argparse
import grp
import hashlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from fractional_gpu import __version__
from fractional_gpu.client.discovery import SYSTEM_SOCKET
from fractional_gpu.commands.kernels import ANY_OFFERS_MILLI
from fractional_gpu.commands.pool import parse_change
from fractional_gpu.commands.terminal.arguments import FRACTIONS, Parser
from fractional_gpu.commands.terminal.text import CommandError, file_errors, say
from fractional_gpu.commands.uninstall import check_no_leases, end_broker
from fractional_gpu.config import ConfigError, Settings, load
from fractional_gpu.config.service import CONFIG, KERNELS, PROGRAM, RECORD, STATE, UNIT, requirement, service_files
from fractional_gpu.core.units import plural
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.gpu.open import NVIDIA, open_monitor
from fractional_gpu.host.files import foreign_above, replace_file
from fractional_gpu.jupyter.kernelspecs import install

_ROOT: Final = Path("/")
_ENVIRONMENT: Final = Path("/opt/jupyter-fractional-gpu")
_MODEL_MIB: Final = 4096  # in MiB; few models fit into less
_CONFIG: Final = """\
# Written by `jupyter gpu setup-machine`. `jupyter gpu broker --generate-config` explains every key.
# `exclusive`: if the driver enforces memory limits, a user's kernels and other programs together can use no more than the kernels hold.
c.GPUBroker.admin_group = {admins!r}
c.GPUBroker.pools = {pools!r}
"""
EPILOG = """\
examples:
  sudo jupyter gpu setup-machine --dry-run
  sudo jupyter gpu setup-machine --share 1/4 --share 1/2
  sudo jupyter gpu setup-machine --pool 'big={"devices": [0]}' --pool 'default={"idle_after": "5m"}'
  sudo jupyter gpu setup-machine --undo

Running this again changes nothing, or completes an unfinished run. Without --share, --pool and --admins, an existing configuration is kept.
"""


def configure(parser: Parser) -> None:
    parser.describe("Set up a workstation that several people share: broker, environment, pools, kernels.", EPILOG)
    parser.flag("--dry-run", "print every file and command without changing anything")
    parser.flag("--undo", "remove what this command created; usage records and files that you changed are kept")
    text = "a share to offer (repeatable; default: depends on the GPUs' memory)"
    parser.argument("--share", "FRACTION", text, by=FRACTIONS, action="append", default=[])
    text = "a pool and its keys as JSON (repeatable; default: default={})"
    parser.argument("--pool", "NAME={...}", text, action="append", default=[])
    parser.argument("--admins", "GROUP", "the administrators' group, created if missing (default: gpu-admin)")
    parser.argument("--root", "DIR", "set up an image in this folder; no commands are run", type=Path, default=_ROOT)


def run(options: argparse.Namespace) -> int:
    os.umask(0o022)
    if os.geteuid() != 0 and options.root == _ROOT:
        raise CommandError("only root can set up a machine: use sudo")
    with file_errors("changed", options.root):
        return (_undo if options.undo else _set_up)(options, Machine(options.root.absolute()))


Step = tuple[str, Callable[[], object] | None]  # a description, and a function or None if it cannot be done here


class Record(msgspec.Struct):
    files: dict[str, set[str]] = {}  # the files that we wrote, with the digests of their contents
    folders: list[str] = []  # the folders that we created, the outer ones first
    groups: set[str] = set()  # the groups that we created
    made_environment: bool = False
    is_unfinished: bool = False


class Machine:
    """The files and commands of the machine whose root folder is `root`. Paths are given without this folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.is_here = root, root == _ROOT
        if not (etc := self.real(RECORD).parent).is_dir():
            raise CommandError(f"{etc} is missing: create it, or give the root folder of an image with --root")
        saved = self.read(RECORD)
        try:
            self.record = Record() if saved is None else msgspec.json.decode(saved, type=Record)
        except msgspec.DecodeError as error:
            advice = "restore it, or remove it and everything that setup-machine created"
            raise CommandError(f"{self.real(RECORD)} is damaged ({error}): {advice}") from None

    def real(self, path: Path) -> Path:
        return self.root / path.relative_to(_ROOT)

    def check_place(self, path: Path) -> None:
        """Raise CommandError if the path leads outside the root, or if an ordinary user could replace it."""
        real = self.real(path)
        if not Path(os.path.realpath(real.parent)).is_relative_to(os.path.realpath(self.root)):
            raise CommandError(f"{real.parent} leads outside {self.root}: remove that link")
        if foreign := foreign_above(real):
            raise CommandError(f"{foreign[0]} belongs to another user (uid {foreign[1]}), who could replace {real}")
        for folder in filter(Path.exists, real.parents):
            if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                raise CommandError(
                    f"every user can write to {folder} and could replace {real}: run `chmod o-w {folder}`"
                )

    def read(self, path: Path) -> bytes | None:
        self.check_place(path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(FileNotFoundError), os.fdopen(os.open(self.real(path), flags), "rb") as file:
            return file.read()
        return None

    def write(self, path: Path, content: bytes) -> None:
        self.record.files.setdefault(str(path), set()).add(_digest(content))
        self.record.folders += [str(one) for one in reversed(path.parents) if not self.real(one).exists()]
        self.save()
        self.real(path).parent.mkdir(parents=True, exist_ok=True)
        mode = 0o755 if path == PROGRAM else 0o644
        replace_file(self.real(path), content, prepare=lambda file: os.fchmod(file, mode))

    def save(self) -> None:
        replace_file(self.real(RECORD), msgspec.json.encode(self.record, order="deterministic"))

    def plan(self, wanted: Mapping[Path, bytes]) -> tuple[list[Step], list[Path]]:
        """Return the steps that write the `wanted` files and remove our other files, and a list of files whose content we did not write."""
        steps: list[Step] = []
        strange = []
        for path, content in {**dict.fromkeys(map(Path, self.record.files)), **wanted}.items():
            now, real = self.read(path), self.real(path)
            if now == content:
                continue
            if now is not None and _digest(now) not in self.record.files.get(str(path), ()):
                strange.append(real)
            elif content is None:
                steps.append((f"remove {real}", real.unlink))
            else:
                steps.append((f"write {real}\n{content.decode()}", partial(self.write, path, content)))
        return steps, strange

    def has_group(self, name: str) -> bool:
        return self.is_here and name in [one.gr_name for one in grp.getgrall()]

    def command(self, *words: str) -> Step:
        text = shlex.join(words)
        if not self.is_here or (words[0] == "systemctl" and not Path("/run/systemd/system").is_dir()):
            return f"not run here: {text}", None
        return f"run {text}", partial(_run, words)

    def do(self, steps: list[Step], *, dry: bool) -> bool:
        """Carry out the steps, or just print them. Record each change before making it. Return whether all steps were carried out."""
        if not dry:
            self.save()
        for text, act in steps:
            say(text if dry else text.partition("\n")[0], flush=True)
            if act is not None and not dry:
                act()
        return not dry and all(act is not None for _, act in steps)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _run(words: tuple[str, ...]) -> None:
    try:
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CommandError(f"{error}; fix that and run this again, or use --undo") from None


def _set_up(options: argparse.Namespace, machine: Machine) -> int:
    record = machine.record
    steps = [machine.command(*words) for words in _installing(machine)]
    settings, wanted = _configuration(options, machine)
    wanted |= {path: text.encode() for path, text in service_files(str(_ENVIRONMENT)).items()}
    wanted |= _kernelspecs(settings)
    files, strange = machine.plan(wanted)
    if strange:
        raise CommandError(
            f"nothing was changed; first move away what this command did not write: {', '.join(map(str, strange))}"
        )
    if (group := settings.admin_group) and not machine.has_group(group):
        steps.append(machine.command("groupadd", "--system", group))
        record.groups.add(group)
    steps += files
    if not steps and not record.is_unfinished:
        print("Nothing to change: the machine is set up.")
        return 0
    for words in (["daemon-reload"], ["enable", UNIT.name], ["restart", UNIT.name]):
        steps.append(machine.command("systemctl", *words))
    record.is_unfinished = True
    if machine.do(steps, dry=options.dry_run):
        record.is_unfinished = False
        machine.save()
        print("The machine is set up; `jupyter-gpu doctor` checks it.")
    elif not options.dry_run:
        print("The files are in place. On the machine itself, run the commands that were not run here.")
    return 0


def _undo(options: argparse.Namespace, machine: Machine) -> int:
    record = machine.record
    if record == Record():
        print("Nothing to undo.")
        return 0
    files, strange = machine.plan({})
    steps = [machine.command("systemctl", "disable", "--now", UNIT.name)] if machine.read(UNIT) is not None else []
    if machine.is_here:
        check_no_leases([SYSTEM_SOCKET])
        steps.append(("end the broker", partial(end_broker, SYSTEM_SOCKET)))  # if systemd has not done so
    steps += [*files, machine.command("systemctl", "daemon-reload")]
    steps += [machine.command("groupdel", group) for group in sorted(record.groups) if machine.has_group(group)]
    # The environment is removed last, because this command may run from it.
    for tree in [Path(SYSTEM_SOCKET).parent] * machine.is_here + [_ENVIRONMENT] * record.made_environment:
        if machine.real(tree).exists():
            machine.check_place(tree)
            steps.append((f"remove {machine.real(tree)}", partial(shutil.rmtree, machine.real(tree))))
    machine.do(steps, dry=options.dry_run)
    if not options.dry_run:
        for folder in reversed(record.folders):
            with suppress(OSError):  # someone else put a file there
                machine.real(Path(folder)).rmdir()
        machine.real(RECORD).unlink()
        kept = ", ".join(str(one) for one in [*strange, machine.real(STATE)] if one.exists())
        print(f"Undone. These stay until you remove them: {kept}" if kept else "The machine is as it was.")
    return 0


def _installing(machine: Machine) -> Iterator[list[str]]:
    """Yield the commands that create the environment, or update it to this version."""
    real, program = machine.real(_ENVIRONMENT), _ENVIRONMENT / "bin" / "python"
    for one in (program, program.with_name("jupyter-gpu")):  # root runs both, and the first may be a link
        machine.check_place(one)
    if any(real.glob(f"lib/python3*/site-packages/jupyter_fractional_gpu-{__version__}.dist-info/RECORD")):
        return
    if real.exists() and not machine.record.made_environment:
        raise CommandError(f"{real} has no jupyter-fractional-gpu {__version__}: install it, or move the folder away")
    # All users can run the system's Python, but only root can change it.
    if (python := max(Path("/usr/bin").glob("python3.1[1-9]"), default=None)) is None:
        raise CommandError("/usr/bin has no Python 3.11 or newer: install one")
    machine.record.made_environment = True
    yield [str(python), "-I", "-m", "venv", str(_ENVIRONMENT)]
    yield [str(program), "-I", "-m", "pip", "install", "--quiet", requirement("lab,cuda")]


def _configuration(options: argparse.Namespace, machine: Machine) -> tuple[Settings, dict[Path, bytes]]:
    """Return the broker's settings and, if their file is ours, its path and content."""
    there, admins = machine.read(CONFIG), options.admins or "gpu-admin"
    try:
        if there is not None and not (options.share or options.pool or options.admins):
            return load(machine.real(CONFIG)), {CONFIG: there} if str(CONFIG) in machine.record.files else {}
        pools = _pools(options)
        settings = Settings({"pools": (pools, "--share and --pool"), "admin_group": (admins, "--admins")})
    except ConfigError as error:
        raise CommandError(str(error)) from None
    return settings, {CONFIG: _CONFIG.format(admins=admins, pools=pools).encode()}


def _pools(options: argparse.Namespace) -> dict[str, Any]:
    """Return the pools. Shares and limits not set by the options are derived from the devices and printed."""
    sizes: list[int] = []
    with suppress(GPUError), closing(open_monitor(NVIDIA)) as monitor:
        sizes = [device.memory_mib for device in monitor.devices()]
    guess = "; this is a guess: once there is a GPU (`jupyter-gpu doctor` says why there is none), undo this and run it again"
    shares, most = options.share or propose_shares(sizes), max(1, len(sizes) // 2)
    said = f"shares {', '.join(shares)}; each user can hold at most {plural(most, 'GPU')} at a time"
    say(f"{plural(len(sizes), 'GPU')}: {said}{'' if sizes else guess}", sys.stderr)
    common = {"fractions": shares, "user_limits": {"resident": most}, "exclusive": True}
    named = dict(map(parse_change, options.pool)) or {"default": {}}
    return {name: {**common, **keys} if isinstance(keys, dict) else keys for name, keys in named.items()}


def propose_shares(sizes: list[int]) -> list[str]:
    """Return the shares that have room for a typical model on the smallest device (sizes in MiB). A whole device is always included."""
    models = min(sizes, default=4 * _MODEL_MIB) // _MODEL_MIB
    return [*(f"1/{one}" for one in (8, 4, 2) if one <= models), "1"]


def _kernelspecs(settings: Settings) -> dict[Path, bytes]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="jupyter-gpu-") as scratch:
        for pool in settings.pools:
            for spec in install(pool.name, pool.fractions or ANY_OFFERS_MILLI, directory=scratch):
                own, theirs = (
                    json.dumps(one, ensure_ascii=False).encode() for one in (spec.argv[0], f"{_ENVIRONMENT}/bin/python")
                )
                for file in spec.folder.iterdir():
                    found[KERNELS / spec.name / file.name] = file.read_bytes().replace(own, theirs)
    return found
