"""A Jupyter server that leaves its fractional kernels running when it stops, and finds them again when it starts.

    c.ServerApp.kernel_manager_class = "fractional_gpu.KeepingKernelManager"
    c.SessionManager.database_filepath = "/home/me/.local/share/jupyter/sessions.sqlite"   # notebooks find their kernels, too

- Only kernels of our provisioner are kept; others are shut down as ever. A kernel that is shut down on purpose is over.
- A kernel whose start its server did not survive is ended: it has no bytes yet.
- A server takes over kernels that were started for the same root folder and that no server has.
- A kept kernel is not told of its first server's end (`JPY_PARENT_PID`); run the server so that its stop does not kill its children
  (systemd: `KillMode=process`).
"""

import os
from collections.abc import Mapping
from typing import Any

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server.prometheus.metrics import KERNEL_CURRENTLY_RUNNING_TOTAL
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.ioloop import IOLoop, PeriodicCallback

from fractional_gpu.host.process import kill_marked
from fractional_gpu.jupyter.kernel_lease import recall_lease
from fractional_gpu.jupyter.kernel_process import ProcessGoneError
from fractional_gpu.jupyter.kernel_record import KeptRecord, kept_records
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from fractional_gpu.protocol.errors import FractionalGPUError

__all__ = ["KeepingKernelManager"]

_LOOK_EVERY_MS = 2000
_Untyped = Any  # jupyter_server's managers and their attributes have no types


class KeepingKernelManager(AsyncMappingKernelManager):
    """See the module."""

    keeps_kernels = True  # read by the provisioner

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - jupyter_server's signature
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        for record in kept_records():
            self._take_over(record)
        self._looking = PeriodicCallback(self._look_after, _LOOK_EVERY_MS)
        self._looking.start()

    def _look_after(self) -> None:
        """Put back what cleaners of the runtime folder have removed of the kept kernels' records."""
        for manager in list(self._kernels.values()):
            provisioner = getattr(manager, "provisioner", None)
            if isinstance(provisioner, FractionalGPUProvisioner) and provisioner.is_kept:
                provisioner.look_after()

    async def _async_shutdown_all(self, now: bool = False) -> None:
        """Let the kept kernels go and shut the others down."""
        self._looking.stop()
        for kernel_id, manager in list(self._kernels.items()):
            provisioner = manager.provisioner
            if isinstance(provisioner, FractionalGPUProvisioner) and provisioner.is_kept:
                self._let_go(kernel_id, manager, provisioner)
        await super()._async_shutdown_all(now=now)

    shutdown_all = _async_shutdown_all  # type: ignore[assignment] # as in jupyter_client

    def _let_go(self, kernel_id: str, manager: "_Untyped", provisioner: FractionalGPUProvisioner) -> None:
        mapping: _Untyped = self
        mapping.stop_watching_activity(kernel_id)
        mapping.stop_buffering(kernel_id)
        manager.stop_restarter()
        manager._close_control_socket()  # noqa: SLF001 - what its shutdown does, without the end of the kernel
        manager._connection_file_written = False  # noqa: SLF001 - or the file would be removed with the manager
        provisioner.let_go()
        self.remove_kernel(kernel_id)
        self.log.info("Kernel %s is left running for the next server", kernel_id)

    def _take_over(self, record: KeptRecord) -> None:
        """Bring a kernel that an earlier server left into this one; a record that is of no use (any more) is dealt with."""
        try:
            content = record.read()
            if content["root_dir"] != self.root_dir:
                record.close()
                return
            if "launching" in content:
                self._end_launch(content["launching"], record)
                return
            kernel_id = str(content["kernel_id"])
            manager = self._manager_of(content)
            provisioner = KernelProvisionerFactory.instance(parent=self).create_provisioner_instance(
                kernel_id, manager.kernel_spec, parent=manager
            )
            if not isinstance(provisioner, FractionalGPUProvisioner):
                self.log.warning("Kernel %s is no fractional one any more: its kernelspec was changed", kernel_id)
                record.close()
                return
            provisioner.take_over(content["provisioner"], manager.get_connection_info(), record)
        except ProcessGoneError as error:
            self.log.info("A kernel of an earlier server has ended: %s", error)
            record.remove()
        except (ValueError, KeyError, NoSuchKernel, FractionalGPUError) as error:
            self.log.warning("The kernel of %s is left alone: %r", record.path, error)
            record.close()
        else:
            manager.provisioner = provisioner
            self._enlist(kernel_id, manager)

    def _end_launch(self, lease: Mapping[str, Any], record: KeptRecord) -> None:
        """An earlier server died while it started this kernel: nobody has been told of it, and nobody knows how to talk to it."""
        pids = kill_marked("JUPYTER_GPU_LEASE", str(lease["lease_id"]))
        self.log.info(
            "An earlier server died while it started a kernel, whose processes are ended: %s", pids or "none yet"
        )
        record.remove()
        recall_lease(lease).release()

    def _manager_of(self, content: Mapping[str, Any]) -> "_Untyped":
        """Return a manager in the state in which its start would have left it."""
        manager: _Untyped = self.kernel_manager_factory(
            connection_file=str(content["connection_file"]),
            parent=self,
            log=self.log,
            kernel_name=str(content["kernel_name"]),
            kernel_spec_manager=self.kernel_spec_manager,
        )
        manager.load_connection_info(dict(content["connection"]))
        manager.write_connection_file()
        manager.kernel_id = str(content["kernel_id"])
        environment = {**os.environ, "JPY_SESSION_NAME": str(content["session_name"])}
        manager._launch_args = {"cwd": content["cwd"], "env": environment}  # noqa: SLF001 - for its restart
        manager._attempted_start = True  # noqa: SLF001 - it has started
        manager.ready.set_result(None)
        return manager

    def _enlist(self, kernel_id: str, manager: "_Untyped") -> None:
        self._kernels[kernel_id] = manager
        self._kernel_connections[kernel_id] = 0
        manager.execution_state, manager.reason = "starting", ""  # until its first word
        manager.last_activity = self.last_kernel_activity
        KERNEL_CURRENTLY_RUNNING_TOTAL.labels(type=manager.kernel_name).inc()
        IOLoop.current().add_callback(self._watch, kernel_id, manager)
        self.log.info("Kernel %s of an earlier server runs on here", kernel_id)

    async def _watch(self, kernel_id: str, manager: "_Untyped") -> None:
        if kernel_id in self._kernels:
            mapping: _Untyped = self
            manager.start_restarter()
            if manager._restarter is not None:  # noqa: SLF001 - or a death soon after would give it other ports than clients have
                manager._restarter._initial_startup = False  # noqa: SLF001
            await mapping._finish_kernel_start(kernel_id)  # noqa: SLF001 - its own, untyped
            if not self._initialized_culler:
                mapping.initialize_culler()
