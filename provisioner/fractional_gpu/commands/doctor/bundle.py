"""The support bundle: what somebody who is to help needs to see, in one archive, without secrets.

In it: the findings of `jupyter gpu doctor`, the status of a broker that runs, the last lines of its logs, and the versions of the packages
that matter. Not in it: configuration files, the ledger, token files, notebooks. Whatever is written is cleaned first: names of notebooks
and users, the home folder, and everything that looks like a token or a key. Read it before you send it.
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
from pathlib import Path

from msgspec import to_builtins

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.commands.doctor.finding import Finding, as_json
from fractional_gpu.commands.terminal.connection import broker_if_running
from fractional_gpu.commands.terminal.failure import CommandError
from fractional_gpu.protocol.errors import FractionalGPUError

__all__ = ["clean", "write_bundle"]

_LAST_BYTES = 1_000_000  # of each log
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
    "nvidia-ml-py",
    "cuda-bindings",
    "torch",
)
_SECRET = re.compile(r"\b[A-Za-z0-9_-]{40,}\b|(?<=Bearer )\S+|(?<=token=)\S+")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def clean(text: str) -> str:
    """Return the text without the user's name and home folder, and without what looks like a secret."""
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    user = getpass.getuser()
    if user != "root":
        text = re.sub(rf"\b{re.escape(user)}\b", "USER", text)
    return _SECRET.sub("[removed]", _DIGEST.sub("[digest]", text))


def write_bundle(path: Path, findings: Sequence[Finding], socket: str | None) -> list[str]:
    """Write the archive, mode 0600, and return the names of what is in it. Raises CommandError if it cannot be written."""
    files = {
        "doctor.json": as_json(findings),
        "versions.json": json.dumps(_versions(), indent=1),
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
        raise CommandError(f"the bundle cannot be written to {path}: {error.strerror}; choose another place") from error
    return list(files)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _status(socket: str | None) -> str:
    """Return what the broker says, without the names of notebooks and users."""
    try:
        client = broker_if_running(socket)
        if client is None:
            return json.dumps({"broker": "none runs"})
        with client:
            status = to_builtins(client.status())
    except FractionalGPUError as error:
        return json.dumps({"broker": str(error)})
    for lease in status["leases"]:
        lease["label"] = lease["owner"] = "[removed]"
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
            continue  # it never wrote one, or it is not ours to read: the findings say which
    return logs
