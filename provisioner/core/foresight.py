"""Has the forecasts learn from what happens to leases, and writes down what was foreseen when a ticket was filed.

One method per thing that happens; `changes`, `lifecycle` and `answers` call them. What takes long and changes no effect of the event it
belongs to is put off until the effects are out: the times of swaps are learnt, and a ticket's wait is foreseen once, if it still waits
after the event that filed it. What is shown to people is worked out anew whenever they ask.
"""

from provisioner.core.forecasts import Forecasts
from provisioner.core.model import Span
from provisioner.core.state import Books, Lease
from provisioner.core.waits import Waits

__all__ = ["Foresight"]


class Foresight:
    """See the module."""

    def __init__(self, books: Books, forecasts: Forecasts, *, parallel_swaps: int = 1) -> None:
        self.forecasts = forecasts
        self.waits = Waits(books, forecasts, parallel_swaps=parallel_swaps)
        self._books = books
        self._filed: list[Lease] = []
        self._swaps: list[tuple[str, str, int, int]] = []  # what `swap_finished` is to be told

    def ran(self, lease: Lease, *, busy: bool) -> None:
        """The lease began or ended to run something."""
        if busy:
            self.forecasts.cell_began(lease.lease_id, self._books.now_ms)
        else:
            self.forecasts.cell_ended(lease.lease_id, self._books.now_ms)

    def settled(self, lease: Lease) -> None:
        """The lease is resident from now on: a cell that waited for it begins now."""
        if lease.busy:
            self.forecasts.cell_began(lease.lease_id, self._books.now_ms)

    def swapped(self, kind: str, lease: Lease, mib: int) -> None:
        """The lease's operation ended as it should; it moved so many MiB."""
        device = self._books.devices.get((lease.home_id if kind == "suspend" else lease.device_id) or "")
        if device is not None and mib > 0:
            self._swaps.append((kind, device.spec.name, mib, self._books.now_ms - lease.began_ms))

    def filed(self, lease: Lease) -> None:
        """The lease has a new ticket."""
        self._filed.append(lease)

    def served(self, lease: Lease) -> None:
        """The lease has got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_ended(ticket.expected, self._books.now_ms - ticket.asked_ms)

    def gave_up(self, lease: Lease) -> None:
        """The lease does not wait any more, and has not got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_given_up(ticket.expected, self._books.now_ms - ticket.asked_ms)

    def ended(self, lease: Lease) -> None:
        """The lease is over."""
        self.forecasts.forget(lease.lease_id)

    def reflect(self) -> bool:
        """The event is dealt with: learn from its swaps, and foresee the waits of those who asked in it and still wait.

        Returns whether anything was learnt.
        """
        learns = bool(self._swaps)
        for swap in self._swaps:
            self.forecasts.swap_finished(*swap)
        self._swaps.clear()
        for lease in self._filed:
            if lease.ticket is not None and lease.ticket.expected is None:
                lease.ticket.expected = self.waits.one(lease)
        self._filed.clear()
        return learns

    def resume_ms(self, lease: Lease) -> int | None:
        """Return how long bringing a suspended lease back is expected to take, ms; None for any other."""
        device = self._books.devices.get(lease.home_id or "")
        if device is None or not lease.saved_mib:
            return None
        return self.forecasts.swap_ms("resume", device.spec.name, lease.saved_mib)

    def wait(self, lease: Lease) -> Span | None:
        """Return how long the lease's ticket will still wait."""
        return self.waits.one(lease)
