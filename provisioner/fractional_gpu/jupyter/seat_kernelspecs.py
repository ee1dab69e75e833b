"""The launcher of a server with a seat: of our kernels it shows those that the seat suffices for. Others are shown as ever.

This is for the eyes: what a kernel may have is decided by the broker, whatever a kernelspec says. A kernelspec that is not shown can
still be started by name, and is then refused with the reason.
"""

from typing import Any

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from fractional_gpu.client.seat import Seat, own_seat
from fractional_gpu.core.units import parse_fraction_milli
from fractional_gpu.jupyter.kernelspecs import PROVISIONER_NAME
from fractional_gpu.protocol.errors import FractionalGPUError

__all__ = ["SeatKernelSpecManager"]


class SeatKernelSpecManager(KernelSpecManager):
    """For `--ServerApp.kernel_spec_manager_class`. Without a seat, none of our kernels is shown."""

    def find_kernel_specs(self) -> dict[str, str]:
        """Return the kernelspecs to show, name to folder."""
        try:
            seat = own_seat()
        except FractionalGPUError as error:
            self.log.warning("No kernel with a GPU is shown: %s", error)
            seat = None
        found: dict[str, str] = super().find_kernel_specs()
        return {name: folder for name, folder in found.items() if self._is_shown(name, seat)}

    def _is_shown(self, name: str, seat: Seat | None) -> bool:
        try:
            metadata: dict[str, Any] = self.get_kernel_spec(name).metadata or {}
        except NoSuchKernel:
            return True
        stanza = metadata.get("kernel_provisioner")
        if not isinstance(stanza, dict) or stanza.get("provisioner_name") != PROVISIONER_NAME:
            return True
        config = stanza.get("config") or {}
        if seat is None or not isinstance(config, dict) or config.get("pool", seat.pool) != seat.pool:
            return False
        try:
            return parse_fraction_milli(config.get("fraction", 0)) <= seat.fraction_milli
        except ValueError:
            return True  # it is refused with the reason when it is started
