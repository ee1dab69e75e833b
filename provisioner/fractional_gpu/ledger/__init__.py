"""What outlives the broker: leases, seats, operations, stories, usage."""

from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import (
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
