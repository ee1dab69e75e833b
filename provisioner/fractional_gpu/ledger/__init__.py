"""The data that outlives the broker: leases, seats, stories, usage."""
