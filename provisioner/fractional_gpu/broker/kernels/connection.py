"""A kernel's Jupyter connection, checked: its fields, and where its sockets may lie.

The broker connects to a kernel's sockets with its own rights, so it connects only where no other user can have put them:

- A UNIX socket: in a folder that the kernel's user owns and no other user can write to, below folders where no other user can exchange it.
- A TCP port: of a loopback address, and none of those that system services listen on.
"""

import hashlib
import ipaddress
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from zmq.utils import z85

__all__ = ["Connection", "check_endpoints", "connection_from_json"]

_LONGEST_PATH: Final = 100  # bytes; UNIX sockets allow 107
_FIRST_PORT: Final = 1024
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A kernel's Jupyter connection, checked."""

    iopub: str
    shell: str
    key: bytes = field(repr=False)
    digest: str  # hashlib name
    curve: tuple[bytes, bytes] | None = field(repr=False)  # public and secret key, Z85


def connection_from_json(info: object) -> Connection:
    """Check a connection file's contents. Raises ValueError naming the field, what was given and what is allowed."""
    if not isinstance(info, dict):
        sentence = f"the connection is {_shown(info)}; allowed: the object that a connection file holds"
        raise ValueError(sentence)  # noqa: TRY004 - one kind of error for what was sent
    transport, ip = info.get("transport", "tcp"), info.get("ip", "127.0.0.1")
    if transport not in ("tcp", "ipc"):
        raise ValueError(f"connection field transport is {_shown(transport)}; allowed: tcp, ipc")
    if transport == "tcp" and not _is_loopback(ip):
        raise ValueError(f"connection field ip is {_shown(ip)}; allowed: a loopback address such as 127.0.0.1")
    if transport == "ipc" and not (isinstance(ip, str) and ip.startswith("/") and len(ip.encode()) <= _LONGEST_PATH):
        raise ValueError(
            f"connection field ip is {_shown(ip)}; allowed with ipc: an absolute path of at most {_LONGEST_PATH} bytes"
        )
    scheme = info.get("signature_scheme", "hmac-sha256")
    digest = scheme.removeprefix("hmac-") if isinstance(scheme, str) else ""
    if digest not in hashlib.algorithms_guaranteed or digest.startswith("shake"):
        raise ValueError(
            f"connection field signature_scheme is {_shown(scheme)}; allowed: hmac- and a digest of hashlib, as hmac-sha256"
        )
    key = info.get("key", "")
    if not isinstance(key, str):
        raise ValueError('connection field key is not text; allowed: the signing key of the kernel, or ""')  # noqa: TRY004 - one kind of error for what was sent
    return Connection(
        iopub=_endpoint(transport, ip, info, "iopub_port"),
        shell=_endpoint(transport, ip, info, "shell_port"),
        key=key.encode(),
        digest=digest,
        curve=_curve(info.get("curve_publickey"), info.get("curve_secretkey")),
    )


def check_endpoints(connection: Connection, uid: int) -> None:
    """Check the endpoints of a kernel of this user. Blocks (folders may lie on a network). Raises ValueError, one sentence."""
    for endpoint in (connection.iopub, connection.shell):
        transport, _, address = endpoint.partition("://")
        if transport == "ipc":
            _check_folder(Path(address).parent, uid)
        elif uid != 0 and int(address.rpartition(":")[2]) < _FIRST_PORT:
            raise ValueError(
                f"the kernel's port {address.rpartition(':')[2]} is one of the system's; allowed: from {_FIRST_PORT} on"
            )


def _check_folder(folder: Path, uid: int) -> None:
    advice = (
        "; start the kernel with its `ip` in a folder that its user alone can write, such as Jupyter's runtime folder"
    )
    try:
        # What the path leads to now. If another user than the owner and root could lead it elsewhere, it is refused below.
        real = Path(os.path.realpath(folder, strict=True))
        statuses = [(one, one.stat()) for one in (real, *real.parents)]
    except OSError as error:
        raise ValueError(
            f"the folder of the kernel's sockets, {folder}, cannot be used: {error.strerror}{advice}"
        ) from None
    own, above = statuses[0][1], statuses[1:]
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != uid:
        raise ValueError(
            f"{folder}, the place of the kernel's sockets, is not a folder of its user (uid {uid}){advice}"
        )
    if own.st_mode & _WRITABLE:
        mode = f"{stat.S_IMODE(own.st_mode):04o}"
        raise ValueError(f"others may write to the folder of the kernel's sockets, {folder} (mode {mode}){advice}")
    for one, status in above:
        if status.st_uid not in {uid, 0} or (status.st_mode & _WRITABLE and not status.st_mode & stat.S_ISVTX):
            raise ValueError(
                f"others may exchange the folder of the kernel's sockets, {folder}, since they may write to {one}{advice}"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _is_loopback(ip: object) -> bool:
    try:
        return ip == "localhost" or (isinstance(ip, str) and ipaddress.ip_address(ip).is_loopback)
    except ValueError:
        return False


def _curve(public: object, secret: object) -> tuple[bytes, bytes] | None:
    if public is None and secret is None:
        return None
    if not (_is_curve_key(public) and _is_curve_key(secret)):
        raise ValueError(
            "connection fields curve_publickey and curve_secretkey are not two keys of 40 Z85 characters each"
        )
    return str(public).encode(), str(secret).encode()


def _is_curve_key(key: object) -> bool:
    if not isinstance(key, str) or len(key) != 40 or not set(key.encode()) <= set(z85.Z85CHARS):
        return False
    try:
        return len(z85.decode(key)) == 32
    except (ValueError, struct.error):  # five characters can say more than 32 bits
        return False


def _endpoint(transport: str, ip: str, info: dict[str, Any], field: str) -> str:
    port = info.get(field)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ValueError(f"connection field {field} is {_shown(port)}; allowed: a port from 1 to 65535")
    if transport == "ipc":
        return f"ipc://{ip}-{port}"
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
