"""Checks versions, configuration, simulated devices, the broker, its ledger, kernelspecs and idle cullers.

The checks never start a broker, and they open the ledger read-only and without locking it. They read Jupyter's configuration files as text
and never run them, so they miss computed settings; each finding therefore names the file and the line. Idle cullers are checked because
they mistake a suspended kernel for an idle one and shut it down, and its variables are then lost.
"""

import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

from jupyter_core.paths import jupyter_config_path

from fractional_gpu import __version__
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.http import is_service_socket
from fractional_gpu.client.state_folder import LEDGER_NAMES, filesystem_type, is_network, node_name, state_folder
from fractional_gpu.commands.doctor.report import Finding, installed_version, note, ok, problem, warning
from fractional_gpu.commands.terminal.connection import broker_if_running
from fractional_gpu.config import ConfigError, Settings, load
from fractional_gpu.config.service import PARTS, RECORD
from fractional_gpu.core.forecasts.outcomes import ForecastError
from fractional_gpu.core.units import format_fraction, format_memory, plural
from fractional_gpu.gpu.simulated.host import parse_devices
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from fractional_gpu.host.process import PROC, read_command
from fractional_gpu.jupyter.kernel_command import find_interpreter
from fractional_gpu.jupyter.kernelspecs import InstalledSpec, list_installed, plan_of
from fractional_gpu.ledger.opening import live_leases
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.errors import FractionalGPUError

_PACKAGES: Final = ("jupyter_client", "ipykernel", "jupyterlab", "jupyterhub", "nvidia-ml-py", "cuda-bindings")
_LOAD: Final = "no GPU kernel can start"


def check_versions() -> Iterator[Finding]:
    found = [f"jupyter-fractional-gpu {__version__}", f"Python {platform.python_version()}"]
    found += [f"{name} {version}" for name in _PACKAGES if (version := installed_version(name))]
    yield ok("versions", ", ".join(found))
    names = {entry.name for entry in metadata.entry_points(group="jupyter_client.kernel_provisioners")}
    if "fractional-gpu-provisioner" not in names:
        yield problem(
            "provisioner",
            f"Jupyter does not find the kernel provisioner in this environment: {_LOAD}",
            "install jupyter-fractional-gpu with pip in the environment of the Jupyter server",
        )


def check_simulation(simulate: str | None) -> Iterator[Finding]:
    if not simulate:
        return
    try:
        sizes = parse_devices(simulate)
    except SimulatedHostError as error:
        yield problem("simulated", f"JUPYTER_GPU_SIMULATE: {error}", "correct it, or unset it")
        return
    devices = ", ".join(format_memory(mib) for mib in sizes)
    yield note("simulated", f"JUPYTER_GPU_SIMULATE={simulate}: brokers started here have simulated devices ({devices})")


def check_settings() -> tuple[Settings | None, list[Finding]]:
    try:
        settings = load()
    except ConfigError as error:
        return None, [problem("configuration", str(error), "fix it: until then, no broker can start")]
    files = ", ".join(str(file) for file in settings.files) or "no jupyter_gpu_config.py: every setting has its default"
    return settings, [ok("configuration", f"{files}; pools: {', '.join(pool.name for pool in settings.pools)}")]


def check_workstation(settings: Settings | None) -> Iterator[Finding]:
    """Check what `jupyter gpu setup-machine` created, if it was run on this machine."""
    if not RECORD.exists():
        return
    wrong = [f"{path} is missing, or you cannot read it" for path in PARTS if not os.access(path, os.R_OK)]
    try:
        _ = settings and settings.admin_gid()
    except ConfigError as error:
        wrong.append(str(error))
    advice = "an administrator can repair it: sudo jupyter-gpu setup-machine"
    yield from (problem("workstation", one, advice) for one in wrong)
    if not wrong:
        yield ok("workstation", "`jupyter gpu setup-machine` has set up the service, pools and kernels for all users")


_LIMITS: Final = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_DATA", "RLIMIT_FSIZE")
_LEAST_FORECASTS: Final = 64
_FAR_PERMILLE: Final = 150  # three standard errors of 64 outcomes


def check_broker(socket: str | None) -> tuple[str | None, list[Finding]]:
    try:
        path = socket or socket_path()
        client = broker_if_running(path)
    except FractionalGPUError as error:
        return socket, [problem("broker", str(error), "fix that first: without a broker, no GPU kernel can start")]
    findings = list(_check_place(path))
    if client is not None:
        try:
            with client:
                findings += _check_answers(client, path)
        except FractionalGPUError as error:
            failed = f"the broker on {path} failed: {error}"
            findings.append(problem("broker", failed, "see broker.log next to its socket"))
    elif is_service_socket(path):
        stopped = f"the system service on {path} is not running: no kernel can start"
        start = "an administrator must start it: sudo systemctl enable --now jupyter-gpu"
        findings.append(problem("broker", stopped, start))
    else:
        findings.append(note("broker", f"none is running on {path}: the first kernel that wants a GPU starts one"))
    return path, findings


def _check_place(path: str) -> Iterator[Finding]:
    folder = Path(path).parent
    if is_network(folder) and node_name() not in folder.name:
        yield warning(
            "broker",
            f"the socket {path} is on a network filesystem ({filesystem_type(folder)}): a broker on another host that shares it would "
            "replace it with its own socket",
            "set JUPYTER_GPU_SOCKET to a path on a local disk, or unset it: then each host has a separate folder",
        )


def _check_answers(client: BrokerClient, path: str) -> Iterator[Finding]:
    pong = client.ping()
    status = client.status()
    what = f"process {pong.pid}, version {pong.version}, runs on {path} with {plural(len(status.leases), 'lease')} of yours"
    if pong.simulated:
        yield note("broker", f"{what}; its devices are simulated")
    elif pong.version != __version__:
        yield warning("broker", what, f"restart it to get version {__version__}; kernels keep running")
    else:
        yield ok("broker", what)
    yield from inherited_findings(pong.pid)
    for lease in status.leases:
        if lease.state == "quarantined":
            yield warning(
                "broker", f"lease {lease.lease_id}: {lease.sentence}", "the broker will check it again; see broker.log"
            )
    for device in status.devices:
        if device.lost or device.over_committed:
            wrong = "is not responding" if device.lost else "is over-committed"
            yield warning(
                "broker",
                f"device {device.index} {wrong} and accepts no kernels",
                "`jupyter gpu status` shows which processes hold its memory",
            )
    yield from forecast_findings(status.forecasts)
    for why_not in dict.fromkeys(device.why_not for device in status.devices if device.why_not):
        which = ", ".join(str(device.index) for device in status.devices if device.why_not == why_not)
        yield warning(
            "broker",
            f"kernels on device {which} cannot be suspended now: {why_not}",
            "they stay on it; unless the reason says when the broker tries again, fix it and restart the broker (kernels keep running)",
        )


def inherited_findings(pid: int) -> Iterator[Finding]:
    kept = []
    with suppress(PermissionError, ProcessLookupError):  # the administrator chooses the limits of a service
        if (niceness := os.getpriority(os.PRIO_PROCESS, pid)) > 0:
            kept.append(f"niceness {niceness}")
        kept += [f"a hard {name}" for name in _LIMITS if resource.prlimit(pid, getattr(resource, name))[1] >= 0]
    if kept:
        yield warning(
            "broker",
            f"the broker inherited {' and '.join(kept)} from the program that started it; this slows down every kernel's waits and swaps",
            "run `jupyter gpu broker --restart` in a shell without them; kernels keep running",
        )


def forecast_findings(errors: Iterable[ForecastError]) -> Iterator[Finding]:
    """Check how often outcomes were within the forecast bounds. Skip kinds of forecasts with fewer than `_LEAST_FORECASTS` outcomes."""
    known = [one for one in errors if one.count >= _LEAST_FORECASTS]
    for one in known:
        off = one.covered_permille - one.stated_permille
        said = f"{one.covered_permille // 10} % of the last {min(one.count, 256)} outcomes were within the bounds of {one.what} forecasts"
        promised = f"the bounds promise {one.stated_permille // 10} %"
        if off < -_FAR_PERMILLE:
            yield warning(
                "forecasts",
                f"{said}; {promised}",
                "treat those bounds as too narrow; they widen automatically with each miss",
            )
        elif off > _FAR_PERMILLE:
            yield note("forecasts", f"{said}; {promised}: they are wider than needed, and narrow automatically")
    if known and all(abs(one.covered_permille - one.stated_permille) <= _FAR_PERMILLE for one in known):
        shown = ", ".join(f"{one.what} {one.covered_permille // 10} %" for one in known)
        yield ok(
            "forecasts",
            f"the bounds hold about as often as they should ({known[0].stated_permille // 10} %): {shown}",
        )


def check_ledgers(socket: str, settings: Settings | None) -> Iterator[Finding]:
    configured = settings.state_dir if settings is not None else None
    folder = state_folder(socket, configured)
    files = [file for file in (folder / name for name in LEDGER_NAMES) if file.exists()]
    yield from map(_ledger, files)
    if not files:
        yield note("ledger", f"none in {folder}: the first broker creates it")
    if is_network(folder):
        yield warning(
            "ledger",
            f"{folder} is on a network filesystem ({filesystem_type(folder)}), where SQLite's write-ahead log is not safe",
            "set c.GPUBroker.state_dir to a folder on a local disk",
        )


def _ledger(file: Path) -> Finding:
    try:
        leases = live_leases(file)
    except LedgerError as error:
        wrong, _, remedy = str(error).partition("; ")
        return problem("ledger", wrong, remedy)
    return ok("ledger", f"{file} is intact, with {plural(leases, 'live lease')}")


_INSTALL: Final = "jupyter gpu kernels install"
_IMPORTS: Final = "import fractional_gpu_kernel, fractional_gpu, ipykernel"
_IMPORT_S: Final = 60.0

_TRAITS: Final = ("cull_idle_timeout", "shutdown_no_activity_timeout")
_NAMED: Final = f"({'|'.join(_TRAITS)})"
_SET: Final = re.compile(rf'^\s*c\.\w+\.{_NAMED}\s*=\s*([^#\n]+)|"{_NAMED}":\s*([^,}}]+)')
_FLAG: Final = re.compile(rf"^--(\w+)\.{_NAMED}=(.+)$")
_CULLERS: Final = ("jupyterhub_idle_culler", "jupyterhub-idle-culler", "cull_idle_servers")
_CONFIGS: Final = re.compile(r"jupyter_(?:\w+_)?config\.(?:py|json)")
_ADVICE: Final = "set it to 0 for fractional kernels, or set c.GPUBroker.cull_idle_after: idle cullers then spare kernels with GPU state"


def check_kernelspecs(settings: Settings | None, specs: Iterable[InstalledSpec] | None = None) -> Iterator[Finding]:
    found = list(list_installed() if specs is None else specs)
    if not found:
        yield note("kernelspecs", "none installed, so the launcher offers no fractions", _INSTALL)
        return
    wrong = [finding for spec in found for finding in _check_spec(spec, settings)]
    by_command: dict[tuple[str, ...], InstalledSpec] = {}  # the imports of each command are tried only once
    for spec in found:
        if spec.command and find_interpreter(spec.command[0], os.environ):
            by_command.setdefault(spec.command, spec)
    wrong += [finding for spec in by_command.values() for finding in _check_imports(spec)]
    yield from wrong
    if not wrong:
        yield ok("kernelspecs", ", ".join(spec.display_name for spec in found))


def _check_spec(spec: InstalledSpec, settings: Settings | None) -> Iterator[Finding]:
    if not spec.argv:
        yield problem(
            "kernelspecs", f"{spec.folder / 'kernel.json'} does not name a command", f"run {_INSTALL} to write it again"
        )
    elif find_interpreter(spec.argv[0], os.environ) is None:
        gone = f"{spec.name} starts {spec.argv[0]}, which is missing or not executable"
        yield problem("kernelspecs", gone, f"{_INSTALL} for another base, or jupyter gpu kernels remove {spec.name}")
    yield from _offer(spec, settings)
    if spec.shadowed_by is not None:
        hidden = f"Jupyter does not show {spec.folder}: {spec.shadowed_by} comes first and has the same name"
        advice = f"remove one of them, or install one under another name: {_INSTALL} --name"
        yield warning("kernelspecs", hidden, advice)


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
        refused = f"{spec.name} asks for {format_fraction(spec.fraction_milli)}, but its pool only offers {names}"
        yield warning("kernelspecs", refused, f"{_INSTALL}, and jupyter gpu kernels remove {spec.name}")


def _check_imports(spec: InstalledSpec) -> Iterator[Finding]:
    failure = _import_failure(spec.command[0]) if spec.gated else ""
    if failure:
        yield problem(
            "kernelspecs",
            f"{spec.name}: {spec.command[0]} cannot import what its kernels need: {failure}",
            f"install jupyter-fractional-gpu and ipykernel there, or {_INSTALL} for another base",
        )
    elif obstacle := plan_of(spec).obstacle:
        yield warning("kernelspecs", f"{spec.name}: {obstacle}", "follow the steps in this message")


def _import_failure(python: str) -> str:
    command = [find_interpreter(python, os.environ) or python, "-P", "-c", _IMPORTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def check_cullers(
    settings: Settings | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    folders: Iterable[str] | None = None,
    proc: Path = PROC,
) -> Iterator[Finding]:
    if settings is not None and settings.culls_idle:
        yield ok(
            "cullers", "they spare kernels that hold GPU state; the broker ends those (cull_idle_after, cull_above)"
        )
        return
    everywhere = jupyter_config_path() if folders is None else folders
    where = [Path(folder) for folder in everywhere if os.path.isdir(folder)]  # noqa: PTH112 - False without access
    found = [*_configured(where), *_running(proc)]
    for place, value in found:
        yield warning(
            "cullers",
            f"{place} is {value}: idle kernels are shut down with all their variables, even suspended ones",
            _ADVICE,
        )
    if "JUPYTERHUB_SERVICE_PREFIX" in environment:
        yield note(
            "cullers",
            "this is a JupyterHub user's server, which cannot see the hub's own culler",
            "ask the hub's administrator whether and when it culls idle servers",
        )
    elif not found:
        yield ok("cullers", "none is configured for this user's servers")


def _configured(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for file in sorted([*folder.glob("jupyter*config*"), *folder.glob("jupyter*config.d/*.json")]):
            if not (_CONFIGS.fullmatch(file.name) or file.parent.suffix == ".d"):
                continue
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:  # a folder, or a file that this user's servers cannot read, either
                continue
            for number, line in enumerate(text.splitlines(), start=1):
                if found := _SET.search(line):
                    trait, value = (one for one in found.groups() if one is not None)
                    if not _is_off(value):
                        yield f"{file}, line {number}: {trait}", value.strip()


def _running(proc: Path) -> Iterator[tuple[str, str]]:
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = read_command(int(folder.name), proc=proc)
        except OSError:  # the process ended, or is hidden from this user
            continue
        for word in words:
            flag = _FLAG.match(word)
            if flag and not _is_off(flag[3]):
                yield f"process {folder.name}: {flag[1]}.{flag[2]}", flag[3]
        # Look at the program itself or the module that Python runs, not at an argument that mentions a culler.
        if any(Path(word).name in _CULLERS for word in words[:4]):
            yield f"process {folder.name}", "an idle culler of a hub"


def _is_off(value: str) -> bool:
    try:
        return float(value.strip()) <= 0
    except ValueError:
        return False  # it is an expression, which may have any value
