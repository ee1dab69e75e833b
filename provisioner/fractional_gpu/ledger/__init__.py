"""The database of everything that outlives the broker: leases, seats, stories and usage."""
