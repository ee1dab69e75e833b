"""What outlives the broker: leases, operations, stories."""

from provisioner.ledger.ledger import Ledger
from provisioner.ledger.records import LeaseRecord, LedgerError, OperationRecord, RecordError, StoryLine

__all__ = ["LeaseRecord", "Ledger", "LedgerError", "OperationRecord", "RecordError", "StoryLine"]
