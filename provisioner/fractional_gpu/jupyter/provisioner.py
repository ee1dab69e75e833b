"""The jupyter_client provisioner: a kernel that starts with a lease on a fraction of a GPU.

Rules:

- The event loop never waits for the broker: every call to it runs in a thread (`fractional_gpu.jupyter.threads` says which kind).
- What a kernelspec asks for is checked before anything is started. What is wrong at a first start is raised as one
  sentence, for JupyterLab's dialog; a *re*start never fails for reasons of the GPU (after a failed one Jupyter lists
  the kernel as idle for ever): the kernel then starts without a GPU, and says why at its first cell.
- The process is attached to its lease in `launch_kernel`, before jupyter_client watches the process: when that fails
  at a first start, the process is killed and nothing restarts it.
- A lease ends, and the kernel's ports (`kernel_ports`) are let go, in `cleanup(restart=False)` only, which may be called
  twice, or never: the broker sees processes end by itself.
- Where the server keeps its kernels (`kernel_manager`), each is started so that it outlives the server, with a record from which
  the next one takes it over.
- As the default provisioner (`JUPYTER_DEFAULT_PROVISIONER_NAME`) it also gets kernelspecs that never asked for a GPU:
  where no broker can be had they start as they always did.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from string import Template
from subprocess import Popen
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Float, Unicode, default

from fractional_gpu.client.discovery import runtime_dir
from fractional_gpu.host.ipykernel_command import find_ipykernel, is_of_earlier_version
from fractional_gpu.jupyter.kernel_command import EARLIER_COMMAND, KernelPlan, plan_kernel
from fractional_gpu.jupyter.kernel_config import KernelConfig, parse_kernel_config
from fractional_gpu.jupyter.kernel_lease import (
    KernelLease,
    attach_request,
    begin_broker_start,
    environment_with,
    environment_without,
    recall_lease,
    renew_lease,
    take_lease,
)
from fractional_gpu.jupyter.kernel_ports import KernelPorts
from fractional_gpu.jupyter.kernel_process import AdoptedProcess, ProcessGoneError, identity_of
from fractional_gpu.jupyter.kernel_record import KeptRecord, KernelRecord
from fractional_gpu.jupyter.start_errors import sentence, start_error
from fractional_gpu.jupyter.threads import in_thread
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.messages import LeaseRequest

__all__ = ["FractionalGPUProvisioner"]

# the rest of the keywords is the stanza's
_OF_JUPYTER = frozenset({"kernel_id", "kernel_spec", "parent", "config", "log"})
_WAIT_UNGATED_MS = 10_000  # a person waits before the launcher for so long
_INTERRUPT_PATIENCE_S = 1.0  # a process that is not blocked has heard an interrupt by then
_SHUTDOWN_FROZEN_S = 2.0  # half of it passes before `terminate`
_SIGNS_OF_NVIDIA = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


class FractionalGPUProvisioner(LocalProvisioner):
    """Starts local kernels with a lease.

    One instance belongs to one kernel manager and is used by one event loop at a time.

    The keywords that a kernelspec's `config` brings are pool, fraction, memory, request, devices and priority.
    """

    process: Popen[bytes] | AdoptedProcess | None  # type: ignore[assignment] # an adopted one is as good as a Popen

    default_pool: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The pool of kernels whose kernelspec names none.

        The environment variable JUPYTER_GPU_DEFAULT_POOL sets it too.

        Example: c.FractionalGPUProvisioner.default_pool = "teaching"
        """,
    )
    default_fraction: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The fraction of kernels whose kernelspec names none.

        The environment variable JUPYTER_GPU_DEFAULT_FRACTION sets it too.

        Example: c.FractionalGPUProvisioner.default_fraction = "1/8"
        """,
    )
    broker_timeout: Float[float, int | float] = Float(
        30.0,
        config=True,
        help="""How long the broker may take to start or to answer, in seconds.

        Example: c.FractionalGPUProvisioner.broker_timeout = 60
        """,
    )

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - jupyter_client's signature
        self._stanza = {name: kwargs.pop(name) for name in list(kwargs) if name not in _OF_JUPYTER}
        super().__init__(**kwargs)
        self._lease: KernelLease | None = None  # what is held, over restarts too
        self._launching: KernelLease | None = None  # what the process that is about to start gets
        self._notice = ""
        self._plan = KernelPlan(is_ipykernel=False, gated=False)
        self._is_restart = False
        self._frozen_at_shutdown = False
        self._unblocking: threading.Thread | None = None
        self._record = KernelRecord(self.parent, self.kernel_id or "", self.log)
        self._ports = KernelPorts(self.log)
        self._hears_of_death = False

    @default("default_pool")
    def _default_pool_default(self) -> str:
        return os.environ.get("JUPYTER_GPU_DEFAULT_POOL") or "default"

    @default("default_fraction")
    def _default_fraction_default(self) -> str:
        return os.environ.get("JUPYTER_GPU_DEFAULT_FRACTION") or "1/4"

    @property
    def gpu_notice(self) -> str:
        """Why the kernel was started without a GPU or the extension, or what became of the one before; or nothing. A server shows it."""
        return self._notice

    @property
    def gpu_token(self) -> str | None:
        """The token of the lease that is held, for the server that steers it."""
        return None if self._lease is None else self._lease.token or None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - see above
        """Check the stanza, take or renew the lease, and put it into the command and the environment.

        Raises FractionalGPUError with one sentence, at a first start only. Cancelled, it may leave a lease that
        nobody has: without a
        process the broker lets it expire.
        """
        config = self._config()
        environment = dict(kwargs.get("env") or os.environ)
        folder = os.fspath(kwargs.get("cwd") or Path.cwd())
        with_spec = self._spec_environment(environment)
        if self._lease is None and self._was_asked_for:  # asking the interpreter takes as long as starting a broker
            begin_broker_start(timeout_s=self.broker_timeout, simulate=config.simulate)
        self._plan = await in_thread(plan_kernel, self.kernel_spec.argv, with_spec, folder)
        request = self._request(config, environment)
        self._notice = ""
        lease, notice = await self._obtain(request, config.simulate)
        self._launching = lease
        managed = lease is not None or bool(notice)
        if managed and self._plan.obstacle:
            self.log.warning("Kernel %s starts without the GPU extension: %s", self.kernel_id, self._plan.obstacle)
            self._notice = self._notice or f"{self._plan.obstacle}."
        try:
            if self.parent is not None and self._ports.secure(self.parent):
                self.ports_cached = True  # or jupyter_client would choose others
            launch = await super().pre_launch(**kwargs)
        except BaseException:
            if not self._is_restart:
                self.ports_cached = False  # or `cleanup` would look for them in a connection that was not made
                await self._give_back()
            raise
        if managed:
            launch["cmd"] = self._plan.command(launch["cmd"])
        if lease is not None:
            launch["env"] = environment_with(lease, launch["env"])
            launch["independent"] = self._record.is_wanted or launch.get("independent", False)
        elif notice:
            launch["env"] = environment_without(notice, launch["env"])
        return launch

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:  # noqa: ANN401 - see above
        """Start the process and attach it to its lease.

        Raises FractionalGPUError at a first start if the broker does not take it: the process is killed first, and
        the lease given back.
        """
        lease = self._launching
        if lease is not None and self._record.is_wanted:
            await in_thread(self._record.launching, lease)
        try:
            connection = await super().launch_kernel(cmd, **kwargs)
            if lease is not None:
                await in_thread(self._attach, lease, connection)
        except FractionalGPUError as error:
            await self._undo_launch()
            if not self._is_restart:
                raise start_error(error) from error
            kwargs["env"] = environment_without(self._explain(error), kwargs["env"])
            connection = await super().launch_kernel(cmd, **kwargs)
        except BaseException:
            await self._undo_launch()
            raise
        self._is_restart = True
        if lease is not None and self._record.is_wanted:
            await in_thread(self._record.launched, kwargs, connection, self._info_for_the_next)
        return connection

    async def post_launch(self, **kwargs: Any) -> None:  # noqa: ANN401 - see above
        """Hear of it when the manager starts the kernel no more: a server may then forget it without any `cleanup`."""
        await super().post_launch(**kwargs)
        if not self._hears_of_death and self.parent is not None:
            self.parent.add_restart_callback(self._will_not_restart, "dead")
            self._hears_of_death = True

    def _will_not_restart(self) -> None:
        """The kernel died too often to be started again by itself: let its lease and ports go. A user's restart takes a new lease."""
        self._ports.pause()
        lease, self._lease = self._lease, None
        if lease is not None:
            threading.Thread(target=self._release, args=(lease,), name="gpu-release", daemon=True).start()

    def _release(self, lease: KernelLease) -> None:
        try:
            lease.release()
        except FractionalGPUError as error:
            self.log.debug("The GPU lease of kernel %s ends by itself: %s", self.kernel_id, error)

    async def send_signal(self, signum: int) -> None:
        """Signal the process group; an interrupt that has no effect because the GPU state is away brings that back."""
        process = self.process
        if isinstance(process, AdoptedProcess) and process.poll() is not None:
            return  # its number may be another's by now
        await super().send_signal(signum)
        lease = self._lease
        if signum == signal.SIGINT and lease is not None and not (self._unblocking and self._unblocking.is_alive()):
            # A thread of its own: a blocking manager's event loop stands still between two calls, and a pool's thread
            # would keep this program from ending.
            self._unblocking = threading.Thread(target=self._unblock, args=(lease,), name="gpu-interrupt", daemon=True)
            self._unblocking.start()

    def _unblock(self, lease: KernelLease) -> None:
        time.sleep(_INTERRUPT_PATIENCE_S)
        try:
            lease.unblock()
        except FractionalGPUError as error:
            self.log.debug("Nothing more was done about the interrupt of kernel %s: %s", self.kernel_id, error)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Note whether the process can be relied on to end by itself."""
        await super().shutdown_requested(restart=restart)
        self._frozen_at_shutdown = await self._is_frozen()

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Return how long a shutdown may take, seconds: less for a process whose exit may be blocked by the GPU."""
        time_s = super().get_shutdown_wait_time(recommended)
        return min(time_s, _SHUTDOWN_FROZEN_S) if self._frozen_at_shutdown else time_s

    async def terminate(self, restart: bool = False) -> None:
        """Ask the process to end; one whose CUDA state is suspended could not run its exit and is killed at once."""
        if await self._is_frozen():
            await self.kill(restart=restart)
        else:
            await super().terminate(restart=restart)

    async def cleanup(self, restart: bool = False) -> None:
        """Detach the process (restart) or end the lease. A broker that does not answer is logged, not raised."""
        try:
            if not restart:
                self._is_restart = False
                self._record.remove()
                await self._give_back()
            elif self._lease is not None:
                await in_thread(self._lease.detach)
        except FractionalGPUError as error:
            self.log.warning("The GPU broker did not hear of the end of kernel %s: %s", self.kernel_id, error)
        finally:
            await super().cleanup(restart=restart)

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what another process needs to take over, the lease's id and the path of its token included."""
        return {**await super().get_provisioner_info(), **self._own_info()}

    def _own_info(self) -> dict[str, Any]:
        """Raises ProcessGoneError."""
        info: dict[str, Any] = {} if self._lease is None else {"gpu_lease": self._lease.to_info()}
        if self.process is not None:
            info["gpu_process"] = identity_of(self.process.pid)
        return info

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over what `get_provisioner_info` returned: the process, if it still runs, and its lease.

        A lease that is over is logged and not taken over.
        """
        await super().load_provisioner_info(provisioner_info)
        try:
            await in_thread(self._adopt, provisioner_info)
            await in_thread(self._attach_adopted)
        except ProcessGoneError as error:
            self.log.warning("Kernel %s cannot be taken over: %s", self.kernel_id, error)

    def take_over(self, info: Mapping[str, Any], connection: KernelConnectionInfo, record: KeptRecord) -> None:
        """Take over a kernel that an earlier server left; the record is this provisioner's from then on. Raises ProcessGoneError."""
        self.pid, self.pgid, self.ip = info["pid"], info["pgid"], info["ip"]
        self.connection_info = connection
        self.ports_cached = True  # its next process has the same
        self._adopt(info)
        self._record.adopt(record)
        threading.Thread(target=self._attach_adopted, name="gpu-attach", daemon=True).start()

    def _adopt(self, info: Mapping[str, Any]) -> None:
        """Raises ProcessGoneError."""
        if (identity := info.get("gpu_process")) is not None:
            self.process = AdoptedProcess(identity)
        self._ports.adopt(self.connection_info)
        if (lease := info.get("gpu_lease")) is None:
            return
        try:
            self._lease = recall_lease(lease)
        except FractionalGPUError as error:
            self.log.warning("Kernel %s runs on without its GPU lease being managed here: %s", self.kernel_id, error)
        else:
            self._is_restart = True

    def _attach_adopted(self) -> None:
        """Tell the broker that this process is the kernel's server now. One that does not run learns it at the kernel's next start."""
        lease, process, argv = self._lease, self.process, self.kernel_spec.argv
        if lease is None or process is None:
            return
        language, ipykernel = self.kernel_spec.language or "", find_ipykernel(argv) is not None
        try:
            request = attach_request(process.pid, dict(self.connection_info), language=language, ipykernel=ipykernel)
            lease.attach_again(request)
        except (ProcessGoneError, FractionalGPUError) as error:
            self.log.debug(
                "The GPU broker does not know yet that kernel %s has another server: %s", self.kernel_id, error
            )

    # -- kernels that outlive their server -------------------------------------------------------------------------------------

    @property
    def is_kept(self) -> bool:
        """Whether the next server could take the kernel over."""
        return self._record.exists and self.process is not None and self.process.poll() is None

    def look_after(self) -> None:
        """Put back what the next server needs, where it was removed meanwhile; what cannot be written is tried again the next time."""
        try:
            runtime_dir()
            self._record.put_back()
            if self._lease is not None:
                self._lease.put_token_back()
        except (OSError, FractionalGPUError) as error:
            self.log.debug("What the next server needs for kernel %s cannot be put back: %s", self.kernel_id, error)

    def let_go(self) -> None:
        """Leave kernel, lease and record to the next server."""
        self._record.let_go()
        self._ports.release()
        self.process = self._lease = None

    def _info_for_the_next(self) -> dict[str, Any]:
        return {"pid": self.pid, "pgid": self.pgid, "ip": self.ip, **self._own_info()}

    # -- the lease -------------------------------------------------------------------------------------------------------------

    @property
    def _was_asked_for(self) -> bool:
        """Whether the kernelspec names us (rather than nobody, and we are the default)."""
        return "provisioner_name" in ((self.kernel_spec.metadata or {}).get("kernel_provisioner") or {})

    def _config(self) -> KernelConfig:
        """Return the checked stanza. Raises FractionalGPUError with one sentence."""
        try:
            if self._was_asked_for and is_of_earlier_version(self.kernel_spec.argv):
                raise BadRequestError(EARLIER_COMMAND, reason="earlier-kernelspec")
            return parse_kernel_config(
                self._stanza, default_pool=self.default_pool, default_fraction=self.default_fraction
            )
        except FractionalGPUError as error:
            raise start_error(error, f"Kernel {self.kernel_spec.display_name!r}: ") from None

    def _spec_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the kernelspec's own variables, as jupyter_client will build it."""
        own = {
            name: Template(value).safe_substitute(environment) for name, value in (self.kernel_spec.env or {}).items()
        }
        return {**environment, **own}

    def _request(self, config: KernelConfig, environment: Mapping[str, str]) -> LeaseRequest:
        label = environment.get("JPY_SESSION_NAME") or self.kernel_spec.display_name or "kernel"
        return LeaseRequest(
            fraction_milli=config.fraction_milli,
            pool=config.pool,
            memory_mib=config.memory_mib,
            request_mib=config.request_mib,
            devices=config.devices,
            priority=config.priority,
            kernel_id=self.kernel_id or "",
            label=label[-MAX_NAME:],  # of a path the end says most
            gated=self._plan.gated,
            wait_ms=0 if self._plan.gated else _WAIT_UNGATED_MS,
        )

    async def _obtain(self, request: LeaseRequest, simulate: str | None) -> tuple[KernelLease | None, str]:
        """Return the lease, or None and why the kernel starts without (empty: it starts as if we were not there)."""
        how: dict[str, Any] = {"timeout_s": self.broker_timeout, "simulate": simulate}
        try:
            if self._lease is None:
                self._lease = await in_thread(take_lease, request, **how)
            else:
                self._lease = await in_thread(renew_lease, self._lease, request, **how)
        except FractionalGPUError as error:
            if self._is_restart:
                return None, self._explain(error)
            if self._was_asked_for:
                raise start_error(error) from error
            if isinstance(error, BrokerUnavailableError) and not _has_gpu():
                self.log.warning("Kernel %s starts as an ordinary one, without a GPU lease: %s", self.kernel_id, error)
                return None, ""
            return None, self._explain(error)
        self._notice = self._lease.notice
        self._lease = replace(self._lease, notice="")  # it is told once, and the lease may last for long
        return self._lease, ""

    def _explain(self, error: FractionalGPUError) -> str:
        """Log that the kernel gets no GPU, and return the sentence for its first cell."""
        self.log.warning("Kernel %s starts without a GPU: %s", self.kernel_id, error)
        self._notice = f"This kernel was started without a GPU: {sentence(error)}. Restart the kernel to try again."
        return self._notice

    def _attach(self, lease: KernelLease, connection: KernelConnectionInfo) -> None:
        """Attach the process that was just started (in a thread). Raises FractionalGPUError, also for one that has ended already."""
        process = self.process
        if process is None or process.poll() is not None:
            raise _ended_at_once(process)
        language = self.kernel_spec.language or ""
        ipykernel = self._plan.is_ipykernel
        try:
            request = attach_request(process.pid, dict(connection), language=language, ipykernel=ipykernel)
        except ProcessGoneError as error:  # it has ended since
            raise _ended_at_once(process) from error
        lease.attach(request)

    async def _undo_launch(self) -> None:
        """Kill a process that the broker did not take; a first start leaves no lease behind."""
        await self.kill()
        await self.wait()
        if not self._is_restart:
            self._record.remove()
            await self._give_back()

    async def _give_back(self) -> None:
        """Let the ports go and end the lease, if one is held; a second call finds none."""
        self._ports.release()
        lease, self._lease, self._launching = self._lease, None, None
        if lease is not None:
            try:
                await in_thread(lease.release)
            except FractionalGPUError as error:
                self.log.warning("The GPU lease of kernel %s could not be given back: %s", self.kernel_id, error)

    async def _is_frozen(self) -> bool:
        if self._lease is None or self.process is None:
            return False
        try:
            return await in_thread(self._lease.is_frozen)
        except FractionalGPUError:
            return False  # unknown: the usual way, which ends in a kill as well


def _has_gpu() -> bool:
    """Whether the machine has NVIDIA devices that a kernel without a lease could get at."""
    return any(Path(sign).exists() for sign in _SIGNS_OF_NVIDIA)


def _ended_at_once(process: Popen[bytes] | AdoptedProcess | None) -> FractionalGPUError:
    code = None if process is None else process.poll()
    how = "" if code is None else f" (exit code {code})"
    return FractionalGPUError(f"the kernel's process ended right after its start{how}; see the server's log")
