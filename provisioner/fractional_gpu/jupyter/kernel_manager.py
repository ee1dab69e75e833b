"""Provides a kernel manager that leaves fractional kernels running when the server stops, and takes them over when it restarts.

    c.ServerApp.kernel_manager_class = "fractional_gpu.KeepingKernelManager"
    c.SessionManager.database_filepath = "/home/me/.local/share/jupyter/sessions.sqlite"   # so that notebooks find their kernels

Only our provisioner's kernels are kept. A kernel still stops if its user shuts it down, or if its server died while starting it. A server
takes over kernels left by servers with the same root folder, unless another server already has them. Whatever stops the server must not
kill its child processes (in systemd, set `KillMode=process`).
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
from fractional_gpu.jupyter.kernel_record import RecordFile, unlocked_records
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from fractional_gpu.protocol.errors import FractionalGPUError

_CHECK_EVERY_MS = 2000
_Untyped = Any  # jupyter_server's managers and their attributes have no types


class KeepingKernelManager(AsyncMappingKernelManager):
    keeps_kernels = True  # read by the provisioner

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - jupyter_server's signature
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        for record in unlocked_records():
            self._take_over(record)
        self._file_check = PeriodicCallback(self._restore_files, _CHECK_EVERY_MS)
        self._file_check.start()

    def _restore_files(self) -> None:
        for manager in list(self._kernels.values()):
            provisioner = getattr(manager, "provisioner", None)
            if isinstance(provisioner, FractionalGPUProvisioner) and provisioner.is_kept:
                provisioner.restore_files()

    async def _async_shutdown_all(self, now: bool = False) -> None:
        self._file_check.stop()
        for kernel_id, manager in list(self._kernels.items()):
            provisioner = manager.provisioner
            if isinstance(provisioner, FractionalGPUProvisioner) and provisioner.is_kept:
                self._leave_to_next_server(kernel_id, manager, provisioner)
        await super()._async_shutdown_all(now=now)

    shutdown_all = _async_shutdown_all  # type: ignore[assignment] # as in jupyter_client

    def _leave_to_next_server(self, kernel_id: str, manager: "_Untyped", provisioner: FractionalGPUProvisioner) -> None:
        mapping: _Untyped = self
        mapping.stop_watching_activity(kernel_id)
        mapping.stop_buffering(kernel_id)
        manager.stop_restarter()
        manager._close_control_socket()  # noqa: SLF001 - as in its shutdown, but without ending the kernel
        manager._connection_file_written = False  # noqa: SLF001 - otherwise the manager would remove the file
        provisioner.leave_to_next_server()
        self.remove_kernel(kernel_id)
        self.log.info("Leaving kernel %s running for the next server", kernel_id)

    def _take_over(self, record: RecordFile) -> None:
        """Take over the kernel described in a record left behind by an earlier server.

        If the kernel has ended, remove the record. If its launch was never finished, end the kernel and remove the record.
        """
        try:
            content = record.read()
            if content["root_dir"] != self.root_dir:
                record.close()
                return
            if "launching" in content:
                self._end_unfinished_launch(content["launching"], record)
                return
            kernel_id = str(content["kernel_id"])
            manager = self._manager_of(content)
            provisioner = KernelProvisionerFactory.instance(parent=self).create_provisioner_instance(
                kernel_id, manager.kernel_spec, parent=manager
            )
            if not isinstance(provisioner, FractionalGPUProvisioner):
                self.log.warning("Not taking over kernel %s: its kernelspec now names another provisioner", kernel_id)
                record.close()
                return
            provisioner.take_over(content["provisioner"], manager.get_connection_info(), record)
        except ProcessGoneError as error:
            self.log.info("A kernel from an earlier server has ended: %s", error)
            record.remove()
        except (OSError, TypeError, ValueError, KeyError, NoSuchKernel, FractionalGPUError) as error:
            self.log.warning("Could not take over the kernel that %s describes: %r", record.path, error)
            record.close()
        else:
            manager.provisioner = provisioner
            self._register(kernel_id, manager)

    def _end_unfinished_launch(self, lease: Mapping[str, Any], record: RecordFile) -> None:
        """End a kernel whose server died while starting it. No client knows about this kernel, and we do not know its connection."""
        pids = kill_marked("JUPYTER_GPU_LEASE", str(lease["lease_id"]))
        self.log.info(
            "An earlier server died while starting a kernel; killed the kernel's processes: %s", pids or "none yet"
        )
        record.remove()
        recall_lease(lease).release()

    def _manager_of(self, content: Mapping[str, Any]) -> "_Untyped":
        manager: _Untyped = self.kernel_manager_factory(
            connection_file=str(content["connection_file"]),
            parent=self,
            log=self.log,
            kernel_name=str(content["kernel_name"]),
            kernel_spec_manager=self.kernel_spec_manager,
        )
        manager.load_connection_info(dict(content["connection"]))
        try:
            manager.write_connection_file()
        except OSError as error:  # only other programs read it
            self.log.warning("Could not write the connection file of kernel %s: %s", content["kernel_id"], error)
        manager.kernel_id = str(content["kernel_id"])
        environment = {**os.environ, "JPY_SESSION_NAME": str(content["session_name"])}
        manager._launch_args = {"cwd": content["cwd"], "env": environment}  # noqa: SLF001 - for its restart
        manager._attempted_start = True  # noqa: SLF001 - it has started
        manager.ready.set_result(None)
        return manager

    def _register(self, kernel_id: str, manager: "_Untyped") -> None:
        self._kernels[kernel_id] = manager
        self._kernel_connections[kernel_id] = 0
        manager.execution_state, manager.reason = "starting", ""  # until its first status message
        manager.last_activity = self.last_kernel_activity
        KERNEL_CURRENTLY_RUNNING_TOTAL.labels(type=manager.kernel_name).inc()
        IOLoop.current().add_callback(self._watch, kernel_id, manager)
        self.log.info("Took over kernel %s from an earlier server", kernel_id)

    async def _watch(self, kernel_id: str, manager: "_Untyped") -> None:
        if kernel_id in self._kernels:
            mapping: _Untyped = self
            manager.start_restarter()
            if manager._restarter is not None:  # noqa: SLF001 - or an early death would change the ports that clients know
                manager._restarter._initial_startup = False  # noqa: SLF001
            await mapping._finish_kernel_start(kernel_id)  # noqa: SLF001 - its own, untyped
            if not self._initialized_culler:
                mapping.initialize_culler()
