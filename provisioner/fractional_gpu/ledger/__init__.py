"""The database of everything that must survive the broker: leases and their histories, seats, and usage."""
