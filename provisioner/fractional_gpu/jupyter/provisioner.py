"""A jupyter_client provisioner that starts kernels with a lease on a fraction of a GPU.

- The event loop never waits for the broker. All calls to the broker run in threads (see `fractional_gpu.client.threads`).
- If a kernel's first start fails, JupyterLab shows the one-sentence error in a dialog. A *re*start never fails because of the GPU, since
  Jupyter would then list the kernel as idle forever. Instead, the kernel starts without a GPU, and its first cell explains why.
- The process is attached to its lease before jupyter_client starts watching it, so jupyter_client does not restart it if attaching fails on
  the first start.
- jupyter_client may call `cleanup` twice, or never, so the broker watches for process exits itself.
- As the default provisioner, it also starts kernels whose kernelspecs name no provisioner. If there is no GPU and no broker is available,
  these start just as they would with the local provisioner.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from string import Template
from subprocess import Popen
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from tornado.web import HTTPError
from traitlets import Float, Unicode, default

from fractional_gpu.client.discovery import runtime_dir
from fractional_gpu.client.threads import in_thread
from fractional_gpu.jupyter.kernel_command import KernelPlan, parse_kernel_config, plan_kernel
from fractional_gpu.jupyter.kernel_lease import (
    KernelLease,
    attach_request,
    begin_broker_start,
    environment_with,
    environment_without,
    kernel_request,
    lease_label,
    plain_connection,
    recall_lease,
    renew_lease,
    take_lease,
)
from fractional_gpu.jupyter.kernel_process import AdoptedProcess, KernelPorts, ProcessGoneError, identity_of
from fractional_gpu.jupyter.kernel_record import RecordFile
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.messages import AttachRequest, LeaseRequest

# jupyter_client's own keywords. The other keywords come from the kernelspec's stanza.
_JUPYTER_KEYWORDS = frozenset({"kernel_id", "kernel_spec", "parent", "config", "log"})
_INTERRUPT_PATIENCE_S = 1.0  # an unblocked process has handled an interrupt by then
_SHUTDOWN_FROZEN_S = 2.0  # half of this time passes before `terminate`
_NVIDIA_PATHS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


class FractionalGPUProvisioner(LocalProvisioner):
    """A provisioner that starts a kernel manager's local kernel with a GPU lease.

    A kernelspec's `config` may contain the keys pool, fraction, memory, request, devices and priority.
    """

    process: Popen[bytes] | AdoptedProcess | None  # type: ignore[assignment] # has those parts of a Popen that we use

    default_pool: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The pool to use if a kernelspec names none.

        The environment variable JUPYTER_GPU_DEFAULT_POOL also sets it.

        Example: c.FractionalGPUProvisioner.default_pool = "teaching"
        """,
    )
    default_fraction: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The fraction of a GPU to use if a kernelspec names none.

        The environment variable JUPYTER_GPU_DEFAULT_FRACTION also sets it.

        Example: c.FractionalGPUProvisioner.default_fraction = "1/8"
        """,
    )
    broker_timeout: Float[float, int | float] = Float(
        30.0,
        config=True,
        help="""How long to wait for the broker to start or answer, in seconds.

        Example: c.FractionalGPUProvisioner.broker_timeout = 60
        """,
    )

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - jupyter_client's signature
        self._stanza = {name: kwargs.pop(name) for name in list(kwargs) if name not in _JUPYTER_KEYWORDS}
        super().__init__(**kwargs)
        self._lease: KernelLease | None = None  # kept over restarts
        self._launch_lease: KernelLease | None = None  # for the process about to start; None if it gets no GPU
        self._notice = ""
        self._plan = KernelPlan(gated=False)
        self._is_restart = False
        self._frozen_at_shutdown = False
        self._interrupt_thread: threading.Thread | None = None
        self._record: RecordFile | None = None  # None if the next server cannot find the kernel
        self._ports = KernelPorts(self.log)
        self._has_death_callback = False

    @default("default_pool")
    def _default_pool_default(self) -> str:
        return os.environ.get("JUPYTER_GPU_DEFAULT_POOL") or "default"

    @default("default_fraction")
    def _default_fraction_default(self) -> str:
        return os.environ.get("JUPYTER_GPU_DEFAULT_FRACTION") or "1/4"

    @property
    def gpu_notice(self) -> str:
        """A message that servers show if it is not empty: why the kernel has no GPU or no extension, or how its last process ended."""
        return self._notice

    @property
    def gpu_token(self) -> str | None:
        """The token of the current lease, for the server's requests."""
        return None if self._lease is None else self._lease.token or None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - see above
        """Check the kernelspec's `config`, take or renew the lease, and prepare the command and its environment.

        Raises FractionalGPUError. If this call is cancelled, a lease without a process may remain in the broker until it expires.
        """
        asked, simulate = self._config()
        environment = dict(kwargs.get("env") or os.environ)
        folder = os.fspath(kwargs.get("cwd") or Path.cwd())
        # jupyter_client will build the environment in the same way.
        own = {name: Template(text).safe_substitute(environment) for name, text in (self.kernel_spec.env or {}).items()}
        with_spec = {**environment, **own}
        if self._lease is None and self._is_named_by_kernelspec:
            # Starting a broker and probing the interpreter are both slow, so they run concurrently.
            begin_broker_start(timeout_s=self.broker_timeout, simulate=simulate)
        self._plan = await in_thread(
            plan_kernel, self.kernel_spec.argv, with_spec, folder, self.kernel_spec.language or ""
        )
        name = environment.get("JPY_SESSION_NAME") or self.kernel_spec.display_name or "kernel"
        label = lease_label(name, environment)
        request = kernel_request(asked, kernel_id=self.kernel_id or "", label=label, gated=self._plan.gated)
        self._notice = ""
        lease, notice = await self._obtain(request, simulate)
        self._launch_lease = lease
        managed = lease is not None or bool(notice)
        if managed and self._plan.obstacle:
            self.log.warning("Kernel %s starts without the GPU extension: %s", self.kernel_id, self._plan.obstacle)
            self._notice = self._notice or f"{self._plan.obstacle}."
        try:
            if self.parent is not None and self._ports.secure(self.parent):
                self.ports_cached = True  # otherwise jupyter_client would choose other ports
            launch = await super().pre_launch(**kwargs)
        except BaseException:
            if not self._is_restart:
                self.ports_cached = False  # otherwise `cleanup` would look for the ports in a missing connection
                await self._release_all()
            raise
        if managed:
            launch["cmd"] = self._plan.command(launch["cmd"])
        if lease is not None:
            launch["env"] = environment_with(lease, launch["env"])
            launch["independent"] = self._should_keep or launch.get("independent", False)
        elif notice:
            launch["env"] = environment_without(notice, launch["env"])
        return launch

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:  # noqa: ANN401 - see above
        """Start the process and attach it to its lease. Cancelling this call kills the process.

        If the broker refuses the process, the first start raises FractionalGPUError, whereas a restart launches the kernel without a GPU.
        """
        lease = self._launch_lease
        if lease is not None and self._should_keep:
            await in_thread(self._write_record, lambda: {"launching": lease.to_info()})
        try:
            connection = await super().launch_kernel(cmd, **kwargs)
            if lease is not None:
                await in_thread(self._attach, lease, connection)
        except FractionalGPUError as error:
            await self._undo_launch()
            if not self._is_restart:
                raise start_error(error) from error
            kwargs["env"] = environment_without(self._record_failure(error), kwargs["env"])
            connection = await super().launch_kernel(cmd, **kwargs)
        except BaseException:
            await self._undo_launch()
            raise
        self._is_restart = True
        if lease is not None and self._should_keep:
            await in_thread(self._write_record, lambda: self._launched(kwargs, connection))
        return connection

    async def post_launch(self, **kwargs: Any) -> None:  # noqa: ANN401 - see above
        """Register a callback for when the manager gives up on a dead kernel, because servers may then never call `cleanup`."""
        await super().post_launch(**kwargs)
        if not self._has_death_callback and self.parent is not None:
            self.parent.add_restart_callback(self._stop_after_deaths, "dead")
            self._has_death_callback = True

    def _stop_after_deaths(self) -> None:
        """Release the lease of a kernel that has died too often. If the user restarts the kernel, it gets a new lease."""
        self._ports.pause()
        lease, self._lease = self._lease, None
        if lease is not None:
            threading.Thread(target=self._release, args=(lease,), name="gpu-release", daemon=True).start()

    def _release(self, lease: KernelLease) -> None:
        try:
            lease.release()
        except FractionalGPUError as error:
            self.log.warning("Could not release the GPU lease of kernel %s: %s", self.kernel_id, error)

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the process group. An interrupt also resumes a suspended kernel if it is stuck in a GPU call."""
        process = self.process
        if isinstance(process, AdoptedProcess) and process.poll() is not None:
            return  # another process may have the pid by now
        await super().send_signal(signum)
        lease = self._lease
        is_running = self._interrupt_thread is not None and self._interrupt_thread.is_alive()
        if signum == signal.SIGINT and lease is not None and not is_running:
            # This is a daemon thread. A blocking manager's event loop stands still between two calls, and a thread of a pool would keep the
            # program from exiting.
            self._interrupt_thread = threading.Thread(
                target=self._resume_if_blocked, args=(lease,), name="gpu-interrupt", daemon=True
            )
            self._interrupt_thread.start()

    def _resume_if_blocked(self, lease: KernelLease) -> None:
        time.sleep(_INTERRUPT_PATIENCE_S)
        try:
            lease.unblock()
        except FractionalGPUError as error:
            self.log.debug("Could not resume kernel %s for its interrupt: %s", self.kernel_id, error)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Record whether the process is suspended, because it then can't exit."""
        await super().shutdown_requested(restart=restart)
        self._frozen_at_shutdown = await self._is_frozen()

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Return how long to wait for a shutdown, in seconds. This is shorter if the process might block on the GPU as it exits."""
        time_s = super().get_shutdown_wait_time(recommended)
        return min(time_s, _SHUTDOWN_FROZEN_S) if self._frozen_at_shutdown else time_s

    async def terminate(self, restart: bool = False) -> None:
        """Send SIGTERM, or SIGKILL if suspended CUDA state might keep the process from exiting."""
        if await self._is_frozen():
            await self.kill(restart=restart)
        else:
            await super().terminate(restart=restart)

    async def cleanup(self, restart: bool = False) -> None:
        """Detach the process if a restart follows. Otherwise, end the lease. Errors from the broker are logged, not raised."""
        try:
            if not restart:
                self._is_restart = False
                self._remove_record()
                await self._release_all()
            elif self._lease is not None:
                await in_thread(self._lease.detach)
        except FractionalGPUError as error:
            self.log.warning("Could not tell the GPU broker that kernel %s ended: %s", self.kernel_id, error)
        finally:
            await super().cleanup(restart=restart)

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what another process needs to take over the kernel, including the lease's id and the path of its token."""
        return {**await super().get_provisioner_info(), **self._own_info()}

    def _own_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {} if self._lease is None else {"gpu_lease": self._lease.to_info()}
        if self.process is not None:
            info["gpu_process"] = identity_of(self.process.pid)
        return info

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over the lease described by `get_provisioner_info`, and the process if it is still running."""
        await super().load_provisioner_info(provisioner_info)
        try:
            await in_thread(self._adopt, provisioner_info)
            await in_thread(self._attach_adopted)
        except ProcessGoneError as error:
            self.log.warning("Could not take over kernel %s: %s", self.kernel_id, error)

    def take_over(self, info: Mapping[str, Any], connection: KernelConnectionInfo, record: RecordFile) -> None:
        """Take over a kernel that an earlier server left running, along with its record. Raises ProcessGoneError."""
        self.pid, self.pgid, self.ip = info["pid"], info["pgid"], info["ip"]
        self.connection_info = connection
        self.ports_cached = True  # the next process gets the same ports
        self._adopt(info)
        self._record = record
        threading.Thread(target=self._attach_adopted, name="gpu-attach", daemon=True).start()

    def _adopt(self, info: Mapping[str, Any]) -> None:
        """Take over the process and the lease described by the record. Raises ProcessGoneError."""
        if (identity := info.get("gpu_process")) is not None:
            self.process = AdoptedProcess(identity)
        self._ports.adopt(self.connection_info)
        if (lease := info.get("gpu_lease")) is None:
            return
        try:
            self._lease = recall_lease(lease)
        except FractionalGPUError as error:
            self.log.warning(
                "Kernel %s keeps running, but this server cannot manage its GPU lease: %s", self.kernel_id, error
            )
        else:
            self._is_restart = True

    def _attach_adopted(self) -> None:
        """Attach the adopted process for this server. If no broker is running, this happens the next time the kernel starts."""
        lease, process = self._lease, self.process
        if lease is None or process is None:
            return
        try:
            lease.attach(self._attach_request(process.pid, self.connection_info), starts_broker=False)
        except (ProcessGoneError, FractionalGPUError) as error:
            self.log.debug("Could not yet tell the GPU broker about kernel %s's new server: %s", self.kernel_id, error)

    @property
    def is_kept(self) -> bool:
        """Whether the next server could take over the kernel."""
        return self._record is not None and self.process is not None and self.process.poll() is None

    def restore_files(self) -> None:
        """Rewrite the record and the token file if they have been removed. If writing fails, the next call tries again."""
        try:
            runtime_dir()
            if self._record is not None:
                self._record.restore()
            if self._lease is not None:
                self._lease.restore_token_file()
        except (OSError, FractionalGPUError) as error:
            self.log.debug("Could not rewrite the record or the token of kernel %s: %s", self.kernel_id, error)

    def leave_to_next_server(self) -> None:
        """Leave the kernel, its lease and its record for the next server to take over."""
        if self._record is not None:
            self._record.close()
        self._ports.release()
        self.process = self._lease = self._record = None

    @property
    def _should_keep(self) -> bool:
        return bool(getattr(getattr(self.parent, "parent", None), "keeps_kernels", False))

    def _write_record(self, content: Callable[[], Mapping[str, Any]]) -> None:
        """Write the record. If that fails, the kernel will not outlive this server. Blocks."""
        root_dir = str(getattr(getattr(self.parent, "parent", None), "root_dir", ""))
        try:
            self._record = self._record or RecordFile.create(self.kernel_id or "")
            if self._record is not None:
                self._record.write({"kernel_id": self.kernel_id, "root_dir": root_dir, **content()})
        except (OSError, ValueError, ProcessGoneError) as error:
            self._remove_record()  # otherwise the next server would consider the start unfinished, and end the process
            self.log.warning("Kernel %s will not outlive this server: %s", self.kernel_id, error)

    def _launched(self, launch: Mapping[str, Any], connection: KernelConnectionInfo) -> dict[str, Any]:
        """Return what the next server needs to take over the kernel. Raises ProcessGoneError."""
        manager: Any = self.parent
        return {
            "kernel_name": manager.kernel_name,
            "cwd": os.fspath(launch.get("cwd") or Path.cwd()),
            "session_name": launch.get("env", {}).get("JPY_SESSION_NAME", ""),
            "connection_file": manager.connection_file,
            "connection": plain_connection(connection),
            "provisioner": {"pid": self.pid, "pgid": self.pgid, "ip": self.ip, **self._own_info()},
        }

    def _remove_record(self) -> None:
        if self._record is not None:
            self._record.remove()
            self._record = None

    @property
    def _is_named_by_kernelspec(self) -> bool:
        """Whether the kernelspec itself names this provisioner."""
        return "provisioner_name" in ((self.kernel_spec.metadata or {}).get("kernel_provisioner") or {})

    def _config(self) -> tuple[LeaseRequest, str | None]:
        """Return the lease request and the simulated devices from the kernelspec's `config`. Raises FractionalGPUError."""
        try:
            return parse_kernel_config(
                self._stanza, default_pool=self.default_pool, default_fraction=self.default_fraction
            )
        except FractionalGPUError as error:
            raise start_error(error, f"Kernel {self.kernel_spec.display_name!r}: ") from None

    async def _obtain(self, request: LeaseRequest, simulate: str | None) -> tuple[KernelLease | None, str]:
        """Return the lease, or None and a sentence that explains why the kernel gets no GPU.

        The sentence is empty if there is a lease, or if the kernel should start as an ordinary kernel.
        """
        how: dict[str, Any] = {"timeout_s": self.broker_timeout, "simulate": simulate}
        try:
            if self._lease is None:
                self._lease = await in_thread(take_lease, request, **how)
            else:
                self._lease = await in_thread(renew_lease, self._lease, request, **how)
        except FractionalGPUError as error:
            if self._is_named_by_kernelspec and not self._is_restart:
                raise start_error(error) from error
            if isinstance(error, BrokerUnavailableError) and not self._is_restart and not _has_gpu():
                self.log.warning("Kernel %s starts as an ordinary kernel, without a lease: %s", self.kernel_id, error)
                return None, ""
            return None, self._record_failure(error)
        self._notice = self._lease.notice
        self._lease = replace(self._lease, notice="")  # shown only once, since the lease may outlive several processes
        return self._lease, ""

    def _record_failure(self, error: FractionalGPUError) -> str:
        """Log that the kernel gets no GPU, and return the sentence for its first cell."""
        self.log.warning("Kernel %s starts without a GPU: %s", self.kernel_id, error)
        self._notice = f"This kernel was started without a GPU: {_sentence(error)}. Restart the kernel to try again."
        return self._notice

    def _attach(self, lease: KernelLease, connection: KernelConnectionInfo) -> None:
        """Attach the new process to the lease. Raises FractionalGPUError on any failure, such as a process that has exited. Blocks."""
        process = self.process
        if process is None or process.poll() is not None:
            raise _ended_at_once(process)
        try:
            request = self._attach_request(process.pid, connection)
        except ProcessGoneError as error:  # the process has ended meanwhile
            raise _ended_at_once(process) from error
        lease.attach(request)

    def _attach_request(self, pid: int, connection: KernelConnectionInfo) -> AttachRequest:
        """Return the request to attach the process. Raises ProcessGoneError."""
        return attach_request(pid, connection, self.kernel_spec.argv, self.kernel_spec.language or "")

    async def _undo_launch(self) -> None:
        await self.kill()
        await self.wait()
        if not self._is_restart:
            self._remove_record()
            await self._release_all()

    async def _release_all(self) -> None:
        """Release the ports and end the lease. Safe to call more than once."""
        self._ports.release()
        lease, self._lease, self._launch_lease = self._lease, None, None
        if lease is not None:
            await in_thread(self._release, lease)

    async def _is_frozen(self) -> bool:
        if self._lease is None or self.process is None:
            return False
        try:
            return await in_thread(self._lease.is_frozen)
        except FractionalGPUError:
            return False  # unknown, but an ordinary shutdown also ends in a kill


def _has_gpu() -> bool:
    return any(Path(sign).exists() for sign in _NVIDIA_PATHS)


def _ended_at_once(process: Popen[bytes] | AdoptedProcess | None) -> FractionalGPUError:
    code = None if process is None else process.poll()
    how = "" if code is None else f" (exit code {code})"
    return FractionalGPUError(f"the kernel's process ended right after it started{how}; see the server's log")


# These errors concern this server. If they kept their own status, they would seem to concern the browser's login, path or request.
_ABOUT_THE_SERVER = frozenset({401, 403, 404, 413})

_Factory = Callable[[str, str], FractionalGPUError]  # takes a sentence and a reason
_classes: dict[type[FractionalGPUError], _Factory] = {}


def start_error(error: FractionalGPUError, prefix: str = "") -> FractionalGPUError:
    """Return an error of the same class and with the same reason that is also a `tornado.web.HTTPError`. Its message begins with `prefix`.

    Only an HTTPError's text reaches the browser. `POST /api/kernels` replies with its status and message. `/api/sessions` replies with its
    `str()`, so that is just the sentence.
    """
    return _class_for(type(error))(f"{prefix}{_sentence(error)}", error.reason)


def _sentence(error: FractionalGPUError) -> str:
    """Return the message on one line, with percent signs spelled out, because JupyterLab's dialog would show them doubled."""
    return " ".join(str(error).replace("%", " percent").split()).removesuffix(".")


def _class_for(kind: type[FractionalGPUError]) -> _Factory:
    if kind in _classes:
        return _classes[kind]
    status = 500 if kind.status in _ABOUT_THE_SERVER else kind.status

    class StartError(kind, HTTPError):  # type: ignore[misc, valid-type] # the class is known at run time only
        def __init__(self, message: str, reason: str) -> None:
            HTTPError.__init__(self, status, message)
            self.reason = reason  # also appears in the reply's status line: "409 no-room"
            self._text = message

        def __str__(self) -> str:
            return self._text

        def __reduce__(self) -> tuple[Callable[..., FractionalGPUError], tuple[object, ...]]:
            return _rebuild, (kind, self._text, self.reason)  # a process pool cannot find this class by its name

    StartError.__module__, StartError.__qualname__ = kind.__module__, kind.__qualname__
    StartError.__name__ = kind.__name__
    _classes[kind] = StartError
    return StartError


def _rebuild(kind: type[FractionalGPUError], message: str, reason: str) -> FractionalGPUError:
    return _class_for(kind)(message, reason)
