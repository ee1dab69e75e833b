"""What outlives the broker: leases, seats, stories, usage."""
