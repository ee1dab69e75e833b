"""The doctor's checks of Jupyter: this package's kernelspecs, and idle cullers that would shut down suspended kernels.

To a culler a suspended kernel is an idle one, and it shuts the kernel down: the variables are lost, which suspending is meant to prevent.
Configuration files are read as text and never run, so settings from a program's logic are missed; a finding names file and line.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from jupyter_core.paths import jupyter_config_path

from fractional_gpu.commands.doctor.report import Finding, note, ok, problem, warning
from fractional_gpu.config import Settings
from fractional_gpu.core.units import format_fraction
from fractional_gpu.host.process import PROC, read_command
from fractional_gpu.jupyter.kernel_command import find_interpreter
from fractional_gpu.jupyter.kernelspecs import InstalledSpec, list_installed, plan_of

_INSTALL: Final = "jupyter gpu kernels install"
_IMPORTS: Final = "import fractional_gpu_kernel, fractional_gpu, ipykernel"
_IMPORT_S: Final = 60.0

_TRAITS: Final = ("cull_idle_timeout", "shutdown_no_activity_timeout")
_SET: Final = re.compile(rf"^\s*c\.(\w+)\.({'|'.join(_TRAITS)})\s*=\s*([^#\n]+)")
_FLAG: Final = re.compile(rf"^--(\w+)\.({'|'.join(_TRAITS)})=(.+)$")
_CULLERS: Final = ("jupyterhub_idle_culler", "jupyterhub-idle-culler", "cull_idle_servers")
_CONFIGS: Final = re.compile(r"jupyter_(?:\w+_)?config\.(?:py|json)")
_ADVICE: Final = "set it to 0 where fractional kernels run, and let the pool's idle_after suspend them instead"


def check_kernelspecs(settings: Settings | None, specs: Iterable[InstalledSpec] | None = None) -> Iterator[Finding]:
    """Return findings about the launcher's entries and whether they can start. `specs` stand in for the installed ones in tests."""
    found = list(list_installed() if specs is None else specs)
    if not found:
        yield note("kernelspecs", "none installed: the launcher offers no fractions", _INSTALL)
        return
    wrong = [finding for spec in found for finding in (*_interpreter(spec), *_offer(spec, settings), *_shadowed(spec))]
    wrong += _extension(found)
    yield from wrong
    if not wrong:
        yield ok("kernelspecs", ", ".join(spec.display_name for spec in found))


def _interpreter(spec: InstalledSpec) -> Iterator[Finding]:
    if not spec.argv:
        yield problem("kernelspecs", f"{spec.folder / 'kernel.json'} names no command", f"{_INSTALL} writes it again")
    elif find_interpreter(spec.argv[0], os.environ) is None:
        gone = f"{spec.name} starts {spec.argv[0]}, which is not there or cannot be run"
        yield problem("kernelspecs", gone, f"{_INSTALL} for another base, or jupyter gpu kernels remove {spec.name}")


def _offer(spec: InstalledSpec, settings: Settings | None) -> Iterator[Finding]:
    if settings is None or spec.simulated:
        return
    pools = {pool.name: pool for pool in settings.pools}
    if spec.pool not in pools:
        there = ", ".join(pools)
        yield warning(
            "kernelspecs", f"{spec.name} is for pool {spec.pool!r}, which is not configured (pools: {there})", _INSTALL
        )
        return
    offered = pools[spec.pool].fractions
    if offered and spec.fraction_milli not in offered:
        names = ", ".join(format_fraction(one) for one in offered)
        refused = f"{spec.name} asks for {format_fraction(spec.fraction_milli)}, and its pool offers {names}"
        yield warning("kernelspecs", refused, f"{_INSTALL}, and jupyter gpu kernels remove {spec.name}")


def _shadowed(spec: InstalledSpec) -> Iterator[Finding]:
    if spec.shadowed_by is not None:
        hidden = f"{spec.folder} is not shown: {spec.shadowed_by} has the same name and is found first"
        yield warning(
            "kernelspecs", hidden, f"remove one of the two, or install one under another name: {_INSTALL} --name"
        )


def _extension(specs: Iterable[InstalledSpec]) -> list[Finding]:
    """Check once for each command that its interpreter can import the packages that its kernels need."""
    by_command: dict[tuple[str, ...], InstalledSpec] = {}
    for spec in specs:
        if spec.command and find_interpreter(spec.command[0], os.environ):
            by_command.setdefault(spec.command, spec)
    return [finding for spec in by_command.values() for finding in _check_imports(spec)]


def _check_imports(spec: InstalledSpec) -> Iterator[Finding]:
    failure = _import_failure(spec.command[0]) if spec.gated else ""
    if failure:
        yield problem(
            "kernelspecs",
            f"{spec.name}: {spec.command[0]} cannot import what its kernels need: {failure}",
            f"install jupyter-fractional-gpu and ipykernel there, or {_INSTALL} for another base",
        )
    elif obstacle := plan_of(spec).obstacle:
        yield warning("kernelspecs", f"{spec.name}: {obstacle}", "do what the finding says")


def _import_failure(python: str) -> str:
    command = [find_interpreter(python, os.environ) or python, "-P", "-c", _IMPORTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def check_cullers(
    *, environment: Mapping[str, str] = os.environ, folders: Iterable[str] | None = None, proc: Path = PROC
) -> Iterator[Finding]:
    """Return findings about idle cullers of servers and hubs. `folders` stand in for Jupyter's configuration path in tests."""
    everywhere = jupyter_config_path() if folders is None else folders
    where = [Path(folder) for folder in everywhere if os.path.isdir(folder)]  # noqa: PTH112 - False without access
    found = [*_configured(where), *_running(proc)]
    for place, value in found:
        yield warning(
            "cullers", f"{place} is {value}: idle kernels are shut down, suspended ones too, variables and all", _ADVICE
        )
    if "JUPYTERHUB_SERVICE_PREFIX" in environment:
        yield note(
            "cullers",
            "this is a JupyterHub user's server: the hub's own culler cannot be seen from here",
            "ask its administrator whether idle servers are culled, and after how long",
        )
    elif not found:
        yield ok("cullers", "none is configured where this user's servers look")


def _configured(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for file in sorted([*folder.glob("jupyter*config*"), *folder.glob("jupyter*config.d/*.json")]):
            if not (_CONFIGS.fullmatch(file.name) or file.parent.suffix == ".d"):
                continue
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:  # a folder of that name, or not readable, as for this user's servers
                continue
            yield from _in_json(file, text) if file.suffix == ".json" else _in_program(file, text)


def _in_program(file: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        found = _SET.match(line)
        if found and not _is_off(found[3]):
            yield f"{file}, line {number}: c.{found[1]}.{found[2]}", found[3].strip()


def _in_json(file: Path, text: str) -> Iterator[tuple[str, str]]:
    try:
        content = json.loads(text)
    except ValueError:
        return
    sections: dict[str, Any] = content if isinstance(content, dict) else {}
    for section, settings in sections.items():
        for trait in _TRAITS if isinstance(settings, dict) else ():
            if not _is_off(str(settings.get(trait, 0))):
                yield f"{file}: {section}.{trait}", str(settings[trait])


def _running(proc: Path) -> Iterator[tuple[str, str]]:
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = read_command(int(folder.name), proc=proc)
        except OSError:  # it ended, or is hidden from this user
            continue
        for word in words:
            flag = _FLAG.match(word)
            if flag and not _is_off(flag[3]):
                yield f"process {folder.name}: {flag[1]}.{flag[2]}", flag[3]
        # The program itself or the module that Python runs, not a mention in some argument.
        if any(Path(word).name in _CULLERS for word in words[:4]):
            yield f"process {folder.name}", "an idle culler of a hub"


def _is_off(value: str) -> bool:
    try:
        return float(value.strip()) <= 0
    except ValueError:
        return False  # an expression: it may be anything
