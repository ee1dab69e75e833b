"""Moving a lease to other devices: it is suspended where it is and resumed at once on its target, where room is kept for it meanwhile.

It waits with a ticket from the beginning, before all others of its priority. If its target cannot have it after all (a stranger came, the
device was lost), it is a suspended lease with a ticket like any other.
"""

from collections.abc import Sequence

from provisioner.core.changes import Changes
from provisioner.core.state import Lease

__all__ = ["begin_move", "kept_mib"]


def begin_move(changes: Changes, lease: Lease, target_ids: Sequence[str], reason: str, sentence: str) -> None:
    """Suspend the lease in order to resume it on its targets. It may have a ticket already, to grow."""
    ticket = lease.ticket
    if ticket is None:
        ticket = changes.new_ticket(first=True)
        changes.books.enqueue(lease, ticket)
        changes.requeued.add(lease.spec.pool)
    ticket.wanted = True
    ticket.kept_on = tuple(target_ids)
    changes.books.set_target(lease, target_ids)
    changes.begin_suspend(lease, reason, sentence)


def kept_mib(lease: Lease) -> int:
    """What is kept for a lease on its way, on each of its targets, MiB."""
    grows = lease.ticket.grow if lease.ticket is not None else None
    return max(lease.need_mib, grows.reserve_mib if grows is not None else 0)
