"""What outlives the broker: leases, seats, operations, stories, usage."""

from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import (
    LeaseRecord,
    LedgerError,
    OperationRecord,
    RecordError,
    SeatRecord,
    UsageRecord,
)

__all__ = [
    "LeaseRecord",
    "Ledger",
    "LedgerError",
    "OperationRecord",
    "RecordError",
    "SeatRecord",
    "UsageRecord",
]
