"""What outlives the broker: leases, operations, history."""
