"""The database of everything that must outlive the broker: leases and their histories, seats and usage."""
