"""Formats the doctor's report as text, as JSON and as a support bundle.

Check names are stable, because scripts filter by them. The bundle contains no configuration files, ledger, token files or notebooks. User
names, the home folder and possible secrets are removed from its text.
"""

import getpass
import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.commands.terminal.connection import broker_if_running
from fractional_gpu.commands.terminal.text import CommandError, Piece, Style, fitted, line, table
from fractional_gpu.core.units import plural
from fractional_gpu.protocol.errors import FractionalGPUError

if TYPE_CHECKING:
    from rich.text import Text

_LEAST_CELLS = (7, 14)  # characters of the severity, and of the names of most checks
_MOST_READABLE = 118  # characters per line, even on a wider terminal
_LAST_BYTES = 1_000_000  # bytes of each log
_PACKAGES = (
    "jupyter-fractional-gpu",
    "jupyter_client",
    "jupyter_server",
    "jupyterlab",
    "jupyterhub",
    "ipykernel",
    "tornado",
    "pyzmq",
    "traitlets",
    "msgspec",
    "rich",
    "nvidia-ml-py",
    "cuda-bindings",
    "torch",
)
_SECRET = re.compile(r"(?<![\w-])[\w-]{40,}|(?<=Bearer )\S+|(?<=token=)\S+")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # normal, but worth knowing
    WARNING = "warning"  # it works, but something is missing
    ERROR = "error"  # something that this project promises cannot work


_STYLES = {
    Severity.OK: Style.GOOD,
    Severity.NOTE: "",
    Severity.WARNING: Style.ATTENTION,
    Severity.ERROR: Style.WRONG,
}


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    finding: str
    advice: str = ""
    severity: Severity = Severity.OK


ok = Finding
note = partial(Finding, severity=Severity.NOTE)
warning = partial(Finding, severity=Severity.WARNING)
problem = partial(Finding, severity=Severity.ERROR)


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def as_json(findings: Sequence[Finding], next_step: str = "") -> str:
    order = list(Severity)
    worst = max((finding.severity for finding in findings), key=order.index, default=Severity.OK)
    listed = [asdict(finding) for finding in findings]
    content = {"ok": not exit_code(findings), "worst": worst, "findings": listed, "next": next_step}
    return json.dumps(content, ensure_ascii=False) + "\n"


def render(findings: Sequence[Finding], next_step: str = "", width: int | None = None) -> "list[Text]":
    counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    if counts[Severity.ERROR]:
        conclusion = f"{plural(counts[Severity.ERROR], 'error')}, {plural(counts[Severity.WARNING], 'warning')}."
    elif counts[Severity.WARNING]:
        conclusion = f"No errors, {plural(counts[Severity.WARNING], 'warning')}."
    else:
        conclusion = "No problems found."
    room = None if width is None else min(width, _MOST_READABLE)
    end = fitted([line(("Next:", Style.HEADING), f" {next_step}")], room) if next_step else []
    rows: list[tuple[Piece, str, str]] = []
    for one in findings:
        rows.append(((str(one.severity), _STYLES[one.severity]), one.check, one.finding))
        if one.advice:
            rows.append(("", "", f"-> {one.advice}"))
    return [*table((), rows, indent="", width=room, least=_LEAST_CELLS), line(), line(conclusion), *end]


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def clean(text: str) -> str:
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    user = getpass.getuser()
    if user != "root":
        text = re.sub(rf"\b{re.escape(user)}\b", "USER", text)
    return _SECRET.sub("[removed]", _DIGEST.sub("[digest]", text))


def write_bundle(path: Path, findings: Sequence[Finding], socket: str | None) -> list[str]:
    versions = {"python": platform.python_version(), "system": platform.platform()}
    versions |= {name: installed_version(name) or "not installed" for name in _PACKAGES}
    files = {
        "doctor.json": as_json(findings),
        "versions.json": json.dumps(versions, indent=1),
        "status.json": _status(socket),
        **_logs(socket or socket_path()),
    }
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in files.items():
                content = clean(text).encode()
                entry = tarfile.TarInfo(f"jupyter-gpu-bundle/{name}")
                entry.size, entry.mode = len(content), 0o600
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise CommandError(f"cannot write the bundle to {path}: {error.strerror}; choose another file") from error
    return list(files)


def _status(socket: str | None) -> str:
    try:
        client = broker_if_running(socket)
        if client is None:
            return json.dumps({"broker": "none runs"})
        with client:
            status = to_builtins(client.status())
    except FractionalGPUError as error:
        return json.dumps({"broker": str(error)})
    for lease in status["leases"]:
        lease["lease"]["spec"] |= {"label": "[removed]", "owner": "[removed]"}
        lease["note"] = "[removed]"
    return json.dumps(status, indent=1)


def _logs(socket: str) -> dict[str, str]:
    logs = {}
    for name in ("broker.log", "broker.err"):
        try:
            with Path(socket).with_name(name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _LAST_BYTES))
                logs[name] = file.read().decode(errors="replace")
        except OSError:
            continue  # missing, or not readable by this user, as the findings say
    return logs
