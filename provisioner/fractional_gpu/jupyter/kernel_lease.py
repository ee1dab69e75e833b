"""Obtains a lease for a provisioner's kernel, keeps it across restarts, and releases it along with its token file.

Every call blocks, so run it in a thread. A call that fails halfway leaves neither a lease nor a token file behind. If a server is killed,
the broker lets its leases expire. A kernel without our extension must know its device before its process starts, so each new process gets a
new lease. If the broker dies during a call, the call restarts the broker and repeats the request once. Releasing a lease never starts a
broker.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker, runtime_dir
from fractional_gpu.client.seat import own_seat
from fractional_gpu.host.process import find_ipykernel
from fractional_gpu.jupyter.kernel_process import identity_of, working_folder
from fractional_gpu.protocol.errors import (
    BrokerUnavailableError,
    ConflictError,
    ForbiddenError,
    FractionalGPUError,
    NotFoundError,
    UnauthorizedError,
)
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.messages import AttachRequest, LeaseRequest, ResumeRequest

T = TypeVar("T")
_SHORT_S = 5.0  # for calls when a kernel ends, which are prompt or fail
_LEASE_VARIABLES = (
    "JUPYTER_GPU_LEASE",
    "JUPYTER_GPU_TOKEN_FILE",
    "JUPYTER_GPU_NOTICE",
    "JUPYTER_GPU_MEMORY_MIB",
    "JUPYTER_GPU_SIMULATED_DIR",
    "JUPYTER_GPU_SIMULATED_DEVICE",
    "JUPYTER_GPU_CAP",
    "JUPYTER_GPU_DEVICE_MIB",
    "JUPYTER_GPU_CONTEXT_MIB",
    "JUPYTER_GPU_PRELOAD",
    "JUPYTER_GPU_KIND",
    "JUPYTER_GPU_MEMORY_FRACTION",
    "CUDA_CHECKPOINT_JOB_FILE",
)
_PRELOAD = "LD_PRELOAD"
_WAIT_UNGATED_MS = 10_000  # how long users accept to wait after a click in the launcher
_FROZEN_STATES = frozenset({"suspending", "suspended", "resuming", "quarantined"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLease:
    lease_id: str
    token: str = field(repr=False)  # "" if unknown
    token_file: Path
    socket: str
    reserve_mib: int
    gated: bool
    environment: Mapping[str, str]
    notice: str = ""  # how the kernel's last process ended, as text for its user

    def _client(self) -> BrokerClient:
        return BrokerClient(self.socket, token=self.token or None, timeout_s=_SHORT_S)

    def attach(self, request: AttachRequest, *, starts_broker: bool = True) -> None:
        def attach() -> None:
            with ensure_broker(self.socket, token=self.token or None) if starts_broker else self._client() as client:
                client.attach(self.lease_id, request)

        _retry_once(attach)

    def detach(self) -> None:
        with self._client() as client:
            client.detach(self.lease_id)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.token_file.unlink()
        with self._client() as client, contextlib.suppress(NotFoundError):
            client.release(self.lease_id)

    def restore_token_file(self) -> None:
        if self.token and not self.token_file.exists():
            _write_private(self.token_file, self.token)

    def to_info(self) -> dict[str, Any]:
        info = {**asdict(self), "token_file": str(self.token_file)}
        del info["token"], info["notice"]
        return info

    def is_frozen(self) -> bool:
        """Return whether the process might be unable to exit because its GPU state is saved, or is being saved or restored."""
        with self._client() as client:
            return client.lease(self.lease_id).state in _FROZEN_STATES

    def unblock(self) -> None:
        """Resume the lease if its process might be blocked in a GPU call, because an interrupt does not end such a call."""
        with BrokerClient(self.socket, token=self.token or None) as client:
            client.resume(self.lease_id, ResumeRequest(if_blocked=True))


def take_lease(request: LeaseRequest, *, timeout_s: float, simulate: str | None = None) -> KernelLease:
    """Take a new lease from the broker. If no broker is running, start one, with the simulated devices `simulate` if given.

    `timeout_s` limits the start and each call. Raises the protocol's errors, such as ConflictError if simulated devices were requested but
    the broker has real ones.
    """
    return _retry_once(lambda: _take(request, timeout_s, simulate))


def begin_broker_start(*, timeout_s: float, simulate: str | None = None) -> None:
    """If no broker is running, start one in a thread. This shortens the wait in `take_lease`, which also reports any failure."""

    def start() -> None:
        with contextlib.suppress(FractionalGPUError), ensure_broker(timeout_s=timeout_s, simulate=simulate):
            pass

    threading.Thread(target=start, name="gpu-start", daemon=True).start()


def _retry_once(call: Callable[[], T]) -> T:
    try:
        return call()
    except BrokerUnavailableError as error:
        if error.reason not in {"hung-up", "no-broker"}:
            raise
        return call()


def _take(request: LeaseRequest, timeout_s: float, simulate: str | None) -> KernelLease:
    seat = own_seat()
    if seat is not None:
        request = structs.replace(request, seat=seat.seat_id)
    with ensure_broker(timeout_s=timeout_s, token=None if seat is None else seat.token, simulate=simulate) as client:
        if simulate and not client.ping().simulated:
            raise ConflictError(
                f"this kernel is for simulated GPUs ({simulate}), but the GPU broker at {client.socket_path} has real ones; pick a "
                "kernel without (simulated) in its name, or set JUPYTER_GPU_SOCKET to another path in your own folder before you "
                "start Jupyter",
                reason="real-devices",
            )
        reply = client.create_lease(request)
        try:
            token_file = _write_token(reply.lease_id, reply.token)
        except FractionalGPUError:
            client.token = reply.token
            client.release(reply.lease_id)
            raise
    return KernelLease(
        lease_id=reply.lease_id,
        token=reply.token,
        token_file=token_file,
        socket=client.socket_path,
        reserve_mib=reply.reserve_mib,
        gated=request.gated,
        environment=reply.environment,
        notice=reply.notice,
    )


def renew_lease(
    lease: KernelLease, request: LeaseRequest, *, timeout_s: float, simulate: str | None = None
) -> KernelLease:
    def renew() -> KernelLease:
        gone = (NotFoundError, UnauthorizedError, ForbiddenError)
        how: dict[str, Any] = {"timeout_s": timeout_s, "simulate": simulate}
        with ensure_broker(lease.socket, token=lease.token or None, **how) as client, contextlib.suppress(*gone):
            may_stay = lease.token and lease.gated and request.gated
            if may_stay and (status := client.lease(lease.lease_id)).state != "ended":
                if status.pid is not None:  # the broker has not noticed that the process ended
                    client.detach(lease.lease_id)
                lease.restore_token_file()
                return lease
        with contextlib.suppress(*gone):
            lease.release()
        return take_lease(request, **how)

    return _retry_once(renew)


def recall_lease(info: Mapping[str, Any]) -> KernelLease:
    """Restore the lease from the result of `to_info`. Raises FractionalGPUError if it has ended or belongs to another user.

    If the token file is missing, requests carry no token, and the kernel's next process gets a new lease.
    """
    path = Path(info["token_file"])
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        token = ""
        try:
            with BrokerClient(info["socket"], timeout_s=_SHORT_S) as client:
                client.lease(info["lease_id"])
        except BrokerUnavailableError:
            pass  # the next cell starts a broker, and that broker finds the kernel
        except FractionalGPUError:
            raise FractionalGPUError(f"could not read the token of lease {info['lease_id']} from {path}") from error
    return KernelLease(**{**info, "token": token, "token_file": path})


def _write_token(lease_id: str, token: str) -> Path:
    path = runtime_dir() / f"{lease_id}-{secrets.token_hex(4)}.token"
    _write_private(path, token)
    return path


def _write_private(path: Path, token: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        why = f"({error.strerror}); free space there or set JUPYTER_RUNTIME_DIR"
        raise FractionalGPUError(f"could not write the lease's token to {path} {why}") from error


def lease_label(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the text as a valid lease label. If an AI agent runs this process, add the agent's name.

    Long labels are cut at the start, so that a path keeps its file name. Invalid characters become question marks.
    """
    agent = environment.get("JUPYTER_GPU_AGENT", "")
    text = f"{text} (agent {agent})" if agent else text
    return text.encode("utf-8", "replace").decode()[-MAX_NAME:]


def kernel_request(asked: LeaseRequest, *, kernel_id: str, label: str, gated: bool) -> LeaseRequest:
    return structs.replace(
        asked,
        kernel_id=kernel_id[:MAX_NAME],  # the longest allowed file name
        label=label,
        gated=gated,
        wait_ms=0 if gated else _WAIT_UNGATED_MS,
    )


def plain_connection(connection: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in connection.items()}


def attach_request(pid: int, connection: Mapping[str, Any], argv: Sequence[str], language: str) -> AttachRequest:
    contents = plain_connection(connection)
    if contents.get("transport") == "ipc":  # jupyter_client's path is relative to the kernel's working folder
        contents["ip"] = os.fspath(working_folder(pid) / contents["ip"])
    is_ipykernel = find_ipykernel(argv) is not None
    return AttachRequest(**identity_of(pid), connection=contents, language=language, ipykernel=is_ipykernel)


def environment_with(lease: KernelLease, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the lease's variables, replacing those of any lease the server itself runs under."""
    clean = {name: value for name, value in environment.items() if name not in _LEASE_VARIABLES}
    ours = dict(lease.environment)
    if (preloaded := clean.get(_PRELOAD)) and ours.get(_PRELOAD, preloaded) not in preloaded.split(":"):
        ours[_PRELOAD] = f"{preloaded}:{ours[_PRELOAD]}"
    return {
        **clean,
        **ours,
        "JUPYTER_GPU_SOCKET": lease.socket,
        "JUPYTER_GPU_LEASE": lease.lease_id,
        "JUPYTER_GPU_TOKEN_FILE": str(lease.token_file),
        "JUPYTER_GPU_MEMORY_MIB": str(lease.reserve_mib),
    }


def environment_without(notice: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a kernel without a GPU. The kernel's first cell shows the `notice`."""
    clean = {name: value for name, value in environment.items() if name not in _LEASE_VARIABLES}
    return {**clean, "CUDA_VISIBLE_DEVICES": "", "JUPYTER_GPU_NOTICE": notice}
