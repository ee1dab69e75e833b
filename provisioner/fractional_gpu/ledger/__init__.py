"""The database of everything that outlives the broker: leases and their histories, seats and usage."""
