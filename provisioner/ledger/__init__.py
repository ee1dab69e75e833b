"""What outlives the broker: leases, seats, operations, stories, usage."""

from provisioner.ledger.ledger import Ledger
from provisioner.ledger.records import (
    LeaseRecord,
    LedgerError,
    OperationRecord,
    PointRecord,
    RecordError,
    SeatRecord,
    StoryLine,
    UsageRecord,
)

__all__ = [
    "LeaseRecord",
    "Ledger",
    "LedgerError",
    "OperationRecord",
    "PointRecord",
    "RecordError",
    "SeatRecord",
    "StoryLine",
    "UsageRecord",
]
