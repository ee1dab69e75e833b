"""What the broker offers to the parts below it. They depend on this interface and the broker depends on them: no circular import."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Event
from fractional_gpu.core.model import LeaseView
from fractional_gpu.gpu.interface import DeviceInfo, Monitor
from fractional_gpu.host.process import ProcessIdentity

if TYPE_CHECKING:
    from fractional_gpu.broker.kernels.kernel import Kernel
    from fractional_gpu.broker.kernels.process_inspector import ProcessScans


class Records(Protocol):
    """What writes leases into the ledger (`LeaseRecords`), as the parts see it."""

    def save(self, kernel: "Kernel", *, limit: bool = False) -> None:
        """Write the lease as it stands; with `limit`, send the kernel its memory limit once that is on the disk. Returns at once."""

    def may_use(self, kernel: "Kernel") -> tuple[str, ...]:
        """Return the devices that the kernel may use now: it is resident, and the ledger has its reservation."""


class Runtime(Protocol):
    """The broker, as its parts see it. All methods run on the event loop."""

    @property
    def arbiter(self) -> Arbiter:
        """The arbiter, to read: it changes by `dispatch` only."""

    @property
    def monitor(self) -> Monitor:
        """What reads the devices."""

    @property
    def kernels(self) -> Mapping[str, "Kernel"]:
        """Every living lease's kernel, by lease."""

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        """The devices that the broker manages, by id."""

    @property
    def scans(self) -> "ProcessScans":
        """Passes over /proc. Any thread may use it."""

    @property
    def records(self) -> Records:
        """What writes leases into the ledger."""

    def dispatch(self, event: Event) -> list[Effect]:
        """Hand an event to the arbiter, carry out the effects that it returns, and return them."""

    def environment(self, lease_id: str, device_ids: Sequence[str]) -> dict[str, str]:
        """Return what binds a kernel to its devices and its cap; without devices, what it needs before it has any."""

    def exited(self, kernel: "Kernel") -> None:
        """Report that nothing of the kernel's process is left: what it held is free."""

    def open_gate(self, kernel: "Kernel") -> None:
        """Let the kernel's cells run if it may use its devices."""

    def process_gone(self, kernel: "Kernel", identity: ProcessIdentity) -> None:
        """Report that the kernel's process ended or is about to be replaced."""

    def roots(self) -> list[ProcessIdentity]:
        """Return the kernel processes of all leases."""

    def sync_busy_state(self, kernel: "Kernel") -> None:
        """Report to the arbiter whether the kernel is busy."""

    def views(self) -> list[tuple["Kernel", LeaseView]]:
        """Return every living lease with its kernel."""
