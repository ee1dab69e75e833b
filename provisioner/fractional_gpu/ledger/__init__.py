"""The database of what outlives the broker: leases, seats, stories and usage."""
