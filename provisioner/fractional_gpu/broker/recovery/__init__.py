"""What a broker does first: it finds the leases of the broker before it, from the ledger and from living processes."""
