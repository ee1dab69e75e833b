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

__all__ = ["Runtime"]


class Runtime(Protocol):
    """The broker, as its parts see it. All methods run on the event loop; `Broker` documents them."""

    @property
    def arbiter(self) -> Arbiter: ...  # noqa: D102
    @property
    def monitor(self) -> Monitor: ...  # noqa: D102
    @property
    def kernels(self) -> Mapping[str, "Kernel"]: ...  # noqa: D102
    @property
    def devices(self) -> Mapping[str, DeviceInfo]: ...  # noqa: D102
    def dispatch(self, event: Event) -> list[Effect]: ...  # noqa: D102
    def environment(self, lease_id: str, device_ids: Sequence[str]) -> dict[str, str]: ...  # noqa: D102
    def exited(self, kernel: "Kernel") -> None: ...  # noqa: D102
    def sync_busy_state(self, kernel: "Kernel") -> None: ...  # noqa: D102
    def may_use(self, kernel: "Kernel") -> tuple[str, ...]: ...  # noqa: D102
    def process_gone(self, kernel: "Kernel", identity: ProcessIdentity) -> None: ...  # noqa: D102
    def roots(self) -> list[ProcessIdentity]: ...  # noqa: D102
    def save(self, kernel: "Kernel", *, limit: bool = False) -> None: ...  # noqa: D102
    def views(self) -> list[tuple["Kernel", LeaseView]]: ...  # noqa: D102
