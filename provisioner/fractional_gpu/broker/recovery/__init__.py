"""Recovery at the broker's start: finds the leases of the previous broker in the ledger and from live processes."""
