"""What outlives the broker: leases, seats, operations, stories, usage."""
