"""Recovers leases when the broker starts: finds the previous broker's leases in the ledger and among live processes."""
